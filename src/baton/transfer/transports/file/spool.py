"""The receiver's folder, in which peers leave part files.

A locked file shows that the owner is alive: the kernel drops the lock with the process, however it
ends, so what a killed worker left behind is distinguished from what a running one uses.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.net.channel import skip_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from baton.ids import Epoch
    from baton.transfer.interface import PageArray
    from baton.transfer.scatter_gather import Geometry

SLICE_BYTES: Final = 4 << 20
ALIGNMENT_BYTES: Final = 4096
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Of a peer's files: a pipe in the place of one is opened at once, and is not waited for."""


def is_aligned(geometry: Geometry, memory: memoryview, array: PageArray) -> bool:
    """Whether all pieces begin and end where O_DIRECT wants it: they are then never staged."""
    base = np.frombuffer(memory, np.uint8).ctypes.data + array.offset_bytes
    numbers = (base, array.page_bytes, *geometry.starts.tolist(), *geometry.lengths.tolist())
    return all(number % ALIGNMENT_BYTES == 0 for number in numbers)


def remove_file(path: Path) -> None:
    """Remove a file if that is possible: what is left goes with its folder."""
    with suppress(OSError):
        path.unlink()


class OutgoingPartFile:
    """A file that has its name once it is whole. Close it if it is not finished."""

    def __init__(
        self, path: Path, batches: Iterator[list[memoryview]], *, direct: bool, sync: bool
    ) -> None:
        """Create `{path}.part`.

        Raises:
            TransferError: it cannot be created.
        """
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        self._batches, self._batch, self._sync = batches, next(batches, []), sync
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            self._fd: int | None = _open(self._part, flags, direct=direct)
        except OSError as exc:
            raise TransferError(f"cannot write a part file: {exc}") from exc

    def write_slice(self) -> bool:
        """Write some; whether the part file is whole and has its name.

        Raises:
            TransferError: it cannot be written, for want of room above all; nothing is left of it.
        """
        try:
            return self._write_slice()
        except OSError as exc:
            self.close()
            raise TransferError(f"cannot write a part file: {exc}") from exc

    def close(self) -> None:
        """Give up, unless it is whole: nothing is left. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._batch = None, []
            self._batches = iter(())
            remove_file(self._part)

    def _write_slice(self) -> bool:
        if self._fd is None:
            return True
        end = self._offset + SLICE_BYTES
        while self._batch and self._offset < end:
            buffers = _limit(self._batch, end - self._offset)
            num_bytes = _move(os.pwritev, self._fd, buffers, self._offset)
            self._offset += num_bytes
            self._batch = skip_bytes(self._batch, num_bytes) or next(self._batches, [])
        if self._batch:
            return False
        if self._sync:
            os.fdatasync(self._fd)
        fd, self._fd = self._fd, None
        try:
            os.close(fd)  # a network filesystem may find out here that there is no room
            self._part.rename(self._path)
        except OSError:
            remove_file(self._part)
            raise
        return True


class IncomingPartFile:
    """A whole file of a peer, which goes to its places. Close it to have it gone."""

    def __init__(
        self, path: Path, num_bytes: int, batches: Iterator[list[memoryview]], *, direct: bool
    ) -> None:
        """Open the file.

        Raises:
            PeerLostError: it is gone: its writer takes back what was not read when it leaves.
            ProtocolError: it is not what was announced.
        """
        self._path, self._batches, self._batch = path, batches, next(batches, [])
        self._offset = 0
        try:
            self._fd: int | None = _open(path, READ_FLAGS, direct=direct)
        except FileNotFoundError as exc:
            raise PeerLostError(f"a part file is gone: {path.name}") from exc
        except OSError as exc:
            raise ProtocolError(
                f"the peer announced a part file that cannot be read: {exc}"
            ) from exc
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            self.close()
            raise ProtocolError(
                f"the peer announced a part file of {num_bytes} bytes, it has {status.st_size}"
            )

    def read_slice(self) -> bool:
        """Bring some bytes to their places; whether that was all.

        Raises:
            ProtocolError: the file is shorter than it was, or cannot be read.
        """
        end = self._offset + SLICE_BYTES
        while self._fd is not None and self._batch and self._offset < end:
            buffers = _limit(self._batch, end - self._offset)
            try:
                num_bytes = _move(os.preadv, self._fd, buffers, self._offset)
            except OSError as exc:
                raise ProtocolError(f"a part file cannot be read: {exc}") from exc
            if num_bytes == 0:
                raise ProtocolError("a part file became shorter while it was read")
            self._offset += num_bytes
            self._batch = skip_bytes(self._batch, num_bytes) or next(self._batches, [])
        return not self._batch

    def close(self) -> None:
        """Remove the file; no byte of it goes anywhere from now on. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._batch = None, []
            self._batches = iter(())
            remove_file(self._path)


