"""Which tiers of stores hold which entries, as the workers report that use them.

For each name a bit for each report: of one worker, of one tier. Names stand for all tokens up to an
entry's end, so an entry needs no other one; a prompt's are looked at in order, up to the first that
is nowhere. Most are alike: a look gives runs of entries with the same reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.ids import StoreId, WorkerId

MAX_ENTRIES: Final = 1 << 21
"""That one worker reports of one tier; what comes beyond is not known here."""

MAX_SHARED: Final = 1 << 16

Runs: TypeAlias = "Sequence[tuple[int, int]]"
"""`(reports, stop)`: entries up to number `stop` have these reports."""


class StoredEntries:
    """Of one naming and one size of entries. Owner: one thread."""

    def __init__(self) -> None:
        self._reports: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        """Each set of reports once, since most entries have one of a few."""
        self._bits: dict[tuple[WorkerId, StoreId], int] = {}
        self._names: dict[tuple[WorkerId, StoreId], set[int]] = {}
        self._by_tier: dict[StoreId, int] = {}
        self._free: list[int] = []

    @property
    def num_entries(self) -> int:
        """Entries that are in some tier."""
        return len(self._reports)

    @property
    def by_tier(self) -> Mapping[StoreId, int]:
        """The reports of each tier."""
        return self._by_tier

    def store(self, worker: WorkerId, tier: StoreId, names: Sequence[int]) -> int:
        """A worker reports these; how many were taken up."""
        held = self._names.setdefault((worker, tier), set())
        names = names[: MAX_ENTRIES - len(held)]
        bit = self._bit_of(worker, tier)
        if len(self._shared) > MAX_SHARED:
            self._shared = {}
        reports, shared = self._reports, self._shared
        for name in names:
            now = reports.get(name, 0) | bit
            reports[name] = shared.setdefault(now, now)
        held.update(names)
        return len(names)

    def remove(self, worker: WorkerId, tier: StoreId, names: Sequence[int]) -> None:
        """A worker takes these back, if it has reported them."""
        held = self._names.get((worker, tier))
        if held is not None:
            gone = held.intersection(names)
            self._clear(self._bits[worker, tier], gone)
            held -= gone

    def forget(self, worker: WorkerId) -> None:
        """Nothing that a worker has reported counts any more."""
        for key in [key for key in self._bits if key[0] == worker]:
            bit = self._bits.pop(key)
            self._clear(bit, self._names.pop(key))
            self._by_tier[key[1]] &= ~bit
            if not self._by_tier[key[1]]:
                del self._by_tier[key[1]]
            self._free.append(bit)

    def find(self, names: Sequence[int]) -> Runs:
        """What is reported of these, from the first on, up to the first that is in no tier."""
        runs: list[tuple[int, int]] = []
        get, last = self._reports.get, 0
        for at, name in enumerate(names):
            reports = get(name, 0)
            if reports != last:
                if last:
                    runs.append((last, at))
                last = reports
            if not reports:
                return runs
        if last:
            runs.append((last, len(names)))
        return runs

    def holdings(self) -> dict[tuple[WorkerId, StoreId], set[int]]:
        """All that each worker reports of each tier; for checks."""
        return {key: held for key, held in self._names.items() if held}

    def check_invariants(self) -> None:
        """Raise AssertionError where reports disagree.

        Raises:
            AssertionError: an entry has another set of reports than the workers' own.
        """
        expected: dict[int, int] = {}
        for key, held in self._names.items():
            for name in held:
                expected[name] = expected.get(name, 0) | self._bits[key]
        if expected != self._reports:
            raise AssertionError("entries have reports that no worker has made, or lack some")
        by_tier: dict[StoreId, int] = {}
        for (_, tier), bit in self._bits.items():
            by_tier[tier] = by_tier.get(tier, 0) | bit
        if by_tier != self._by_tier:
            raise AssertionError("a tier has reports of others")

    def _bit_of(self, worker: WorkerId, tier: StoreId) -> int:
        bit = self._bits.get((worker, tier))
        if bit is None:
            bit = self._free.pop() if self._free else 1 << len(self._bits)
            self._bits[worker, tier] = bit
            self._by_tier[tier] = self._by_tier.get(tier, 0) | bit
        return bit

    def _clear(self, bit: int, names: set[int]) -> None:
        reports, shared = self._reports, self._shared
        for name in names:
            left = reports[name] & ~bit
            if left:
                reports[name] = shared.setdefault(left, left)
            else:
                del reports[name]
