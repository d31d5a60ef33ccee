"""A store of tiers, the quickest first: itself a `Tier`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.errors import StoreError
from baton.store.counted_tier import CountedTier
from baton.store.interface import (
    NO_TENANT,
    TIERS,
    DemotesEntries,
    HasPlaces,
    NamedBody,
    PutResult,
    TierContext,
    Usage,
    WritesBehind,
)
from baton.store.memory_lease import MemoryLease
from baton.store.puts import take_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.clock import Clock
    from baton.store.capacity import StoredEntry
    from baton.store.counted_tier import TierReport
    from baton.store.interface import (
        Body,
        EntryLease,
        EntryName,
        PeerAccess,
        PutOutcome,
        TenantLabel,
        Tier,
    )

logger = logging.getLogger(__name__)


MAX_WAITING_BYTES: Final = 32 << 20
"""Of entries that were read and are to be copied up: beyond that they are not."""
PROMOTED_BYTES: Final = 4 << 20
"""Copied up at once: a load that begins meanwhile waits for it."""


class TierRun(NamedTuple):
    """So many names one after the other, whose entries would be read from this tier."""

    tier: str
    num: int


class TieredStore:
    """See `Tier`. Entries are put into the first tier, which demotes what it has no room for.

    What is read from a lower tier is copied into the first one (see `DelaysPromotion`): at once;
    where others would have to be written into a lower tier for it, by `promote_waiting`. An entry
    too large for a tier, or put while it is full, goes to the next.
    """

    def __init__(self, tiers: Sequence[CountedTier]) -> None:
        """Take over open tiers, at least one; each hands down to the next already."""
        self.tiers = tuple(tiers)
        first = self.tiers[0].inner
        waits_below = any(not isinstance(tier.inner, WritesBehind) for tier in self.tiers[1:2])
        self._demoting = first if waits_below and isinstance(first, DemotesEntries) else None
        self._waiting: dict[EntryName, MemoryLease] = {}
        self._waiting_bytes = 0

    @property
    def places(self) -> list[Tier]:
        """The tiers, the quickest first; of one on several servers, each server by itself."""
        found: list[Tier] = []
        for tier in self.tiers:
            found += tier.inner.places if isinstance(tier.inner, HasPlaces) else [tier.inner]
        return found

    def find(self, names: Sequence[EntryName]) -> int:
        lookups = [_Lookup(tier, names) for tier in self.tiers]
        at = 0
        while at < len(names):
            found = next((n for each in lookups if (n := each.count_from(at))), 0)
            if found == 0:
                break
            at += found
        return at

    def find_runs(self, names: Sequence[EntryName]) -> list[TierRun]:
        """See `Tier.find`, by the tiers that leading names would be read from.

        Of entries that two tiers have, in the midst of those that the lower one has alone, the
        lower tier is named: to look for each of them in the upper one would take longer.
        """
        lookups = [_Lookup(tier, names) for tier in self.tiers]
        runs: list[TierRun] = []
        at = 0
        while at < len(names):
            found = ((place, n) for place, each in enumerate(lookups) if (n := each.count_from(at)))
            place, num = next(found, (0, 0))
            if num == 0:
                break
            stop = at + num
            for upper in lookups[:place]:
                stop = upper.find_tail(at, stop)
            runs.append(TierRun(self.tiers[place].kind, stop - at))
            at = stop
        return runs

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return take_one(self.put_many((NamedBody(name, body),), tenant))

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> list[PutOutcome]:
        """See `PutsMany`."""
        # A tier that is a round trip away is not asked first: an entry may be in two tiers.
        lower = [tier for tier in self.tiers[1:] if tier.remote is None]
        outcomes: list[PutOutcome | None] = [
            PutResult.EXISTS if any(tier.find((entry.name,)) for tier in lower) else None
            for entry in entries
        ]
        for tier in self.tiers:
            left = [
                at
                for at, outcome in enumerate(outcomes)
                if outcome is None or isinstance(outcome, StoreError)
            ]
            if not left:
                break
            done = tier.put_many([entries[at] for at in left], tenant)
            for at, outcome in zip(left, done, strict=True):
                if isinstance(outcome, StoreError):
                    logger.debug("store: %s does not keep an entry: %s", tier.kind, outcome)
                outcomes[at] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def try_lease(self, name: EntryName) -> EntryLease | None:
        first, *others = self.tiers
        lease = first.try_lease(name)
        if lease is not None:
            return lease
        for tier in others:
            lease = tier.try_lease(name)
            if lease is not None and tier.is_copied_up(name):
                lease = self._promote(name, lease)
            if lease is not None:
                return lease
        return None

    def try_lease_newest(self, name: EntryName) -> EntryLease | None:
        """See `LeasesNewest`."""
        for tier in reversed(self.tiers):
            if tier.find((name,)):
                return tier.try_lease(name)
        return None

    def promote_waiting(self) -> bool:
        """Copy up a batch of entries that were read while the first tier had no room.

        Returns:
            Whether more of them wait.
        """
        if not self._waiting:
            return False
        tenant, num_bytes = next(iter(self._waiting.values())).tenant, 0
        batch: list[tuple[EntryName, MemoryLease]] = []
        for name, read in self._waiting.items():
            num_bytes += read.num_bytes
            if batch and (num_bytes > PROMOTED_BYTES or read.tenant != tenant):
                break
            batch.append((name, read))
        for name, _ in batch:
            self._drop_waiting(name)
        self._copy_up(batch)
        return bool(self._waiting)

    def discard(self, name: EntryName) -> None:
        self._drop_waiting(name)
        for tier in self.tiers:
            tier.discard(name)

    def entries(self) -> list[StoredEntry]:
        """See `Tier`: of all tiers; an entry in two of them is there twice."""
        return [entry for tier in self.tiers for entry in tier.entries()]

    def is_whole(self, name: EntryName) -> bool:
        """See `Tier`: in the first tier that has it."""
        holders = (tier for tier in self.tiers if tier.find((name,)))
        return any(tier.is_whole(name) for tier in list(holders)[:1])

    def usage(self) -> Usage:
        """See `Tier`: of all tiers together."""
        usages = [tier.usage() for tier in self.tiers]
        return Usage(
            used_bytes=sum(usage.used_bytes for usage in usages),
            capacity_bytes=sum(usage.capacity_bytes for usage in usages),
            num_demoted=sum(usage.num_demoted for usage in usages),
            num_dropped=sum(usage.num_dropped for usage in usages),
            num_damaged=sum(usage.num_damaged for usage in usages),
            num_expired=sum(usage.num_expired for usage in usages),
            num_read_errors=sum(usage.num_read_errors for usage in usages),
        )

    def reports(self) -> list[TierReport]:
        """What was counted of each tier. From any thread.

        Raises:
            StoreError: a tier cannot be looked at.
        """
        return [tier.report() for tier in self.tiers]

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _promote(self, name: EntryName, lease: EntryLease) -> EntryLease | None:
        """Copy an entry up, now or later; a lease of what was read, None if it is damaged."""
        try:
            body = memoryview(bytearray(lease.num_bytes))
        except MemoryError:
            return lease
        with lease:
            if not lease.try_read(body):
                return None
            read = MemoryLease(body, lease.tenant)
        if self._must_wait(len(body)):
            self._add_waiting(name, read)
        else:
            self._copy_up([(name, read)])
        return read

    def _must_wait(self, num_bytes: int) -> bool:
        """Whether others would be written into the tier below first, and a load wait for that."""
        try:
            return self._demoting is not None and not self._demoting.has_room(num_bytes)
        except StoreError:
            return True

    def _add_waiting(self, name: EntryName, read: MemoryLease) -> None:
        self._drop_waiting(name)
        if self._waiting_bytes + read.num_bytes <= MAX_WAITING_BYTES:
            self._waiting[name] = read
            self._waiting_bytes += read.num_bytes

    def _drop_waiting(self, name: EntryName) -> None:
        read = self._waiting.pop(name, None)
        if read is not None:
            self._waiting_bytes -= read.num_bytes

    def _copy_up(self, reads: Sequence[tuple[EntryName, MemoryLease]]) -> None:
        """Put entries of one tenant into the first tier."""
        entries = [NamedBody(name, read.body) for name, read in reads]
        for outcome in self.tiers[0].put_many(entries, reads[0][1].tenant):
            if isinstance(outcome, StoreError):
                logger.debug("store: an entry stays where it is: %s", outcome)


class _Lookup:
    """One tier's answers during one `find`: a remote tier is asked once for all names."""

    def __init__(self, tier: CountedTier, names: Sequence[EntryName]) -> None:
        self._tier, self._names = tier, names
        self._start = 0
        self._there: Sequence[bool] | None = None

    def count_from(self, at: int) -> int:
        """How many names from `at` on are in this tier, without a gap."""
        if self._tier.remote is None:
            return self._tier.find(self._names[at:])
        if self._there is None:
            self._start = at
            self._there = self._tier.remote.find_each(self._names[at:])
        there = self._there[at - self._start :]
        return next((i for i, is_there in enumerate(there) if not is_there), len(there))

    def find_tail(self, start: int, stop: int) -> int:
        """From where on this tier has all names up to `stop`, which is returned for none.

        It does not have the one at `start`. What was used last is at the end of a prompt, so the
        rest is searched by halves.
        """
        missing, there = start, stop
        if not self._has(stop - 1):
            return stop
        while there - missing > 1:
            middle = (missing + there) // 2
            if self._has(middle):
                there = middle
            else:
                missing = middle
        return there if there + self.count_from(there) >= stop else stop

    def _has(self, at: int) -> bool:
        if self._tier.remote is None:
            return bool(self._tier.find(self._names[at : at + 1]))
        return self.count_from(at) > 0


def open_store(  # noqa: PLR0913 - what each tier is built from
    kinds: Sequence[str],
    options: Mapping[str, Mapping[str, object]],
    *,
    cluster: str,
    key: bytes,
    clock: Clock,
    other_names: tuple[str, ...] = (),
    may_create: bool = True,
    peers: PeerAccess | None = None,
) -> TieredStore:
    """Open the tiers of these kinds, the quickest first, from the last to the first.

    Raises:
        ConfigError: one of them cannot be opened, or its options make no sense; none stays open.
    """
    tiers: list[CountedTier] = []
    with ExitStack() as opened:
        for kind in reversed(kinds):
            below = tiers[0].as_lower() if tiers else None
            factory = TIERS.build(kind, options.get(kind, {}))
            context = TierContext(cluster, key, clock, below, other_names, may_create, peers)
            tiers.insert(0, CountedTier(kind, factory(context)))
            opened.callback(tiers[0].close)
        opened.pop_all()
    return TieredStore(tiers)
