"""Copying up of entries: at the read that was configured, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.store.promotion import PromotionPolicy
from tests.property.test_store_owners import names


@given(st.lists(st.sampled_from("abcdef"), max_size=60), st.integers(1, 4))
def test_an_entry_is_copied_at_each_nth_read(reads: str, at_read: int) -> None:
    policy = PromotionPolicy(at_read)
    counts: dict[str, int] = {}
    for each in reads:
        counts[each] = counts.get(each, 0) + 1
        assert policy.count_read(names[each]) == (counts[each] % at_read == 0)


@given(st.lists(st.sampled_from("abcdef"), max_size=60), st.integers(1, 4))
def test_what_was_read_longest_ago_is_forgotten_first(reads: str, room: int) -> None:
    policy = PromotionPolicy(2, max_remembered=room)
    remembered: list[str] = []
    for each in reads:
        assert policy.count_read(names[each]) == (each in remembered)
        if each in remembered:
            remembered.remove(each)
        else:
            remembered = [*remembered, each][-room:]
