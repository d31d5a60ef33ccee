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
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.errors import StoreError, mapped
from baton.store.capacity import Capacity, Shortage
from baton.store.folder.directory import FILE_MODE
from baton.store.folder.reservations import Reservations
from baton.store.folder.tenant_counts import TenantCounts
from baton.store.interface import NO_TENANT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from baton.store.folder.tenant_counts import TenantLabels
    from baton.store.interface import TenantLabel

CAPACITY_FILE: Final = "capacity"
LOCK_TIMEOUT_S: Final = 1.0
"""A user that was stopped in the middle of a change costs the others caching, no more."""
_PAUSES_S: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, *[0.05] * 18)
"""Between attempts: together the timeout. Few, since on a busy machine each takes longer."""
_COMMITTED: Final = struct.Struct("<Q")


class Removed(NamedTuple):
    """Bytes that a removed entry took up, and the place where its tenant is counted."""

    num_bytes: int
    place: int


NOTHING_REMOVED: Final = Removed(0, 0)


class SharedCapacity:
    """The counts of one folder. One owner thread; other processes have their own.

    Every change of an entry's name goes with the change of its count, under one lock. All methods
    raise StoreError where the lock cannot be had, or a system call fails: then nothing has changed,
    or the counts are too high.

    A tenant may hold `tenant_bytes`, and as much more as others write for it in the same moment:
    what is about to be kept is counted for the whole alone.
    """

    def __init__(self, folder: int, capacity_bytes: int, tenant_bytes: int | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._capacity_bytes = capacity_bytes
        self._tenant_bytes = capacity_bytes if tenant_bytes is None else tenant_bytes
        self._pauses_s: Sequence[float] = _PAUSES_S
        self._fd = os.open(CAPACITY_FILE, flags, FILE_MODE, dir_fd=folder)
        self._reservations = Reservations(folder)
        self._tenants = TenantCounts(folder)
        self.has_older_entries = self._tenants.is_new

    def try_reserve(
        self, num_bytes: int, try_take: Callable[[], bool], tenant: TenantLabel = NO_TENANT
    ) -> Shortage | None:
        """So much is about to be kept, if there is room: None then, else what must go first.

        `try_take` takes the memory for it, under the lock; False: there is too little.
        """
        with self._locked():
            too_much = self._find_excess(num_bytes, tenant)
            if too_much:
                return Shortage(too_much, tenant)
            capacity = self._read()
            if capacity.try_reserve(num_bytes) is None:
                self._reservations.take_back()
                capacity = self._read()
            reserved = capacity.try_reserve(num_bytes)
            if reserved is None:
                return Shortage(capacity.shortage(num_bytes))
            if not try_take():
                return Shortage(num_bytes)
            self._write(capacity, reserved)
            return None

    def release(self, num_bytes: int, give_back: Callable[[], None]) -> None:
        """So much of what was taken is not kept; `give_back` is called under the lock."""
        with self._locked():
            give_back()
            capacity = self._read()
            self._write(capacity, capacity.release(num_bytes))

    def commit(
        self, num_bytes: int, link: Callable[[int], int], tenant: TenantLabel = NO_TENANT
    ) -> int:
        """Link reserved entries under their names, where those are not taken; the bytes of those.

        All count twice until they are linked: what is reserved is forgotten if its writer is
        killed. `link` gets the place where the tenant is counted, and returns what the entries take
        up that it has linked.
        """
        with self._locked():
            before = self._read()
            place, held_bytes = self._tenants.find(tenant)
            self._tenants.write(place, tenant, held_bytes + num_bytes)
            both = replace(before, committed_bytes=before.committed_bytes + num_bytes)
            self._write(before, both)
            try:
                new_bytes = link(place)
            except BaseException:
                with suppress(OSError):
                    self._tenants.write(place, tenant, held_bytes)
                    self._write(both, before)
                raise
            after = before.commit(new_bytes).release(num_bytes - new_bytes)
            with suppress(OSError):  # too much is counted then, for a while
                self._write(both, after)
                if new_bytes < num_bytes:
                    self._tenants.write(place, tenant, held_bytes + new_bytes)
            return new_bytes

    def remove(self, try_remove: Callable[[], Removed]) -> int:
        """Remove an entry: `try_remove` does, and states what it was; the bytes that it took up."""
        with self._locked():
            removed = try_remove()
            capacity = self._read()
            self._write(capacity, capacity.remove(removed.num_bytes))
            self._tenants.subtract(removed.place, removed.num_bytes)
            return removed.num_bytes

    def under_lock(self, action: Callable[[], None]) -> None:
        """Change what is not counted, while no other process changes anything."""
        with self._locked():
            action()

    def recount(self, count: Callable[[], Mapping[int, int]]) -> None:
        """Look at all entries, and set right what killed users, or others, have left wrong.

        `count` returns the bytes that entries take up, by the places of their tenants.
        """
        with self._locked():
            self._reservations.take_back()
            held_bytes = count()
            os.pwrite(self._fd, _COMMITTED.pack(sum(held_bytes.values())), 0)
            self._tenants.rebuild(held_bytes)

    def peek(self) -> Capacity:
        """The counts, without the lock: a change of another's may be half way."""
        with mapped({OSError: StoreError}):
            return self._read()

    def peek_tenants(self) -> TenantLabels:
        """Whose each place is where tenants are counted, without the lock."""
        with mapped({OSError: StoreError}):
            return self._tenants.read_labels()

    def peek_held(self, tenant: TenantLabel) -> int:
        """Bytes of one tenant's entries, of all entries for `NO_TENANT`; without the lock."""
        with mapped({OSError: StoreError}):
            if tenant == NO_TENANT:
                return self._read().committed_bytes
            return self._tenants.find(tenant)[1]

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        self._tenants.close()
        self._reservations.close()

    def _find_excess(self, num_bytes: int, tenant: TenantLabel) -> int:
        """Bytes of a tenant's own entries that must go first; 0 where it is not bounded."""
        if tenant == NO_TENANT or self._tenant_bytes >= self._capacity_bytes:
            return 0
        _, held_bytes = self._tenants.find(tenant)
        return Capacity(self._tenant_bytes, held_bytes).shortage(num_bytes)

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
