"""How full a folder is, as all its users know it: counts in files, changed under a lock.

What is about to be written is counted before it is written, and what was removed is taken off
afterwards. So a user that is killed in between leaves too high a sum, never too low a one; it is
set right when room is needed.
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
from baton.store.folder.reservations import Reservations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

CAPACITY_FILE: Final = "capacity"
LOCK_TIMEOUT_S: Final = 1.0
"""A user that was stopped in the middle of a change costs the others caching, no more."""
_PAUSES_S: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, *[0.05] * 18)
"""Between attempts: together the timeout. Few, since on a busy machine each takes longer."""
_COMMITTED: Final = struct.Struct("<Q")


class SharedCapacity:
    """The counts of one folder. One owner thread; other processes have their own.

    Every change of an entry's name goes with the change of its count, under one lock. All methods
    raise StoreError where the lock cannot be had, or a system call fails: then nothing has changed,
    or the counts are too high.
    """

    def __init__(self, folder: int, capacity_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._capacity_bytes = capacity_bytes
        self._pauses_s: Sequence[float] = _PAUSES_S
        self._fd = os.open(CAPACITY_FILE, flags, FILE_MODE, dir_fd=folder)
        self._reservations = Reservations(folder)

    def try_reserve(self, num_bytes: int, try_take: Callable[[], bool]) -> int:
        """So much is about to be kept, if there is room: 0 then, else how much must go first.

        `try_take` takes the memory for it, under the lock; False: there is too little.
        """
        with self._locked():
            if self._read().try_reserve(num_bytes) is None:
                self._reservations.take_back()
            capacity = self._read()
            reserved = capacity.try_reserve(num_bytes)
            if reserved is None:
                return capacity.shortage(num_bytes)
            if not try_take():
                return num_bytes
            self._write(capacity, reserved)
            return 0

    def release(self, num_bytes: int, give_back: Callable[[], None]) -> None:
        """So much of what was taken is not kept; `give_back` is called under the lock."""
        with self._locked():
            give_back()
            capacity = self._read()
            self._write(capacity, capacity.release(num_bytes))

    def commit(self, num_bytes: int, try_link: Callable[[], bool]) -> bool:
        """Link a reserved entry under its name unless it exists; whether it was linked.

        It counts twice until it is linked: what is reserved is forgotten if its writer is killed.
        """
        with self._locked():
            before = self._read()
            both = replace(before, committed_bytes=before.committed_bytes + num_bytes)
            self._write(before, both)
            try:
                is_new = try_link()
            except BaseException:
                with suppress(OSError):
                    self._write(both, before)
                raise
            after = before.commit(num_bytes) if is_new else before.release(num_bytes)
            with suppress(OSError):  # too much is counted then, for a while
                self._write(both, after)
            return is_new

    def remove(self, try_remove: Callable[[], int]) -> int:
        """Remove an entry: `try_remove` returns the bytes it used, 0 if it was gone already."""
        with self._locked():
            num_bytes = try_remove()
            capacity = self._read()
            self._write(capacity, capacity.remove(num_bytes))
            return num_bytes

    def under_lock(self, action: Callable[[], None]) -> None:
        """Change what is not counted, while no other process changes anything."""
        with self._locked():
            action()

    def recount(self, count: Callable[[], int]) -> None:
        """Look at all entries, and set right what killed users, or others, have left wrong."""
        with self._locked():
            self._reservations.take_back()
            os.pwrite(self._fd, _COMMITTED.pack(count()), 0)

    def peek(self) -> Capacity:
        """The counts, without the lock: a change of another's may be half way."""
        with mapped({OSError: StoreError}):
            return self._read()

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        self._reservations.close()

    def _read(self) -> Capacity:
        raw = os.pread(self._fd, _COMMITTED.size, 0)
        (committed_bytes,) = _COMMITTED.unpack(raw.ljust(_COMMITTED.size, b"\0"))
        return Capacity(self._capacity_bytes, committed_bytes, self._reservations.total_bytes())

    def _write(self, before: Capacity, after: Capacity) -> None:
        """What becomes more, then what becomes less: the sum is never too low in between."""
        if after.committed_bytes != before.committed_bytes:
            os.pwrite(self._fd, _COMMITTED.pack(after.committed_bytes), 0)
        if after.reserved_bytes != before.reserved_bytes:
            self._reservations.add(after.reserved_bytes - before.reserved_bytes)

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
        for pause_s in (*self._pauses_s, None):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if pause_s is not None:
                    time.sleep(pause_s)
            else:
                self._pauses_s = _PAUSES_S
                return
        self._pauses_s = ()
        raise StoreError(
            f"the store's count has been locked by another process for {LOCK_TIMEOUT_S:.0f} s or "
            "longer: it was stopped, or its disk does not answer"
        )
