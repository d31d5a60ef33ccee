"""The short form of `make store-kills`: fewer kills, of fewer processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from baton.store.folder.direct_files import try_direct
from tests.chaos.store_kills import LARGE, POOLED, SMALL, Load, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("eviction", "load"),
    [
        ("lru", SMALL),
        pytest.param("s3fifo", SMALL, marks=pytest.mark.every),
        ("lru", POOLED),
    ],
)
def test_a_store_in_use_is_right_whoever_is_killed(
    tmp_path: Path, eviction: str, load: Load
) -> None:
    kills = run(tmp_path / "kv", 12, eviction, load, num_processes=3)  # they take all cores
    assert kills.num_kills == 12
    assert kills.num_mid_write > 0, "some were killed while they wrote"
    assert kills.max_used_bytes > 0.8 * load.capacity_bytes, "the store was full"


@pytest.mark.every
@pytest.mark.usefixtures("direct_disk")
def test_files_that_are_written_again_are_right_whoever_is_killed(tmp_path: Path) -> None:
    kills = run(tmp_path / "kv", 30, "lru", LARGE)
    assert kills.num_in_old_file > 0, "some were killed while they wrote into an old file"
    assert kills.max_used_bytes > 0.8 * LARGE.capacity_bytes, "the store was full"


@pytest.fixture(name="direct_disk")
def direct_disk_fixture(tmp_path: Path) -> None:
    """Files can be written past the page cache here."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_direct(folder):
            pytest.skip(f"the filesystem of {tmp_path} refuses O_DIRECT")
    finally:
        os.close(folder)
