"""What users of a folder are about to write: a record of each of them, in one file.

A user holds a lock on its record for as long as it lives (an open file description's lock, which
the kernel drops with the process). So what a killed one was about to write is known, and is taken
back while the folder is in use.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.store.folder.directory import FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Sequence

RESERVED_FILE: Final = "reserved"
MAX_USERS: Final = 128
_RECORDS: Final = struct.Struct(f"<{MAX_USERS}Q")
_ALL_ZERO: Final = bytes(_RECORDS.size)
_RECORD: Final = struct.Struct("<Q")
_FLOCK: Final = struct.Struct("hhqqi")
"""`struct flock` of Linux: type, whence, start, length, process."""


class Reservations:
    """One user's record, and a view of all.

    Owner: who holds the lock of the folder's counts. To add less than nothing takes no lock.
    """

    def __init__(self, folder: int) -> None:
        """Take a record.

        Raises:
            ConfigError: there are too many users.
            OSError: the file cannot be used.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(RESERVED_FILE, flags, FILE_MODE, dir_fd=folder)
        self._own_bytes = 0
        try:
            self._index = self._take_record()
        except BaseException:
            os.close(self._fd)
            raise

    def total_bytes(self) -> int:
        """Of all users; of killed ones too, until `take_back`."""
        raw = os.pread(self._fd, _RECORDS.size, 0)
        if raw == _ALL_ZERO[: len(raw)]:  # mostly
            return 0
        return sum(_unpack(raw))

    def add(self, num_bytes: int) -> None:
        """So much more, or less, is about to be written by this user.

        Raises:
            OSError: the record stays as it was. The next call writes what has become less, too.
        """
        own_bytes = max(0, self._own_bytes + num_bytes)
        self._own_bytes = min(self._own_bytes, own_bytes)
        self._write(self._index, own_bytes)
        self._own_bytes = own_bytes

    def take_back(self) -> None:
        """Forget what killed users were about to write."""
        for index, num_bytes in enumerate(_unpack(os.pread(self._fd, _RECORDS.size, 0))):
            if num_bytes and index != self._index and self._try_lock(index):
                self._write(index, 0)
                self._lock(index, fcntl.F_UNLCK)

    def close(self) -> None:
        """Leave the record to others."""
        os.close(self._fd)

    def _take_record(self) -> int:
        for index in range(MAX_USERS):
            if self._try_lock(index):
                self._write(index, 0)  # a killed user's
                return index
        raise ConfigError(f"a store's folder has no more than {MAX_USERS} users at once")

    def _write(self, index: int, num_bytes: int) -> None:
        os.pwrite(self._fd, _RECORD.pack(num_bytes), index * _RECORD.size)

    def _try_lock(self, index: int) -> bool:
        try:
            self._lock(index, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        return True

    def _lock(self, index: int, kind: int) -> None:
        offset = index * _RECORD.size
        lock = _FLOCK.pack(kind, os.SEEK_SET, offset, _RECORD.size, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)


def _unpack(raw: bytes) -> Sequence[int]:
    return _RECORDS.unpack(raw.ljust(_RECORDS.size, b"\0"))
