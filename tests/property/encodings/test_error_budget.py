"""What an error budget chooses keeps it, is the same everywhere, and is raw where nothing does."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.encodings.error_budget import (
    find_for_links,
    find_smallest,
    list_within,
    measure,
    measure_error,
)
from baton.encodings.interface import ENCODINGS
from baton.encodings.reference import make_reference_kv
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from tests.examples import examples

LLAMA = KVLayout.gqa(32, 8, 128, block_size=64, dtype="bfloat16")
layouts = st.builds(
    KVLayout,
    st.lists(
        st.one_of(
            st.builds(LayerLayout.gqa, st.just(4), st.integers(8, 160), st.integers(8, 160)),
            st.builds(LayerLayout.mla, st.integers(8, 600)),
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    st.integers(1, 70),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
budgets = st.floats(0, 0.3)


def draw_like_reference(layout: KVLayout, seed: int) -> np.ndarray:
    """Other blocks of the same sizes of channels: signs and order of the numbers are random."""
    blocks = make_reference_kv(layout, 6)
    rng = np.random.default_rng(seed)
    numbers = blocks.view({2: np.uint16, 4: np.uint32}[layout.element_bytes]).copy()
    sign_bit = numbers.dtype.type(1 << (8 * layout.element_bytes - 1))
    return (numbers ^ (rng.integers(0, 2, numbers.shape, numbers.dtype) * sign_bit)).view(np.uint8)


@given(layouts, budgets, st.integers(0, 1 << 30))
@settings(max_examples=examples(5))
def test_the_error_of_other_kv_keeps_the_budget(layout: KVLayout, budget: float, seed: int) -> None:
    blocks = draw_like_reference(layout, seed)
    for encoding in (find_smallest(budget, layout), *find_for_links(budget, layout)):
        decoded = np.empty_like(blocks)
        encoding.decode(layout, encoding.encode(layout, blocks), decoded)
        assert measure_error(layout, blocks, decoded) <= budget * 1.25
        assert encoding.is_exact or budget


@given(layouts, budgets)
@settings(max_examples=examples(5))
def test_links_have_what_encodes_each_token_by_itself(layout: KVLayout, budget: float) -> None:
    within = {each.encoding.name: each for each in list_within(budget, layout)}
    chosen = [within[each.name] for each in find_for_links(budget, layout)]
    assert all(each.encoding.grouping == "token" for each in chosen)
    for one in chosen:  # each has fewer bytes than all that err less
        assert all(one.share < other.share for other in chosen if other.error < one.error)


@given(layouts, budgets, budgets)
@settings(max_examples=examples(5))
def test_a_larger_budget_never_takes_more_bytes(layout: KVLayout, one: float, other: float) -> None:
    shares = [
        measure(find_smallest(budget, layout), layout).share for budget in sorted((one, other))
    ]
    assert shares[1] <= shares[0] * 1.25 + 1e-9


def test_every_rank_and_every_order_of_pages_has_the_same_encodings() -> None:
    ranks = [
        msgspec.structs.replace(LLAMA, shard=TensorParallelShard(rank, 4)) for rank in range(4)
    ]
    for kind in ENCODINGS.kinds():
        encoding = ENCODINGS.build(kind, {})
        errors = {measure(encoding, each).error for each in (LLAMA, *ranks)}
        assert len(errors) == 1 or max(errors) - min(errors) <= 0.02 * max(errors)


@pytest.mark.parametrize(
    ("budget", "store", "links"),
    [
        (0.0, "zstd/1", []),
        (0.005, "zstd/1", []),
        (0.02, "int8/1", ["int8/1"]),
        (0.12, "int4/1", ["int8/1"]),
        (0.25, "int4/1", ["int4_token/1", "int8/1"]),
    ],
)
def test_a_model_of_heads_of_128(budget: float, store: str, links: list[str]) -> None:
    assert find_smallest(budget, LLAMA).name == store
    assert [each.name for each in find_for_links(budget, LLAMA)] == links


def test_kv_in_eight_bits_stays_as_it_is() -> None:
    layout = msgspec.structs.replace(LLAMA, dtype="float8_e4m3fn")
    assert find_smallest(1.0, layout).name == "raw"
    assert find_for_links(1.0, layout) == ()


def test_the_largest_error_of_keys_and_values_counts() -> None:
    layout = KVLayout.gqa(2, 1, 4, block_size=1, dtype="float32")
    exact = np.ones((1, 16), np.float32)
    decoded = exact.copy()
    decoded[0, [4, 12]] += 1  # one of four values, in both layers
    decoded[0, 0] += 1  # one of four keys, in one layer
    error = measure_error(layout, exact.view(np.uint8), decoded.view(np.uint8))
    assert error == pytest.approx(0.5)
