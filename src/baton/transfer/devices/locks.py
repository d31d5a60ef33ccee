"""Byte ranges of a file that no other process holds, by the kernel's open file description locks.

Such a lock belongs to the description that took it: two descriptions of one process exclude each
other, closing a third descriptor drops nothing (POSIX record locks do drop), and the end of the
last process that holds the description, however it ends, frees the range.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Generator

LOCK_PAUSE_S: Final = 0.005
MAX_PAUSES: Final = 2000
"""Ten seconds: who holds a table's lock holds it for about a millisecond."""

_FLOCK: Final = struct.Struct("@hhqqi4x")
_TYPES: Final = {"shared": fcntl.F_RDLCK, "exclusive": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}


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
