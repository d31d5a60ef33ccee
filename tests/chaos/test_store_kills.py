"""The short form of `make store-kills`: fewer kills, of fewer processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.store_kills import CAPACITY_BYTES, run, verify_as_a_user

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("eviction", ["lru", pytest.param("s3fifo", marks=pytest.mark.every)])
def test_a_store_in_use_is_right_whoever_is_killed(tmp_path: Path, eviction: str) -> None:
    folder = tmp_path / "kv"
    kills = run(folder, 12, eviction, num_processes=3)  # they take all cores
    assert kills.num_kills == 12
    assert kills.num_mid_write > 0, "some were killed while they wrote"
    assert kills.max_used_bytes > 0.8 * CAPACITY_BYTES, "the store was full"
    assert verify_as_a_user(folder, eviction) == 0
