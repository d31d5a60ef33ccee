"""By which tiers names are found, against a look for each name in each tier."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise, takewhile

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import MachineClock
from baton.store.counted_tier import CountedTier
from baton.store.interface import EntryName, TierContext
from baton.store.tiered import TieredStore
from baton.store.tiers.host import HostTier, HostTierOptions

NAMES = [EntryName(bytes((at,)) * 32) for at in range(12)]
KINDS = ("upper", "middle", "lower")


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=3, max_size=3))
def test_runs_are_of_tiers_that_have_the_names(held: list[set[EntryName]]) -> None:
    tiers = [
        CountedTier(kind, HostTier(HostTierOptions(), TierContext("c", bytes(32), MachineClock())))
        for kind in KINDS
    ]
    for tier, names in zip(tiers, held, strict=True):
        for name in names:
            tier.put(name, b"x")
    with closing(TieredStore(tiers)) as store:
        runs = store.find_runs(NAMES)
    each = [run.tier for run in runs for _ in range(run.num)]
    assert len(each) == len(list(takewhile(lambda name: any(name in h for h in held), NAMES)))
    for name, tier in zip(NAMES, each, strict=False):
        assert name in held[KINDS.index(tier)]
    at = 0
    for tier, num in runs:
        at += num
        for upper in held[: KINDS.index(tier)]:
            assert NAMES[at - num] not in upper, "it is read from there"
        if tier == "middle":
            above = [name in held[0] for name in NAMES[at - num : at]]
            assert not above[-1] or above != sorted(above), "all of its end would be read above"
    assert all(one.tier != other.tier for one, other in pairwise(runs))
