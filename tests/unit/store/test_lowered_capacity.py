"""A tier that is opened again with less room than it has filled."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from baton.clock import MachineClock
from baton.store.interface import TIERS, PutResult, Tier, TierContext
from baton.testing.store_contract import name_of

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def open_file(folder: Path, capacity_bytes: int) -> Tier:
    options = {"directory": str(folder), "capacity_bytes": capacity_bytes}
    return TIERS.build("file", options)(TierContext("c", bytes(32), MachineClock()))


@pytest.mark.parametrize("body_bytes", [8 << 10, MIB], ids=["small", "past the page cache"])
def test_a_lowered_capacity_is_reached_with_the_next_put(tmp_path: Path, body_bytes: int) -> None:
    with closing(open_file(tmp_path / "kv", 16 * body_bytes)) as tier:
        for i in range(8):
            tier.put(name_of(f"{i}"), bytes(body_bytes))
        assert tier.usage().used_bytes > 4 * body_bytes
    with closing(open_file(tmp_path / "kv", 4 * body_bytes)) as tier:
        for i in range(8, 10):
            assert tier.put(name_of(f"{i}"), bytes(body_bytes)) is PutResult.STORED
            usage = tier.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            assert tier.find([name_of(f"{i}")]) == 1