def _limit(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The first buffers, of so many bytes at most."""
    limited: list[memoryview] = []
    for buffer in buffers:
        limited.append(buffer[:num_bytes])
        num_bytes -= len(limited[-1])
        if num_bytes == 0:
            break
    return limited


def _open(path: Path, flags: int, *, direct: bool) -> int:
    """Open a file, around the page cache if that is wanted and the filesystem can."""
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            if flags & os.O_CREAT:
                remove_file(path)  # some filesystems create it and then refuse
    return os.open(path, flags, 0o600)


def _move(
    move: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    offset: int,
) -> int:
    """Write or read some bytes; by way of the page cache where the file refuses to do without."""
    try:
        return move(fd, buffers, offset)
    except OSError as exc:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if exc.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return move(fd, buffers, offset)


_log = logging.getLogger(__name__)

NAME: Final = re.compile("baton-[0-9a-f]{32}-[0-9a-f]{16}")
LOCK: Final = "lock"
PROOF: Final = "proof"
PROOF_BYTES: Final = 16


class Spool:
    """A fresh folder in `directory`. Owns it until `close`."""

    def __init__(self, directory: Path, epoch: Epoch) -> None:
        """Make and lock it.

        Raises:
            TransferError: the directory is not there, or cannot be written.
        """
        self.name = f"baton-{epoch}-{secrets.token_hex(8)}"
        self.path = directory / self.name
        self.proof = secrets.token_bytes(PROOF_BYTES)
        try:
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            shutil.rmtree(self.path, ignore_errors=True)
            raise TransferError(f"cannot keep part files in {directory}: {exc}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / PROOF).write_bytes(self.proof)
        except OSError as exc:
            self.close()
            raise TransferError(f"cannot keep part files in {directory}: {exc}") from exc

    def sweep(self, stale_after_s: float) -> None:
        """Remove other folders whose owners are dead and that are so much older than this one.

        Ages are told by the filesystem's own clock.
        """
        born_s = os.fstat(self._lock).st_mtime
        for path in self.path.parent.iterdir():
            if path == self.path or not NAME.fullmatch(path.name):
                continue
            if _is_stale(path, born_s - stale_after_s):
                _log.info("file: removing what a dead worker left: %s", path)
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, link: bytes) -> None:
        """Remove all part files of one link."""
        for path in self.path.glob(f"{link.hex()}-*"):
            remove_file(path)

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def find_spool(directory: Path, name: str, proof: bytes) -> Path:
    """A peer's folder, as this side sees it.

    Raises:
        PeerUnreachableError: this side sees another directory, or none.
    """
    path = directory / name
    try:
        found = _read_proof(path / PROOF)
    except OSError as exc:
        raise PeerUnreachableError(
            f"the peer's folder cannot be read here, is {directory} the same directory on both "
            f"sides? ({exc})"
        ) from exc
    if found != proof:
        raise PeerUnreachableError(f"{path} is not the peer's folder")
    return path


def _read_proof(path: Path) -> bytes:
    """What a proof's file has, as far as that matters."""
    fd = os.open(path, READ_FLAGS)
    try:
        return os.read(fd, PROOF_BYTES + 1)
    finally:
        os.close(fd)


def _is_stale(path: Path, youngest_s: float) -> bool:
    """Whether a folder has a lock and no process holds it any more.

    An owner that cannot be asked is alive. Of one that died before it made its lock an empty folder
    is left, which is removed here; a folder without a lock that is not empty is somebody else's.
    """
    try:
        if path.lstat().st_mtime > youngest_s:
            return False
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        with suppress(OSError):
            path.rmdir()
        return False
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.close(lock)
    return True
