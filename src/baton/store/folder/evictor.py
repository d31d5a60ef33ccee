"""Makes entries of a folder go, as its policy chooses, when there is no room for new ones."""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from baton.store.folder.demotion import VictimBody, demote
from baton.store.folder.evicted_names import EvictedNames
from baton.store.interface import NO_TENANT
from baton.store.victims import WaitingVictims, is_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.errors import StoreError
    from baton.store.capacity import Shortage, StoredEntry
    from baton.store.eviction import EvictionPolicy
    from baton.store.folder.directory import Folder
    from baton.store.folder.entries import FolderEntries
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import EntryLease, EntryName, TenantLabel, TierContext

logger = logging.getLogger(__name__)

COUNT_TOLERANCE_PARTS: Final = 64
"""One part in so many of the capacity may be counted wrongly before all entries are counted."""


class FolderEvictor:
    """One owner thread: its tier's. `num_demoted`, `num_dropped`: entries that it made go."""

    def __init__(
        self,
        folder: Folder,
        entries: FolderEntries,
        capacity: SharedCapacity,
        *,
        policy: EvictionPolicy,
        context: TierContext,
        try_lease: Callable[[EntryName], EntryLease | None],
    ) -> None:
        """What goes is put into the tier below; `try_lease` opens it before that.

        Raises:
            OSError: the folder cannot be used.
        """
        self._path, self._entries, self._capacity = folder.path, entries, capacity
        self._clock, self._below, self._try_lease = context.clock, context.below, try_lease
        self._policy = policy
        self._victims = WaitingVictims(policy, capacity.capacity_bytes)
        self._evicted = (
            EvictedNames(folder.fd, capacity.capacity_bytes) if policy.remembers else None
        )
        self._is_reported = False
        self.num_demoted = self.num_dropped = 0

    def take_evicted(self, name: EntryName) -> bool:
        """Whether an entry was evicted lately, as far as the policy asks for that; forgets it."""
        return self._evicted is not None and self._evicted.take(name)

    def evict(self, shortage: Shortage) -> None:
        """Make entries go; set the count right where it was too high.

        Raises:
            StoreError: they cannot be listed, or another process holds the lock.
        """
        if shortage.tenant == NO_TENANT:
            self._evict_any(shortage.num_bytes)
        else:
            self._evict_of_tenant(shortage.tenant, shortage.num_bytes)

    def copy_down(self, seconds: float) -> None:
        """Put entries into the tier below, the latest used first, for so long; they stay here.

        Ends early where that tier refuses one.

        Raises:
            StoreError: they cannot be listed.
        """
        if self._below is None:
            return
        ends_at = self._clock.now() + seconds
        refused: list[StoreError] = []
        entries = sorted(
            self._entries.files.iter_settled(), key=lambda entry: entry.used_at, reverse=True
        )
        in_time = takewhile(lambda _: self._clock.now() < ends_at and not refused, entries)
        demote(filter(None, map(self._read_victim, in_time)), self._below, refused.append)

    def close(self) -> None:
        """Close the files."""
        self._victims.stop_looking()
        if self._evicted is not None:
            self._evicted.close()

    def _evict_any(self, num_bytes: int) -> None:
        freed = self._evict_waiting(num_bytes)
        if freed < num_bytes:
            counted_bytes = self._capacity.peek().committed_bytes
            entries = list(self._entries.files.iter_settled())
            self._choose_victims(entries, num_bytes - freed)
            freed += self._evict_waiting(num_bytes - freed)
            self._recount_if_wrong(entries, counted_bytes, is_short=freed < num_bytes)

    def _evict_of_tenant(self, tenant: TenantLabel, num_bytes: int) -> None:
        counted_bytes = self._capacity.peek_held(tenant)
        entries = [entry for entry in self._entries.files.iter_settled() if entry.tenant == tenant]
        eviction = self._policy.choose(entries, num_bytes, self._clock.unix_now())
        for entry in eviction.requeued:
            self._entries.files.mark(entry)
        freed = self._evict_victims(eviction.victims)
        self._recount_if_wrong(entries, counted_bytes, is_short=freed < num_bytes)

    def _recount_if_wrong(
        self, entries: Sequence[StoredEntry], counted_bytes: int, *, is_short: bool
    ) -> None:
        """Killed users' removals are not counted."""
        too_much = counted_bytes - sum(entry.num_bytes for entry in entries)
        if is_short or too_much > self._capacity.capacity_bytes // COUNT_TOLERANCE_PARTS:
            self._entries.recount()

    def _evict_waiting(self, num_bytes: int) -> int:
        """Make chosen victims go until `num_bytes` are free, or none is left; bytes freed."""
        freed = num_gone = 0
        while freed < num_bytes and (victims := self._pop_victims(num_bytes - freed)):
            num_gone += len(victims)
            freed += self._evict_victims(victims)
        if self._victims.is_short:
            entries = self._victims.look_on(self._entries.files.iter_settled, num_gone)
            if entries is not None:
                self._choose_victims(entries, 0)
        return freed

    def _pop_victims(self, num_bytes: int) -> list[StoredEntry]:
        """The next victims that take up so much together; fewer where there are no more."""
        victims: list[StoredEntry] = []
        while num_bytes > 0 and (victim := self._victims.pop()) is not None:
            victims.append(victim)
            num_bytes -= victim.num_bytes
        return victims

    def _choose_victims(self, entries: Sequence[StoredEntry], num_bytes: int) -> None:
        for entry in self._victims.choose(entries, num_bytes, self._clock.unix_now()):
            self._entries.files.mark(entry)

    def _evict_victims(self, victims: Sequence[StoredEntry]) -> int:
        """Make victims go, but those used or pinned since they were chosen; bytes freed."""
        demoted: set[EntryName] = set()
        if self._below is not None:
            demoted = demote(
                filter(None, map(self._read_victim, victims)), self._below, self._report
            )
        return sum(self._evict_victim(victim, victim.name in demoted) for victim in victims)

    def _evict_victim(self, victim: StoredEntry, is_demoted: bool) -> int:  # noqa: FBT001 - counted
        victim_bytes = self._entries.remove_victim(victim)
        if victim_bytes:
            self.num_demoted += is_demoted
            self.num_dropped += not is_demoted
            if self._evicted is not None and not victim.is_protected:
                self._evicted.add(victim.name)
        return victim_bytes

    def _read_victim(self, victim: StoredEntry) -> VictimBody | None:
        """A victim as it was put, unless it was used since it was chosen, or is damaged."""
        status = self._entries.find(victim.name)
        if status is None or not is_unused(victim, self._entries.files.read(victim.name, status)):
            return None
        lease = self._try_lease(victim.name)
        if lease is None:
            return None
        with lease:
            body = memoryview(bytearray(lease.num_bytes))
            return VictimBody(victim.name, body, lease.tenant) if lease.try_read(body) else None

    def _report(self, error: StoreError) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("store: %s lost an entry (logged once): %s", self._path, error)
