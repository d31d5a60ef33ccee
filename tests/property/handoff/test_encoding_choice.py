"""A handoff's encoding is the quicker one by what was measured, and does not change for little."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.handoff.encoding_choice import MARGIN, EncodingChooser, LinkEncodingCosts

byte_s = st.floats(1e-13, 1e-3)
costs = st.builds(LinkEncodingCosts, byte_s, byte_s, byte_s, st.floats(0.05, 1.2))


@given(st.lists(costs, min_size=1, max_size=20))
def test_what_is_chosen_is_never_slower_by_more_than_the_margin(history: list) -> None:
    chooser = EncodingChooser()
    for each in history:
        took = {True: each.encoded_byte_s, False: each.link_byte_s}
        chosen = took[chooser.choose(each)]
        assert chosen * (1 - MARGIN) <= min(took.values()) * (1 + 1e-9)


@given(costs, st.lists(st.floats(1 - MARGIN / 4, 1 + MARGIN / 4), min_size=1, max_size=20))
def test_noise_changes_the_choice_once_at_most(center: LinkEncodingCosts, noise: list) -> None:
    chooser = EncodingChooser()
    seen = [
        chooser.choose(
            LinkEncodingCosts(
                center.link_byte_s * factor,
                center.encode_byte_s,
                center.decode_byte_s,
                center.encoded_share,
            )
        )
        for factor in noise
    ]
    assert sum(a != b for a, b in zip([False, *seen], seen, strict=False)) <= 1


@given(costs)
def test_encoding_that_saves_nothing_on_the_link_is_not_chosen(each: LinkEncodingCosts) -> None:
    if each.encoded_share >= 1:
        assert not EncodingChooser().choose(each)


@given(costs, st.floats(1, 1e6))
def test_a_slower_link_never_turns_the_choice_back_to_raw(
    each: LinkEncodingCosts, factor: float
) -> None:
    slower = LinkEncodingCosts(
        each.link_byte_s * factor, each.encode_byte_s, each.decode_byte_s, each.encoded_share
    )
    if EncodingChooser().choose(each):
        assert EncodingChooser().choose(slower)


def test_a_link_of_1_gbit_encodes_bfloat16_and_one_of_10_does_not() -> None:
    """With int8's rates of docs/store.md: 1.23 and 1.66 GB/s."""
    rates = 1 / 1.23e9, 1 / 1.66e9, 0.51
    assert EncodingChooser().choose(LinkEncodingCosts(8e-9, *rates))
    assert not EncodingChooser().choose(LinkEncodingCosts(0.8e-9, *rates))
