"""A DAX device, or a file in its place: options, opening, measuring, and locked byte ranges.

The locks are the kernel's open file description locks. Such a lock belongs to the description that
took it: two descriptions of one process exclude each other, closing a third descriptor drops
nothing (POSIX record locks do drop), and the end of the last process that holds the description,
however it ends, frees the range.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from baton.errors import ConfigError, TransferError
from baton.transfer.devices.table import TABLE_BYTES, LockPlace, Table

if TYPE_CHECKING:
    from collections.abc import Generator


LOCK_PAUSE_S: Final = 0.005
MAX_PAUSES: Final = 2000
"""Ten seconds: who holds a table's lock holds it for about a millisecond."""

_FLOCK: Final = struct.Struct("@hhqqi4x")
_TYPES: Final = {"shared": fcntl.F_RDLCK, "exclusive": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


class DeviceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`transfer.options.shared.device`: where regions lie, instead of memfds.

    `path` is a DAX device, or a file that the operator answers for: it may not be truncated while
    it is mapped. `lock_file` is a file that all workers which use the device see: needed where they
    do not see one device node (containers).
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    lock_file: str | None = None


class RangeLocks:
    """Locks of one open file description; all are dropped by `close`, or with the last reference.

    Owned by one thread at a time.
    """

    def __init__(self, path: str) -> None:
        """Open the file that the locks are on.

        Raises:
            ConfigError: it cannot be opened for reading and writing.
        """
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(f"cannot lock {path}: {exc}") from exc

    def __del__(self) -> None:
        self.close()

    @property
    def identity(self) -> tuple[int, int]:
        """Which file it is: two descriptions exclude each other only on the same one."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Drop all locks; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def try_lock(self, kind: Literal["shared", "exclusive"], start: int, num_bytes: int) -> bool:
        """Take a range, or change how it is held; whether no other description stands against it.

        Raises:
            TransferError: the file system has no such locks.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack(kind, start, num_bytes))
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise TransferError(f"cannot lock bytes of the device: {exc}") from exc
        return True

    def unlock(self, start: int, num_bytes: int) -> None:
        """Drop this description's locks on a range."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack("none", start, num_bytes))

    def is_held_elsewhere(self, start: int, num_bytes: int) -> bool:
        """Whether another description holds a byte of the range, in any way."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _pack("exclusive", start, num_bytes))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    @contextmanager
    def exclusive(self, start: int, num_bytes: int) -> Generator[None]:
        """Hold a range alone for the length of a block; waits for it, at most ten seconds.

        Raises:
            TransferError: another process does not let go of it.
        """
        for _ in range(MAX_PAUSES):
            if self.try_lock("exclusive", start, num_bytes):
                break
            time.sleep(LOCK_PAUSE_S)
        else:
            raise TransferError(
                "another process has held the device's table for ten seconds: is one stopped?"
            )
        try:
            yield
        finally:
            self.unlock(start, num_bytes)


def _pack(kind: Literal["shared", "exclusive", "none"], start: int, num_bytes: int) -> bytes:
    return _FLOCK.pack(_TYPES[kind], os.SEEK_SET, start, num_bytes, 0)


EXTENT_ALIGNMENT_BYTES: Final = 1 << 21
"""What a DAX device maps in, unless it reports more; on a file, huge pages fit."""
CHARACTER_DEVICES: Final = Path("/sys/dev/char")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Backing:
    """An open device. `fd` is open for the length of the block that opened it."""

    path: str
    kind: Literal["dax", "file"]
    fd: int
    size_bytes: int
    align_bytes: int

    @property
    def table_bytes(self) -> int:
        """Bytes in front of the extents."""
        return self.round_up(TABLE_BYTES)

    @property
    def end_bytes(self) -> int:
        """Where extents end: the size, rounded down to the alignment."""
        return self.size_bytes // self.align_bytes * self.align_bytes

    def round_up(self, num_bytes: int) -> int:
        """The next size that can be mapped."""
        return -(-num_bytes // self.align_bytes) * self.align_bytes


@contextmanager
def open_backing(options: DeviceOptions) -> Generator[Backing]:
    """Open the operator's device for the length of a block.

    Raises:
        ConfigError: it cannot be opened, is neither a DAX device nor a file, or is too small.
    """
    try:
        fd = os.open(options.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"transfer.options.shared.device: {exc}") from exc
    try:
        yield _measure(options.path, fd)
    finally:
        os.close(fd)


def find_lock_place(options: DeviceOptions, locks: RangeLocks) -> LockPlace | None:
    """Where the locks are; None where they are on the memory's own file and so can not differ."""
    if options.lock_file is None and stat.S_ISREG(Path(options.path).stat().st_mode):
        return None
    boot = BOOT_ID.read_text(encoding="ascii").strip()
    return LockPlace(boot, *locks.identity)


def open_locks(options: DeviceOptions) -> RangeLocks:
    """The file that the device's extents are locked on, with no lock held yet.

    Raises:
        ConfigError: it cannot be opened.
    """
    return RangeLocks(options.lock_file or options.path)


def check_lock_place(options: DeviceOptions, table: Table, ours: LockPlace | None) -> None:
    """Refuse to lock another file than the others do: then no process would be kept from anything.

    What an earlier boot locked is gone, and not asked about.

    Raises:
        ConfigError: states what to configure.
    """
    if ours is None or table.locks is None or table.locks.boot != ours.boot:
        return
    if table.locks != ours:
        raise ConfigError(
            f"workers on this host lock {options.path} through another file, so that this one "
            "could get their bytes: set lock_file to one file that all of them see. If no process "
            f"uses the device: python -m baton.transfer.devices.forget {options.path}"
        )


def _measure(path: str, fd: int) -> Backing:
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        backing = Backing(path, "file", fd, status.st_size, EXTENT_ALIGNMENT_BYTES)
    elif stat.S_ISCHR(status.st_mode):
        backing = _measure_dax(path, fd, status.st_rdev)
    else:
        raise _wrong(path, "is neither a DAX device nor a file")
    if backing.end_bytes < backing.table_bytes + backing.align_bytes:
        least = backing.table_bytes + backing.align_bytes
        raise _wrong(path, f"has {backing.size_bytes} bytes; at least {least} are needed")
    return backing


def _measure_dax(path: str, fd: int, device: int) -> Backing:
    at = CHARACTER_DEVICES / f"{os.major(device)}:{os.minor(device)}"
    if (at / "subsystem").resolve().name != "dax":
        raise _wrong(path, "is a character device, but no DAX device")
    try:
        size_bytes = int((at / "size").read_text(encoding="ascii"))
    except (OSError, ValueError) as exc:
        raise _wrong(path, f"does not give its size in {at}: {exc}") from exc
    try:
        align_bytes = int((at / "align").read_text(encoding="ascii"))
    except (OSError, ValueError):
        align_bytes = EXTENT_ALIGNMENT_BYTES  # kernels before 5.10 do not report it
    return Backing(path, "dax", fd, size_bytes, max(align_bytes, EXTENT_ALIGNMENT_BYTES))


def _wrong(path: str, what: str) -> ConfigError:
    return ConfigError(f"transfer.options.shared.device: {path} {what}")
