"""How full a folder is, as all its users know it: two counts in a file, changed under a lock.

What is about to be written is counted before it is written, and what was removed is taken off
afterwards. So a user that is killed in between leaves too high a sum, never too low a one.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError, mapped
from baton.store.capacity import Capacity
from baton.store.folder.directory import FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

CAPACITY_FILE: Final = "capacity"
LOCK_TIMEOUT_S: Final = 1.0
"""A user that was stopped in the middle of a change costs the others caching, no more."""
_PAUSE_S: Final = 0.001
_NUM_ATTEMPTS: Final = int(LOCK_TIMEOUT_S / _PAUSE_S)
_COUNTS: Final = struct.Struct("<QQ")


class SharedCapacity:
    """The counts of one folder. One owner thread; other processes have their own.

    Every change of an entry's name goes with the change of its count, under one lock. All methods
    raise StoreError where the lock cannot be had, or a system call fails: then nothing has changed,
    or the counts are too high.
    """

    def __init__(self, folder: int, capacity_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._capacity_bytes = capacity_bytes
        self._num_attempts = _NUM_ATTEMPTS
        self._fd = os.open(CAPACITY_FILE, flags, FILE_MODE, dir_fd=folder)

    def try_reserve(self, num_bytes: int, try_take: Callable[[], bool]) -> int:
        """So much is about to be kept, if there is room: 0 then, else how much must go first.

        `try_take` takes the memory for it, under the lock; False: there is too little.
        """
        with self._locked():
            capacity = self._read()
            reserved = capacity.try_reserve(num_bytes)
            if reserved is None:
                return capacity.shortage(num_bytes)
            if not try_take():
                return num_bytes
            self._write(reserved)
            return 0

    def release(self, num_bytes: int, give_back: Callable[[], None]) -> None:
        """So much of what was taken is not kept; `give_back` is called under the lock."""
        with self._locked():
            give_back()
            self._write(self._read().release(num_bytes))

    def commit(self, num_bytes: int, try_link: Callable[[], bool]) -> bool:
        """Link a reserved entry under its name unless it exists; whether it was linked."""
        with self._locked():
            capacity = self._read()
            is_new = try_link()
            with suppress(OSError):  # it stays counted as reserved: the sum is right
                self._write(capacity.commit(num_bytes) if is_new else capacity.release(num_bytes))
            return is_new

    def remove(self, try_remove: Callable[[], int]) -> int:
        """Remove an entry: `try_remove` returns the bytes it used, 0 if it was gone already."""
        with self._locked():
            num_bytes = try_remove()
            self._write(self._read().remove(num_bytes))
            return num_bytes

    def under_lock(self, action: Callable[[], None]) -> None:
        """Change what is not counted, while no other process changes anything."""
        with self._locked():
            action()

    def recount(self, count: Callable[[], int]) -> None:
        """Look at all entries, and set right what killed users, or others, have left wrong."""
        with self._locked():
            self._write(replace(self._read(), committed_bytes=count()))

    def reset(self, count: Callable[[], int]) -> None:
        """The same with no other process here, so that nothing is pending."""
        with self._locked():
            self._write(Capacity(self._capacity_bytes, count()))

    def peek(self) -> Capacity:
        """The counts, without the lock: a change of another's may be half way."""
        with mapped({OSError: StoreError}):
            return self._read()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _read(self) -> Capacity:
        raw = os.pread(self._fd, _COUNTS.size, 0)
        counts = _COUNTS.unpack(raw) if len(raw) == _COUNTS.size else (0, 0)
        return Capacity(self._capacity_bytes, *counts)

    def _write(self, capacity: Capacity) -> None:
        os.pwrite(self._fd, _COUNTS.pack(capacity.committed_bytes, capacity.reserved_bytes), 0)

    @contextmanager
    def _locked(self) -> Generator[None]:
        self._lock()
        try:
            with mapped({OSError: StoreError}):
                yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        """Wait for the lock, but not again and again for one that was not to be had."""
        for attempt in range(self._num_attempts):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S if attempt < self._num_attempts - 1 else 0)
            else:
                self._num_attempts = _NUM_ATTEMPTS
                return
        self._num_attempts = 1
        raise StoreError(
            f"another process holds the lock of the store's count for {LOCK_TIMEOUT_S:.0f} s or "
            "longer: it was stopped, or its disk does not answer"
        )
