"""A DAX device, or a file in its place: opened, measured, refused if it is something else."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from baton.errors import ConfigError
from baton.transfer.devices.locks import RangeLocks
from baton.transfer.devices.table import TABLE_BYTES, LockPlace, Table

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.transfer.devices.options import DeviceOptions

EXTENT_ALIGNMENT_BYTES: Final = 1 << 21
"""What a DAX device maps in, unless it says more; on a file, huge pages fit."""
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
    """Refuse to lock another file than the others do: nobody would be kept from anything.

    What an earlier boot locked is gone, and not asked about.

    Raises:
        ConfigError: says what to configure.
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
        raise _wrong(path, f"does not tell its size in {at}: {exc}") from exc
    try:
        align_bytes = int((at / "align").read_text(encoding="ascii"))
    except (OSError, ValueError):
        align_bytes = EXTENT_ALIGNMENT_BYTES  # kernels before 5.10 do not report it
    return Backing(path, "dax", fd, size_bytes, max(align_bytes, EXTENT_ALIGNMENT_BYTES))


def _wrong(path: str, what: str) -> ConfigError:
    return ConfigError(f"transfer.options.shared.device: {path} {what}")
