"""Which running requests move to another worker. Pure: times are given."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

TYPICAL_ANSWER_TOKENS: Final = 128
"""Of an answer whose client names no limit."""


class MoveCause(StrEnum):
    """Why a stream moves: its worker ends, generates too slowly, or lacks KV blocks."""

    DRAIN = "drain"
    SLOW = "slow"
    PRESSURE = "pressure"
