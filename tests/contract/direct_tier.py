"""A tier `file` whose bodies go past the page cache, small as they are, in several pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from baton.clock import MachineClock
from baton.store.folder.direct_files import ALIGNMENT_BYTES
from baton.store.interface import TierContext
from baton.store.tiers.file import FileTier, FileTierOptions
from baton.testing.store_contract import BODY_BYTES, CONTRACT_KEY

if TYPE_CHECKING:
    from pathlib import Path

Durable = Literal["all", "large", "none"]


class DirectTier(FileTier):
    """One of the contract's bodies is three pieces."""

    min_direct_bytes: ClassVar = BODY_BYTES // 2
    piece_bytes: ClassVar = ALIGNMENT_BYTES


def open_direct_tier(
    place: Path,
    capacity_bytes: int = 1 << 30,
    *,
    direct_io: bool = True,
    durable: Durable = "none",
) -> DirectTier:
    """A tier in `place / "files"`. It does not wait for the disk: that is tested by itself."""
    options = FileTierOptions(
        directory=str(place / "files"),
        capacity_bytes=capacity_bytes,
        direct_io=direct_io,
        durable=durable,
    )
    return DirectTier(options, TierContext("contract", CONTRACT_KEY, MachineClock()))
