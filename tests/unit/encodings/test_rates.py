"""What an encoding takes: as calibrated, then by use, and as calibrated again once use is old."""

from __future__ import annotations

import pytest

from baton.clock import Instant, MachineClock
from baton.encodings.interface import ENCODINGS
from baton.encodings.rates import FRESH_S, MIN_BYTES, EncodingRate, calibrate
from baton.kv.layout import KVLayout


def test_use_counts_for_more_than_the_calibration_while_it_is_fresh() -> None:
    rate = EncodingRate(1e-9)
    assert rate.byte_s(Instant(0.0)) == 1e-9
    rate.add(MIN_BYTES, MIN_BYTES * 4e-9, Instant(5.0))
    assert rate.byte_s(Instant(5.0)) == pytest.approx(4e-9)
    assert rate.byte_s(Instant(5.1 + FRESH_S)) == 1e-9


def test_those_that_waited_for_something_else_count_for_little() -> None:
    rate = EncodingRate(1e-9)
    for seconds in (2e-9, 9e-9, 5.0, 2e-9, 9e-9):
        rate.add(MIN_BYTES, MIN_BYTES * seconds, Instant(0.0))
    assert rate.byte_s(Instant(1.0)) == pytest.approx(2e-9)


def test_small_pages_show_no_rate() -> None:
    rate = EncodingRate(1e-9)
    for _ in range(5):
        rate.add(MIN_BYTES - 1, 1.0, Instant(0.0))
    assert rate.byte_s(Instant(0.0)) == 1e-9


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_calibration_finds_a_plausible_rate(kind: str, dtype: str) -> None:
    layout = KVLayout.gqa(2, 2, 32, block_size=16, dtype=dtype)
    rates = calibrate(ENCODINGS.build(kind, {}), layout, MachineClock())
    for rate in (rates.encode, rates.decode):
        assert 1e-11 < rate.byte_s(Instant(0.0)) < 1e-6
