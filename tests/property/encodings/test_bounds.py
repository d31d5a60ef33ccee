"""Each encoding decodes to within its stated error, of any numbers, layouts and shapes."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.encodings.int4 import RUN_TOKENS
from baton.encodings.interface import ENCODINGS, open_encoding
from baton.errors import ConfigError, ProtocolError
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from tests.examples import examples

KINDS = ENCODINGS.kinds()
EXACT = [kind for kind in KINDS if ENCODINGS.build(kind, {}).is_exact]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a step of each dtype, of a number near 1."""
SCALE_ROUNDING = 1 + 2.0**-7
TINY = 2.0**-126

layers = st.one_of(
    st.builds(LayerLayout.gqa, st.sampled_from([2, 4]), st.integers(1, 9), st.integers(1, 9)),
    st.builds(LayerLayout.mla, st.integers(1, 20)),
)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    some = draw(st.lists(layers, min_size=1, max_size=2))
    repeated = tuple(layer for layer in some for _ in range(draw(st.integers(1, 3))))
    return KVLayout(
        repeated,
        draw(st.integers(1, 2 * RUN_TOKENS + 3)),
        draw(st.sampled_from(sorted(DTYPES))),
        shard=TensorParallelShard(draw(st.integers(0, 1)), 2),
    )


def make_numbers(layout: KVLayout, num_blocks: int, seed: int, exponent: int) -> np.ndarray:
    """Blocks of numbers of very different sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    shape = (num_blocks, layout.block_bytes // layout.element_bytes)
    numbers = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape) + exponent)
    numbers[rng.random(shape) < 0.1] = 0
    most = float(ml_dtypes.finfo(DTYPES[layout.dtype]).max)
    return np.clip(numbers, -most, most).astype(np.float32).astype(DTYPES[layout.dtype])


def split_planes(layout: KVLayout, numbers: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Each plane of each layer, `[blocks, tokens, heads, dim]`: the plain way, layer by layer."""
    planes, at = [], 0
    for layer in layout.layers:
        for plane in layer.planes:
            num_heads = len(layout.held_heads(plane))
            stop = at + layout.block_size * num_heads * plane.head_dim
            shape = (len(numbers), layout.block_size, num_heads, plane.head_dim)
            planes.append((plane.name, numbers[:, at:stop].reshape(shape)))
            at = stop
    assert at == numbers.shape[1]
    return planes


def round_trip(kind: str, layout: KVLayout, numbers: np.ndarray) -> np.ndarray:
    encoding = open_encoding(kind, layout, "test")
    blocks = np.ascontiguousarray(numbers).view(np.uint8)
    encoded = encoding.encode(layout, blocks)
    assert len(encoded) == len(blocks)
    for each in encoded:
        assert each.dtype == np.uint8
        assert each.flags.c_contiguous
        assert len(each) <= encoding.max_bytes(layout)
        assert encoding.grouping == "none" or len(each) == encoding.max_bytes(layout)
    decoded = np.full_like(blocks, 0xA5)
    encoding.decode(layout, encoded, decoded)
    return decoded.view(DTYPES[layout.dtype])


def bound_of(kind: str, name: str, plane: np.ndarray) -> np.ndarray:
    """The largest error of each number that docs/store.md states, before the dtype rounds it."""
    exact = plane.astype(np.float64)
    if kind in {"int4", "int4_token"}:
        if kind == "int4" and name != "v":
            runs = [*range(0, exact.shape[1], RUN_TOKENS), exact.shape[1]]
            steps = np.empty_like(exact)
            for start, stop in pairwise(runs):
                steps[:, start:stop] = int4_step(exact[:, start:stop], axis=1)
            return steps / 2
        return int4_step(exact, axis=-1) / 2 * np.ones_like(exact)
    most = np.abs(exact).max(-1, keepdims=True)
    if kind == "int8":
        return most / 127 * SCALE_ROUNDING / 2 + 127 * TINY + np.zeros_like(exact)
    scale = most / 448 * SCALE_ROUNDING
    return (
        np.maximum(np.abs(exact) * (2.0**-4 + 2.0**-8), scale * 2.0**-10 * (1 + 2.0**-5))
        + 448 * TINY
    )


def int4_step(group: np.ndarray, axis: int) -> np.ndarray:
    low, high = group.min(axis, keepdims=True), group.max(axis, keepdims=True)
    least = low - np.abs(low) * 2.0**-7
    return (high - least) / 15 * SCALE_ROUNDING * (1 + 2.0**-6) + 32 * TINY


