"""Which tiers of stores hold which entries, as the workers report that use them.

For each name a bit for each report: of one worker, of one tier. Names stand for all tokens up to an
entry's end, so an entry needs no other one; a prompt's are looked at in order, up to the first that
is nowhere. Most of them have the same reports, and where these change at most a few end: only who
lists a tier that ends there is looked at again.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.ids import StoreId, WorkerId

    Tiers: TypeAlias = tuple[StoreId, ...]
    Reporter: TypeAlias = tuple[WorkerId, StoreId]

MAX_ENTRIES: Final = 1 << 21
"""That one worker reports of one tier; what comes beyond is not known here."""
MAX_SHARED: Final = 1 << 16


class TierLists:
    """Which lists of tiers workers load from, each once. Changes are few. Owner: one thread."""

    def __init__(self, lists: Iterable[Tiers]) -> None:
        self.lists: Sequence[Tiers] = list(dict.fromkeys(lists))
        self._with: dict[StoreId, list[Tiers]] = {}
        for each in self.lists:
            for tier in each:
                self._with.setdefault(tier, []).append(each)

    def having(self, tier: StoreId) -> Sequence[Tiers]:
        """The lists that a tier is in."""
        return self._with.get(tier, ())


class StoredEntries:
    """Of one naming and one size of entries. Owner: one thread."""

    def __init__(self) -> None:
        self._reports: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        """Each set of reports once, since most entries have one of a few."""
        self._bits: dict[Reporter, int] = {}
        self._names: dict[Reporter, set[int]] = {}
        self._free: list[int] = []
        self._tier_of: dict[int, StoreId] = {}
        self._by_tier: dict[StoreId, int] = {}
        self._by_tiers: dict[Tiers, int] = {}
        """The reports of any tier of a list, of those that were looked for."""

    @property
    def num_entries(self) -> int:
        """Entries that are in some tier."""
        return len(self._reports)

    def store(self, worker: WorkerId, tier: StoreId, names: Sequence[int]) -> int:
        """A worker reports these; how many were taken up."""
        bit = self._bit_of(worker, tier)
        held = self._names.setdefault((worker, tier), set())
        names = names[: MAX_ENTRIES - len(held)]
        if len(self._shared) > MAX_SHARED:
            self._shared = {}
        reports, shared = self._reports, self._shared
        for name in names:
            now = reports.get(name, 0) | bit
            reports[name] = shared.setdefault(now, now)
        held.update(names)
        return len(names)

    def remove(self, worker: WorkerId, tier: StoreId, names: Iterable[int]) -> None:
        """A worker takes these back, if it has reported them."""
        held = self._names.get((worker, tier))
        if held is not None:
            gone = held.intersection(names)
            self._clear(self._bits[worker, tier], gone)
            held -= gone

    def forget(self, worker: WorkerId) -> None:
        """Nothing that a worker has reported counts any more."""
        for reporter in [each for each in self._bits if each[0] == worker]:
            bit, tier = self._bits.pop(reporter), reporter[1]
            self._clear(bit, self._names.pop(reporter))
            self._free.append(bit)
            del self._tier_of[bit]
            self._by_tier[tier] &= ~bit
            if not self._by_tier[tier]:
                del self._by_tier[tier]
            self._by_tiers = {}

    def find_matches(self, names: Sequence[int], lists: TierLists) -> dict[Tiers, int]:
        """How many of these, from the first on, are in some tier of each list.

        Lists that have not even the first are left out.
        """
        get = self._reports.get
        before = get(names[0], 0) if names else 0
        if not before:
            return {}
        alive = {each: of_any for each in lists.lists if before & (of_any := self._of_any(each))}
        matches: dict[Tiers, int] = {}
        for at, name in enumerate(names):
            reports = get(name, 0)
            if reports == before:
                continue
            ended, before = before & ~reports, reports
            while ended:
                bit = ended & -ended
                ended ^= bit
                tier = self._tier_of[bit]
                if reports & self._by_tier[tier]:
                    continue  # another worker reports it of this tier
                for each in lists.having(tier):
                    if each in alive and not reports & alive[each]:
                        del alive[each]
                        matches[each] = at
            if not alive:
                break
        return matches | dict.fromkeys(alive, len(names))

    def holdings(self) -> dict[Reporter, set[int]]:
        """All that each worker reports of each tier; for checks."""
        return {reporter: held for reporter, held in self._names.items() if held}

    def check_invariants(self) -> None:
        """Raise AssertionError where reports disagree.

        Raises:
            AssertionError: an entry has another set of reports than the workers' own.
        """
        expected: dict[int, int] = {}
        for reporter, held in self._names.items():
            for name in held:
                expected[name] = expected.get(name, 0) | self._bits[reporter]
        if expected != self._reports:
            raise AssertionError("entries have reports that no worker has made, or lack some")
        by_tier: dict[StoreId, int] = {}
        for (_, tier), bit in self._bits.items():
            by_tier[tier] = by_tier.get(tier, 0) | bit
            if self._tier_of[bit] != tier:
                raise AssertionError("a report is of another tier than its worker's")
        if by_tier != self._by_tier or len(self._tier_of) != len(self._bits):
            raise AssertionError("a tier has reports of others")

    def _of_any(self, tiers: Tiers) -> int:
        of_any = self._by_tiers.get(tiers)
        if of_any is None:
            by_tier = [self._by_tier.get(tier, 0) for tier in tiers]
            of_any = self._by_tiers[tiers] = reduce(or_, by_tier, 0)
        return of_any

    def _bit_of(self, worker: WorkerId, tier: StoreId) -> int:
        bit = self._bits.get((worker, tier))
        if bit is None:
            bit = self._free.pop() if self._free else 1 << len(self._bits)
            self._bits[worker, tier], self._tier_of[bit] = bit, tier
            self._by_tier[tier] = self._by_tier.get(tier, 0) | bit
            self._by_tiers = {}
        return bit

    def _clear(self, bit: int, names: set[int]) -> None:
        reports, shared = self._reports, self._shared
        for name in names:
            left = reports[name] & ~bit
            if left:
                reports[name] = shared.setdefault(left, left)
            else:
                del reports[name]
