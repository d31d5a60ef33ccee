"""What the store holds, as far as this worker knows: for gateways, by way of the worker's journal.

    kept, or found present ──► looked for in each place ──► reported there ──gone──► reported so

Any process may evict an entry, and none reports that: names of entries do not show their tokens. So
each worker looks again and again for the entries that it has reported itself, all of them within
`ROUND_S` where that takes at most `BUSY_SHARE` of its thread's time; in a place where looking costs
money for a batch in `BILLED_WAIT_S`, and for its identity in `BILLED_IDENTITY_S`. A server that
does not answer keeps what was reported of it: its entries are there still when it is back. What a
restarted worker does not report is reported again when a request finds it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.events.blocks import EntriesRemoved, EntriesStored, TiersListed
from baton.handoff.pool_mode.reported_entries import ReportedEntries
from baton.handoff.pool_mode.store_places import StorePlace
from baton.kv.digest_table import NO_ROW
from baton.kv.identity import BlockHash
from baton.kv.prefix_names import PrefixNames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.events.blocks import StoreEvent
    from baton.events.journal import CacheJournal
    from baton.handoff.pool_mode.block_copier import TokenSegment
    from baton.ids import StoreId
    from baton.store.entry_format import EntryFormat
    from baton.store.interface import EntryName
    from baton.store.tiered import TieredStore

    NameParts = Callable[[BlockHash], Sequence[EntryName]]

MAX_REPORTED: Final = 1 << 16
"""Entries; about 120 bytes for each. Beyond that the ones unused for longest are not reported."""
ROUND_S: Final = 2.0
"""In which every reported entry is looked for once."""
BATCH_ENTRIES: Final = 64
BUSY_SHARE: Final = 0.02
"""Of the thread's time, at most, for that."""
BILLED_WAIT_S: Final = 60.0
"""Between two batches where an object store answers them: some million requests a year."""
BILLED_IDENTITY_S: Final = 3600.0
"""Between two looks for an identity there, which expires as entries do: it is put there again."""