@pytest.mark.parametrize("kind", KINDS)
@given(layouts(), st.integers(0, 3), st.integers(0, 1 << 30), st.integers(-140, 120))
@example(KVLayout.gqa(2, 2, 8, block_size=4, dtype="float16"), 2, 0, 15)
@example(KVLayout.gqa(2, 2, 8, block_size=4, dtype="bfloat16"), 2, 0, 119)
@settings(max_examples=examples(15))
def test_error_is_bounded(
    kind: str, layout: KVLayout, num_blocks: int, seed: int, exponent: int
) -> None:
    numbers = make_numbers(layout, num_blocks, seed, exponent)
    decoded = round_trip(kind, layout, numbers)
    if kind in EXACT:
        assert decoded.tobytes() == numbers.tobytes()
        return
    pairs = zip(split_planes(layout, numbers), split_planes(layout, decoded), strict=True)
    for (name, before), (_, after) in pairs:
        assert np.isfinite(after.astype(np.float32)).all()
        error = np.abs(after.astype(np.float64) - before.astype(np.float64))
        rounding = UNIT[layout.dtype] * np.abs(after.astype(np.float64)) + 2.0**-24
        bound = bound_of(kind, name, before) + (rounding if layout.dtype != "float32" else 0)
        bound = bound + 1e-5 * np.abs(before.astype(np.float64))  # of float32 itself
        assert (error <= bound * (1 + 1e-5)).all(), float((error - bound).max())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shares", [(-1,), (1,), (-1, 1), (-1, -0.95), (0.95, 1), (-1, -0.5, 0, 0.25, 0.5, 0.9)], ids=str
)
def test_the_largest_numbers_keep_the_error(kind: str, dtype: str, shares: tuple[float]) -> None:
    layout = KVLayout.gqa(2, 2, 8, block_size=6, dtype=dtype)
    most = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    num_numbers = layout.block_bytes // layout.element_bytes
    numbers = np.resize(np.float64(shares), (2, num_numbers)) * most
    before = numbers.astype(np.float32).astype(DTYPES[dtype])
    pairs = zip(
        split_planes(layout, before), split_planes(layout, round_trip(kind, layout, before)),
        strict=True,
    )  # fmt: skip
    for (name, plane), (_, decoded) in pairs:
        exact = plane.astype(np.float64)
        assert np.isfinite(decoded.astype(np.float64)).all()
        bound = bound_of(kind, name, exact) + 2.0**-8 * np.abs(exact)  # bfloat16 of the least
        assert (np.abs(decoded.astype(np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_not_finite_is_seen_and_stays_in_its_group(
    kind: str, bad: float, dtype: str
) -> None:
    layout = KVLayout.gqa(2, 2, 6, block_size=5, dtype=dtype)
    numbers = make_numbers(layout, 2, seed=1, exponent=0)
    numbers[1, 3] = bad  # layer 0, key, token 0, head 0, channel 3
    decoded = round_trip(kind, layout, numbers)
    assert np.isnan(decoded[1, 3])
    broken = np.isnan(decoded.astype(np.float32))
    other_block, key = broken[0], split_planes(layout, broken)[0][1]
    assert not other_block.any()
    assert broken.sum() == key[1, :, 0, :].sum()  # that head's keys alone
    assert broken.sum() == (5 if kind == "int4" else 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_zeros_stay_zeros(kind: str, dtype: str) -> None:
    layout = KVLayout.gqa(1, 2, 7, block_size=3, dtype=dtype)
    zeros = np.zeros((2, layout.block_bytes // layout.element_bytes), DTYPES[dtype])
    assert not round_trip(kind, layout, zeros).any()


@pytest.mark.parametrize("kind", EXACT)
@given(st.binary(min_size=48, max_size=48), st.sampled_from(sorted(DTYPES)))
@settings(max_examples=examples(15))
def test_an_exact_encoding_keeps_every_bit(kind: str, data: bytes, dtype: str) -> None:
    """NaN's payloads and the sign of zero, too."""
    layout = KVLayout.mla(1, 3, block_size=48 // 3 // np.dtype(DTYPES[dtype]).itemsize, dtype=dtype)
    numbers = np.frombuffer(data, DTYPES[dtype]).reshape(1, -1)
    assert round_trip(kind, layout, numbers).tobytes() == data


@pytest.mark.parametrize("kind", KINDS)
@given(st.binary(max_size=300))
@settings(max_examples=examples(20))
def test_other_bytes_decode_to_something_or_are_refused(kind: str, data: bytes) -> None:
    """Nothing else is raised, and nothing is written beyond the block."""
    layout = KVLayout.gqa(1, 2, 5, block_size=3, dtype="bfloat16")
    encoding = ENCODINGS.build(kind, {})
    around = np.full((3, layout.block_bytes), 0xA5, np.uint8)
    some = np.resize(np.frombuffer(data or b"x", np.uint8), encoding.max_bytes(layout))
    for each in (np.frombuffer(data, np.uint8), some):
        with suppress(ProtocolError):
            encoding.decode(layout, [each], around[1:2])
        assert (around[[0, 2]] == 0xA5).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "raw"])
def test_kv_in_eight_bits_is_refused(kind: str) -> None:
    layout = KVLayout.gqa(1, 2, 5, block_size=3, dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match=f'store.encoding = "{kind}": KV of float8_e4m3fn'):
        open_encoding(kind, layout, "store.encoding")


def test_an_unknown_encoding_is_refused() -> None:
    layout = KVLayout.gqa(1, 2, 5, block_size=3, dtype="float32")
    with pytest.raises(ConfigError, match="int8"):
        open_encoding("int9", layout, "store.encoding")
