"""A handoff's encoding is the quicker one by what was measured, and does not change for little."""

from __future__ import annotations

from itertools import combinations_with_replacement

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.encodings.interface import RAW
from baton.handoff.encoding_choice import (
    MARGIN,
    MIN_PASS_TOKENS,
    EncodingChooser,
    KVToSend,
    LinkEncodingCosts,
    PrefillDurations,
    choose_arrival,
    predict_arrival,
)

byte_s = st.floats(1e-13, 1e-3)
costs = st.builds(LinkEncodingCosts, byte_s, byte_s, byte_s, st.floats(0.05, 1.2))
codecs = st.dictionaries(
    st.sampled_from(["int8", "fp8", "int4"]), st.tuples(byte_s, byte_s, st.floats(0.05, 1.2))
)


def predict(link_byte_s: float, codecs: dict) -> dict[str, float]:
    """Seconds for a byte, raw and in each encoding."""
    return {"raw": link_byte_s} | {
        kind: LinkEncodingCosts(link_byte_s, *rates).encoded_byte_s
        for kind, rates in codecs.items()
    }


@given(st.lists(st.builds(predict, byte_s, codecs), min_size=1, max_size=20))
def test_what_is_chosen_is_never_slower_by_more_than_the_margin(history: list) -> None:
    """Also where the encodings that a handoff may have change from one to the next."""
    chooser = EncodingChooser()
    for took in history:
        chosen = took[chooser.choose(took)]
        assert chosen * (1 - MARGIN) <= min(took.values()) * (1 + 1e-9)


@given(byte_s, codecs, st.lists(st.floats(1 - MARGIN / 4, 1 + MARGIN / 4), min_size=1, max_size=20))
def test_noise_changes_the_choice_once_for_each_encoding_at_most(
    link_byte_s: float, codecs: dict, noise: list
) -> None:
    chooser = EncodingChooser()
    seen = [chooser.choose(predict(link_byte_s * factor, codecs)) for factor in noise]
    changes = sum(a != b for a, b in zip(["raw", *seen], seen, strict=False))
    assert changes <= len(codecs)


@given(byte_s, codecs)
def test_encoding_that_saves_nothing_on_the_link_is_not_chosen(
    link_byte_s: float, codecs: dict
) -> None:
    chosen = EncodingChooser().choose(predict(link_byte_s, codecs))
    assert chosen == "raw" or codecs[chosen][2] < 1


@given(byte_s, codecs, st.floats(1, 1e6))
def test_a_slower_link_never_asks_for_more_bytes(
    link_byte_s: float, codecs: dict, factor: float
) -> None:
    share = {"raw": 1.0} | {kind: rates[2] for kind, rates in codecs.items()}
    fast, slow = (predict(link_byte_s * each, codecs) for each in (1, factor))
    before, after = (min(each, key=each.__getitem__) for each in (fast, slow))
    assert share[after] <= share[before] or slow[after] >= slow[before] * (1 - 1e-9)
    if EncodingChooser().choose(fast) != "raw" and all(each < 1 for each in share.values()):
        assert EncodingChooser().choose(slow) != "raw"


def test_each_speed_of_a_link_has_its_encoding() -> None:
    """With the rates of docs/store-figures.md for bfloat16, encode and decode, in GB/s."""
    rates = {"int8": (1.23, 1.66, 0.51), "int4_token": (0.39, 0.82, 0.27)}
    codecs = {kind: (1e-9 / enc, 1e-9 / dec, share) for kind, (enc, dec, share) in rates.items()}
    choices = [EncodingChooser().choose(predict(8 / bits, codecs)) for bits in (1e10, 1e9, 1e8)]
    assert choices == ["raw", "int8", "int4_token"]


MIB = 1 << 20
kv = st.builds(KVToSend, st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 100), st.integers(1, 5))
VLLM = LinkEncodingCosts(8.2e-9, 1.2e-9, 1.2e-9, 0.27)
"""About what was measured with vLLM's float32 KV over 1 Gbit/s."""


def find_last_end(parts: list[list[float]]) -> float:
    """Of parts that go through the same stages in order: the longest chain of what must follow.

    Each step of a chain is to the next stage of a part, or to the next part in a stage.
    """
    num_parts, num_stages = len(parts), len(parts[0])
    return max(
        sum(
            parts[part][stage]
            for stage, (first, last) in enumerate(
                zip((0, *turns), (*turns, num_parts - 1), strict=True)
            )
            for part in range(first, last + 1)
        )
        for turns in combinations_with_replacement(range(num_parts), num_stages - 1)
    )


def goes_raw(each: LinkEncodingCosts, kv: KVToSend) -> bool:
    """Of two workers that have one encoding."""
    return choose_arrival(kv, {"int8/1": predict_arrival(each, kv)}, "int8/1") == RAW