@dataclass(slots=True)
class StoreJournal:
    """Owner: the pool's thread. `list_reported` is for whoever holds the journal's lock.

    `places` are the store's, the quickest first. Gateways know entries by names of `PrefixNames`
    with the secret `naming`, which all workers of a cluster derive from its key.
    """

    journal: CacheJournal
    places: Sequence[StorePlace]
    naming: bytes
    block_size: int
    clock: Clock
    _names: PrefixNames = field(init=False)
    _entries: ReportedEntries = field(default_factory=ReportedEntries)
    _tiers: tuple[StoreId | None, ...] = ()
    _to_check: array[int] = field(default_factory=lambda: array("i"))
    _checks_at: Instant = field(init=False)
    _billed_at: Instant = field(init=False)
    _identify_billed_at: Instant = field(init=False)

    def __post_init__(self) -> None:
        self._names = PrefixNames(self.naming)
        self._checks_at = self._billed_at = Instant(self.clock.now() + ROUND_S)
        self._identify_billed_at = self.clock.now()
        self._tiers = (None,) * len(self.places)
        self.journal.store = self
        self._identify_places()

    def add_present(
        self,
        segments: Sequence[TokenSegment],
        token_ids: NDArray[np.int32],
        salt: str,
        name_parts: NameParts,
    ) -> None:
        """The store has these full blocks of a sequence: report them where they are.

        `token_ids` are the sequence's, from its first token on; `salt` as in `BlockStored`.
        `name_parts` gives the entries of a block that this worker needs.
        """
        if not segments:
            return
        root = self._names.root(salt)
        names = self._names.of(token_ids[: segments[-1].stop], self.block_size, root)
        names = names[len(names) - len(segments) :]
        with self.journal.lock:
            # A sequence's end is forgotten before its beginning.
            rows = [
                self._entries.add(segment.block_hash, name)
                for segment, name in zip(reversed(segments), reversed(names), strict=True)
            ]
        try:
            self._check(rows, name_parts)
        finally:
            self._forget([row for row in rows if not self._entries.places(row)])
        while len(self._entries) > MAX_REPORTED:
            self._forget([self._entries.oldest])

    def reports(self, segment: TokenSegment) -> bool:
        """Whether this block is reported in some place."""
        return self._entries.find(segment.block_hash) != NO_ROW

    def note_missing(self, segment: TokenSegment) -> None:
        """The store was asked for it, and does not have it any more, unless a server is away."""
        row = self._entries.find(segment.block_hash)
        if row != NO_ROW and not any(place.is_away for place in self.places):
            self._forget([row])

    def step(self, name_parts: NameParts) -> float:
        """Look for the places' identities, and for some of what was reported, if it is time.

        Returns in how many seconds there is more to look for.
        """
        began_at = self.clock.now()
        if began_at < self._checks_at:
            return self._checks_at - began_at
        self._checks_at = Instant(began_at + ROUND_S)  # also where the store cannot be looked at
        if not self._to_check:
            self._to_check = self._entries.rows()
            self._identify_places()
        batch = self._to_check[-BATCH_ENTRIES:]
        del self._to_check[-BATCH_ENTRIES:]
        rows = [row for row in batch if self._entries.places(row)]
        if rows:
            self._check(rows, name_parts)
            self._forget([row for row in rows if not self._entries.places(row)])
        took_s = self.clock.now() - began_at
        share = len(batch) / max(len(batch), len(self._entries)) if batch else 1.0
        wait_s = max(share * ROUND_S, took_s / BUSY_SHARE)
        self._checks_at = Instant(began_at + wait_s)
        return wait_s

    def list_reported(self) -> list[StoreEvent]:
        """See `ReportedStore`."""
        events: list[StoreEvent] = [self._list_tiers()]
        for at, tier in enumerate(self._tiers):
            names = b"" if tier is None else self._entries.pack_names_at(1 << at)
            if tier is not None and names:
                events.append(EntriesStored(tier, self.naming, self.block_size, names))
        return events

    def check_invariants(self) -> None:
        """Raise AssertionError where an entry is kept that is reported nowhere."""
        self._entries.check_invariants()
        if not all(self._entries.places(row) for row in self._entries.rows()):
            raise AssertionError("an entry is nowhere, and not forgotten")

    def _check(self, rows: Sequence[int], name_parts: NameParts) -> None:
        """Look for some entries in each place, and report what has changed.

        What is in no other place counts as where looking costs money, until it is looked for there:
        that is where entries go that made room. Where no answer comes all stays as it is known.
        """
        parts = [name_parts(self._entries.block_hash(row)) for row in rows]
        names = [name for each in parts for name in each]
        is_due = self.clock.now() >= self._billed_at and len(rows) <= BATCH_ENTRIES
        found, assumed, unknown = [0] * len(rows), 0, 0
        for at, place in enumerate(self.places):
            if self._tiers[at] is None or not place.is_looked_at:
                continue
            if place.is_billed and not is_due:
                assumed = assumed or 1 << at
                continue
            checked = place.check_each(names)
            if checked is None:
                unknown |= 1 << at
                continue
            are_there = iter(checked)
            for index, each in enumerate(parts):
                if sum(next(are_there) for _ in each) == len(each):
                    found[index] |= 1 << at
        if is_due:
            self._billed_at = Instant(self.clock.now() + BILLED_WAIT_S)
        kept = [self._entries.places(row) & (assumed | unknown) for row in rows]
        self._set_places(
            rows, [there | was or assumed for there, was in zip(found, kept, strict=True)]
        )

    def _forget(self, rows: Sequence[int]) -> None:
        """They are nowhere, as far as gateways should know."""
        with self.journal.lock:
            self._set_places(rows, [0] * len(rows))
            for row in rows:
                self._entries.remove(row)

    def _set_places(self, rows: Sequence[int], places: Sequence[int]) -> None:
        before = [self._entries.places(row) for row in rows]
        with self.journal.lock:
            for row, bits in zip(rows, places, strict=True):
                self._entries.set_places(row, bits)
            changes = list(zip(rows, before, places, strict=True))
            for at, tier in enumerate(self._tiers):
                bit = 1 << at
                new = [row for row, was, now in changes if now & ~was & bit]
                gone = [row for row, was, now in changes if was & ~now & bit]
                if tier is not None:
                    self._report(EntriesStored, tier, new)
                    self._report(EntriesRemoved, tier, gone)

    def _report(
        self, kind: type[EntriesStored | EntriesRemoved], tier: StoreId, rows: Sequence[int]
    ) -> None:
        if rows:
            names = self._entries.pack_names(rows)
            self.journal.add_of_store(kind(tier, self.naming, self.block_size, names))

    def _identify_places(self) -> None:
        """Read the places' identities, the lowest's first, and report which there are.

        A lower tier gets what is put into the one above it, an identity, too, if it has none. Of
        two places that are the same one the first counts.
        """
        is_due = self.clock.now() >= self._identify_billed_at
        if is_due:
            self._identify_billed_at = Instant(self.clock.now() + BILLED_IDENTITY_S)
        for place in reversed(self.places):
            if place.store_id is None or not place.is_billed or is_due:
                place.identify()
        tiers: list[StoreId | None] = []
        for place in self.places:
            tiers.append(None if place.store_id in tiers else place.store_id)
        if tuple(tiers) != self._tiers:
            with self.journal.lock:
                for at, (before, now) in enumerate(zip(self._tiers, tiers, strict=True)):
                    if before is not None and before != now:
                        self._leave_place(at)
                self._tiers = tuple(tiers)
                self.journal.add_of_store(self._list_tiers())

    def _leave_place(self, at: int) -> None:
        """It is another one than before: what was there is reported as gone."""
        rows = [row for row in self._entries.rows() if self._entries.places(row) & 1 << at]
        places = [self._entries.places(row) & ~(1 << at) for row in rows]
        self._set_places(rows, places)
        self._forget([row for row, left in zip(rows, places, strict=True) if not left])

    def _list_tiers(self) -> TiersListed:
        return TiersListed(tuple(tier for tier in self._tiers if tier is not None))


def open_store_journal(
    store: TieredStore,
    entry_format: EntryFormat,
    journal: CacheJournal,
    *,
    naming: bytes,
    fingerprint: str,
    clock: Clock,
) -> StoreJournal:
    """Report to `journal` what a store holds for models of `fingerprint`.

    Workers of other models, or with entries of another form, may have the same tiers, but find
    nothing of each other's there: their tiers have other ids.
    """
    form = entry_format.name(BlockHash(b""), 0) + fingerprint.encode()
    places = [StorePlace(tier, form) for tier in store.places]
    return StoreJournal(journal, places, naming, entry_format.block_size, clock)
