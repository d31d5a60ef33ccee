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

from baton.errors import StoreError, StoreFullError, mapped
from baton.store.capacity import SLACK_ENTRIES, Capacity, Shortage
from baton.store.folder.directory import FILE_MODE
from baton.store.folder.reservations import Reservations
from baton.store.folder.tenant_counts import TenantCounts
from baton.store.interface import NO_TENANT, PutResult

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from baton.store.folder.tenant_counts import TenantLabels
    from baton.store.interface import PutOutcome, TenantLabel

CAPACITY_FILE: Final = "capacity"
LOCK_TIMEOUT_S: Final = 1.0
"""A user that was stopped in the middle of a change costs the others caching, no more."""
_PAUSES_S: Final = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, *[0.05] * 18)
"""Between attempts: together the timeout. Few, since on a busy machine each takes longer."""
_COMMITTED: Final = struct.Struct("<Q")


class Removed(NamedTuple):
    """Bytes that a removed entry took up, and the place where its tenant is counted.

    `spare_bytes`: what its file takes up still, since this process keeps it and is about to write
    another entry into it.
    """

    num_bytes: int
    place: int
    spare_bytes: int = 0


NOTHING_REMOVED: Final = Removed(0, 0)


class SharedCapacity:
    """The counts of one folder. One owner thread; other processes have their own.

    Every change of an entry's name goes with the change of its count, under one lock. Methods raise
    StoreError where the lock cannot be had, or a system call fails: then nothing has changed, or
    the counts are too high.

    A tenant may hold `tenant_bytes`, and as much more as others write for it in the same moment:
    what is about to be kept is counted for the whole alone.
    """

    def __init__(self, folder: int, capacity_bytes: int, tenant_bytes: int | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.capacity_bytes = capacity_bytes
        self._tenant_bytes = capacity_bytes if tenant_bytes is None else tenant_bytes
        # Where one may hold all, the whole bounds it: a tenant's own victims cost a list each time.
        self._is_shared_out = self._tenant_bytes < capacity_bytes
        self._pauses_s: Sequence[float] = _PAUSES_S
        self._fd = os.open(CAPACITY_FILE, flags, FILE_MODE, dir_fd=folder)
        self._reservations = Reservations(folder)
        self._tenants = TenantCounts(folder)

    def check_fits(self, num_bytes: int, tenant: TenantLabel) -> None:
        """Whether so much could be kept for the tenant if nothing else were.

        Raises:
            StoreFullError: it could not.
        """
        if num_bytes > self.capacity_bytes:
            raise StoreFullError(f"entries of {num_bytes} bytes where {self.capacity_bytes} fit")
        if num_bytes > self._tenant_bytes and tenant != NO_TENANT:
            raise StoreFullError(
                f"entries of {num_bytes} bytes where a tenant may hold {self._tenant_bytes}: "
                "tenant_share is too small for them"
            )

    def try_reserve(
        self,
        num_bytes: int,
        try_take: Callable[[], bool],
        tenant: TenantLabel = NO_TENANT,
        *,
        spare_bytes: int = 0,
        slack_entries: int = SLACK_ENTRIES,
    ) -> Shortage | None:
        """So much is about to be kept, if there is room: None then, else what must go first.

        `try_take` takes the memory for it, under the lock; False: there is too little.
        `spare_bytes` of it are in files that this process keeps, and are counted already.
        `slack_entries`: for so many like it room is made besides.
        """
        added_bytes = num_bytes - spare_bytes
        with self._locked():
            if self._is_shared_out and tenant != NO_TENANT:
                _, held_bytes = self._tenants.find(tenant)
                too_much = Capacity(self._tenant_bytes, held_bytes).shortage(num_bytes)
                if too_much:
                    return Shortage(too_much, tenant)
            capacity = self._read()
            if capacity.try_reserve(added_bytes) is None:
                self._reservations.take_back()
                capacity = self._read()
            reserved = capacity.try_reserve(added_bytes)
            if reserved is None:
                return Shortage(capacity.shortage(added_bytes, slack_entries))
            if not try_take():
                return Shortage(num_bytes)
            self._write(capacity, reserved)
            return None

    def release(self, num_bytes: int) -> None:
        """So much of what this user has reserved is not kept. Needs no lock, and raises nothing.

        A lock that is not to be had is what most often keeps entries from being kept. Other users
        only read this one's record: they see too high a sum at worst.
        """
        with suppress(OSError):  # the next change of the record writes this one, too
            self._reservations.add(-num_bytes)

    def commit(
        self,
        links: Sequence[tuple[int, Callable[[int], PutOutcome]]],
        tenant: TenantLabel = NO_TENANT,
    ) -> list[PutOutcome]:
        """Link reserved entries under their names, each unless it exists; what became of each.

        `links`: the bytes that an entry takes up, and what links it, which gets the place where the
        tenant is counted. They count twice until they are linked: what is reserved is forgotten if
        its writer is killed. What is not linked is not reserved any more, either.

        Raises:
            StoreError: none was linked, and all are still reserved.
        """
        total = sum(num_bytes for num_bytes, _ in links)
        with self._locked():
            before = self._read()
            place, held_bytes = self._tenants.find(tenant)
            both = replace(before, committed_bytes=before.committed_bytes + total)
            self._tenants.write(place, tenant, held_bytes + total)
            self._write(before, both)
            outcomes = [link(place) for _, link in links]
            kept = sum(
                num_bytes
                for (num_bytes, _), outcome in zip(links, outcomes, strict=True)
                if outcome is PutResult.STORED
            )
            with suppress(OSError):  # too much is counted then, for a while
                self._write(both, before.commit(total).remove(total - kept))
                if kept != total:
                    self._tenants.write(place, tenant, held_bytes + kept)
            return outcomes

    def remove(self, try_remove: Callable[[], Removed]) -> int:
        """Remove an entry: `try_remove` does, and states what it was; the bytes that it took up."""
        with self._locked():
            removed = try_remove()
            capacity = self._read()
            after = capacity.remove(removed.num_bytes)
            reserved_bytes = after.reserved_bytes + removed.spare_bytes
            self._write(capacity, replace(after, reserved_bytes=reserved_bytes))
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

    def _read(self) -> Capacity:
        raw = os.pread(self._fd, _COMMITTED.size, 0)
        (committed_bytes,) = _COMMITTED.unpack(raw.ljust(_COMMITTED.size, b"\0"))
        return Capacity(self.capacity_bytes, committed_bytes, self._reservations.total_bytes())

    def _write(self, before: Capacity, after: Capacity) -> None:
        """What becomes more, then what becomes less: the sum is never too low in between."""
        added_bytes = after.reserved_bytes - before.reserved_bytes
        if added_bytes > 0:
            self._reservations.add(added_bytes)
        if after.committed_bytes != before.committed_bytes:
            os.pwrite(self._fd, _COMMITTED.pack(after.committed_bytes), 0)
        if added_bytes < 0:
            self._reservations.add(added_bytes)

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
