"""Copies past the caches, by libpmem and without it."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import ConfigError
from baton.store.interface import TIERS, TierContext
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import CONTRACT_KEY
from baton.transfer import streaming_copy
from baton.transfer.streaming_copy import find_streaming_copy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["libpmem", "memcpy"], autouse=True)
def library_fixture(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """With the library, where it is installed, and as if it were not."""

    def refuse() -> None:
        raise ConfigError("not installed")

    if request.param == "memcpy":
        monkeypatch.setattr(streaming_copy, "open_libpmem", refuse)
    find_streaming_copy.cache_clear()
    if find_streaming_copy().library != request.param:
        find_streaming_copy.cache_clear()
        pytest.skip("libpmem is not installed, or cannot be used here")
    yield
    find_streaming_copy.cache_clear()


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4096, (1 << 20) + 77])
@pytest.mark.parametrize("offsets", [(0, 0), (16, 0), (1, 31), (92, 4095)])
def test_all_bytes_are_copied_and_no_others(num_bytes: int, offsets: tuple[int, int]) -> None:
    to, begin = offsets
    source = np.random.default_rng(1).integers(1, 256, begin + num_bytes, dtype=np.uint8)
    source.flags.writeable = False
    into = np.zeros(to + num_bytes + 64, np.uint8)
    find_streaming_copy().copy(into[to : to + num_bytes], source[begin:])
    assert (into[to : to + num_bytes] == source[begin:]).all()
    assert not into[:to].any()
    assert not into[to + num_bytes :].any()


@pytest.mark.parametrize("num_bytes", [99, 101])
def test_arrays_of_two_lengths_are_refused(num_bytes: int) -> None:
    into = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match="100"):
        find_streaming_copy().copy(into, np.ones(num_bytes, np.uint8))
    assert not into.any()


def test_the_tier_shared_reports_what_copies_into_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by, context = find_streaming_copy(), TierContext("c", CONTRACT_KEY, ManualClock())
    with (
        caplog.at_level(logging.INFO),
        closing(TIERS.build("shared", {"directory": str(tmp_path)})(context)) as tier,
    ):
        assert tier.usage().copied_by == by.library
    assert f"{by.library} copies into {tmp_path}" in caplog.text
    assert by.refusal in caplog.text
    assert bool(by.refusal) == (by.library == "memcpy")
