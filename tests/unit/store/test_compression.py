"""Bodies in fewer bytes, and when they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.store.compression import (
    MIN_BODY_BYTES,
    TRIAL_INTERVAL,
    CompressionChoice,
    compress,
    decompress,
)

BODY_BYTES = 1 << 18
RNG = np.random.default_rng(3)


def make_kv(dtype: str, num_bytes: int = BODY_BYTES) -> bytes:
    """Numbers as KV has them: all signs, exponents near each other."""
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    kind = np.dtype(kinds[dtype])
    return RNG.normal(size=num_bytes // kind.itemsize).astype(kind).tobytes()


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.75), ("float16", 0.95), ("float32", 0.9)]
)
def test_kv_becomes_smaller_and_comes_back(dtype: str, most: float) -> None:
    body = make_kv(dtype)
    compressed = compress(body)
    assert compressed is not None
    assert len(compressed) < most * len(body)
    into = bytearray(len(body))
    decompress(memoryview(compressed), memoryview(into))
    assert into == body


@pytest.mark.parametrize("body", [RNG.bytes(BODY_BYTES), bytes(BODY_BYTES), b"", b"abc"])
def test_what_gains_nothing_or_too_much_stays_as_it_is(body: bytes) -> None:
    assert compress(body) is None


@given(st.binary(max_size=200), st.sampled_from([0, 1, 64, BODY_BYTES]))
def test_anything_else_is_refused(data: bytes, num_bytes: int) -> None:
    right = compress(make_kv("bfloat16"))
    assert right is not None
    for compressed in (data, right[: len(right) // 2], right[:-1] + b"?", b"\x03" + right[1:]):
        into = bytearray(num_bytes)
        try:
            decompress(memoryview(compressed), memoryview(into))
        except ProtocolError:
            continue
        assert num_bytes in {0, BODY_BYTES} or len(compressed) >= num_bytes


class Medium:
    """A disk and a codec of constant speed, as a choice sees them. Seconds for a byte."""

    def __init__(self, byte_s: float, codec_byte_s: float, ratio: float) -> None:
        self.byte_s, self.codec_byte_s, self.ratio = byte_s, codec_byte_s, ratio

    def put(self, choice: CompressionChoice) -> bool:
        """One body written, and read; whether it was compressed."""
        is_compressed, stored = choice.begin_put(BODY_BYTES), BODY_BYTES
        if is_compressed:
            stored = int(self.ratio * BODY_BYTES)
            choice.observe_compression(BODY_BYTES, stored, self.codec_byte_s * BODY_BYTES)
        choice.observe_write(stored, self.byte_s * stored)
        choice.observe_read(stored, self.byte_s * stored)
        if is_compressed:
            choice.observe_decompression(BODY_BYTES, self.codec_byte_s * BODY_BYTES)
        return is_compressed


@given(byte_ns=st.floats(0.1, 100), codec_ns=st.floats(0.1, 10), ratio=st.floats(0.3, 1.0))
def test_it_is_on_where_it_is_quicker(byte_ns: float, codec_ns: float, ratio: float) -> None:
    medium, choice = Medium(byte_ns * 1e-9, codec_ns * 1e-9, ratio), CompressionChoice(True)
    compressed = [medium.put(choice) for _ in range(4 * TRIAL_INTERVAL)]
    assert compressed[0], "the first is a trial"
    raw_ns, compressed_ns = 2 * byte_ns, 2 * (ratio * byte_ns + codec_ns)
    if compressed_ns < 0.89 * raw_ns:
        assert all(compressed[2:])
    if compressed_ns > 0.91 * raw_ns:
        assert sum(compressed) == 4, "trials alone"


def test_it_follows_a_medium_that_changes_and_does_not_alternate() -> None:
    slow, fast = Medium(20e-9, 1e-9, 0.68), Medium(1e-9, 1e-9, 0.68)
    choice = CompressionChoice(True)
    assert all(slow.put(choice) for _ in range(100))
    assert choice.is_on
    compressed = [fast.put(choice) for _ in range(300)]
    assert sum(compressed[-2 * TRIAL_INTERVAL :]) <= 2, "trials alone"
    between = Medium(4e-9, 1e-9, 0.68)  # quicker by 7 %: less than is needed to begin
    compressed = [between.put(choice) for _ in range(300)]
    assert sum(compressed) <= 6
    assert not choice.is_on
    for _ in range(300):
        slow.put(choice)
    assert choice.is_on
    assert all(between.put(choice) for _ in range(300)), "quicker still: it stays on"


def test_small_bodies_are_left_alone_and_always_is_always() -> None:
    always = CompressionChoice(False)
    assert not always.begin_put(MIN_BODY_BYTES - 1)
    medium = Medium(0.0, 1e-9, 0.9)
    assert all(medium.put(always) for _ in range(100))