@given(st.lists(costs, min_size=1, max_size=4), kv, st.floats(1e-12, 1e-6))
def test_of_several_encodings_none_is_sooner_by_the_margin(
    several: list[LinkEncodingCosts], kv: KVToSend, link_byte_s: float
) -> None:
    """Than what goes; and one that is refused is replaced by one that is sooner by the margin."""
    arrivals = {
        f"e{index}/1": predict_arrival(msgspec.structs.replace(each, link_byte_s=link_byte_s), kv)
        for index, each in enumerate(several)
    }
    chosen = choose_arrival(kv, arrivals, "e0/1")
    raw_s = arrivals["e0/1"].raw_s
    if kv.prefill_s < MARGIN * raw_s:
        assert chosen == "e0/1"
        return
    took_s = raw_s if chosen == RAW else arrivals[chosen].encoded_s
    assert all(each.encoded_s >= took_s * (1 - MARGIN) for each in arrivals.values())
    if chosen != RAW:
        assert arrivals[chosen].encoded_s <= raw_s
        assert chosen == "e0/1" or took_s < arrivals["e0/1"].encoded_s * (1 - MARGIN)


@given(costs, kv)
def test_when_kv_is_there_follows_from_every_order_of_steps(
    each: LinkEncodingCosts, kv: KVToSend
) -> None:
    sizes = [kv.ready_bytes, *[kv.rest_bytes / kv.num_parts] * kv.num_parts]
    passes = [0.0, *[kv.prefill_s / kv.num_parts] * kv.num_parts]
    link = each.link_byte_s
    raw = [[took_s, size * link] for took_s, size in zip(passes, sizes, strict=True)]
    encoded = [
        [
            took_s + size * each.encode_byte_s,
            size * each.encoded_share * link,
            size * each.decode_byte_s,
        ]
        for took_s, size in zip(passes, sizes, strict=True)
    ]
    arrival = predict_arrival(each, kv)
    assert arrival.raw_s == pytest.approx(find_last_end(raw))
    assert arrival.encoded_s == pytest.approx(find_last_end(encoded))


@given(costs, kv)
def test_what_goes_is_later_than_the_other_by_the_margin_at_most(
    each: LinkEncodingCosts, kv: KVToSend
) -> None:
    arrival = predict_arrival(each, kv)
    if goes_raw(each, kv):
        assert arrival.raw_s * (1 - MARGIN) <= arrival.encoded_s
    elif kv.prefill_s >= MARGIN * arrival.raw_s:
        assert arrival.encoded_s <= arrival.raw_s * (1 - MARGIN)


@given(costs, st.floats(1, 1e9))
def test_where_nothing_is_to_be_computed_the_choice_by_bytes_stands(
    each: LinkEncodingCosts, num_bytes: float
) -> None:
    kv = KVToSend(num_bytes, 0.0, 0.0, 4)
    arrival = predict_arrival(each, kv)
    assert arrival.encoded_s == pytest.approx(num_bytes * each.encoded_byte_s)
    assert not goes_raw(each, kv)


@given(costs, kv)
def test_encoding_that_costs_more_than_it_saves_on_the_link_goes_raw(
    each: LinkEncodingCosts, kv: KVToSend
) -> None:
    """However little of the transfer prefill hides."""
    arrival = predict_arrival(each, kv)
    if each.encoded_share >= 1 and kv.prefill_s >= MARGIN * arrival.raw_s:
        assert goes_raw(each, kv)


@pytest.mark.parametrize(
    ("cached_share", "token_s", "num_layers", "is_raw"),
    [
        (0.0, 2.8e-4, 4, True),  # a cold prompt, as measured: 0.57 s of prefill hide the link
        (0.0, 5e-5, 4, False),  # a quick engine: 0.1 s hide little of 0.28
        (0.99, 2.8e-4, 4, False),  # cached: what travels has nothing to hide behind
        (0.9, 2.8e-4, 4, False),
        (0.5, 2.8e-4, 4, True),
        (0.0, 2.8e-4, 1, False),  # nothing travels before the end of the pass
    ],
)
def test_a_prompt_of_2048_tokens_over_1_gbit(
    cached_share: float, token_s: float, num_layers: int, *, is_raw: bool
) -> None:
    num_bytes, left_share = 32 * MIB, 1 - cached_share
    prefill_s = 2048 * left_share * token_s
    kv = KVToSend(num_bytes * cached_share, num_bytes * left_share, prefill_s, num_layers)
    assert goes_raw(VLLM, kv) == is_raw


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=30))
def test_a_prompts_duration_is_that_of_the_latest_ones(token_s: list[float]) -> None:
    durations = PrefillDurations()
    assert durations.predict_s(100) is None
    durations.add(MIN_PASS_TOKENS - 1, 50.0)
    assert durations.predict_s(100) is None
    for each in token_s:
        durations.add(512, 512 * each)
    latest = sorted(token_s[-11:])
    assert latest[0] * 99 <= (durations.predict_s(100) or 0) <= latest[-1] * 101
