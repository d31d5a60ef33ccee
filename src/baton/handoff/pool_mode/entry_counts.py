"""What became of the entries of handoffs through the store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EntryCounts:
    """Entries of handoffs that ended or go on. Owner: the pool's thread; others read.

    Of prefills: `num_kept` were put, `num_known` were in the store already. Of decodes: `num_taken`
    came, `num_missing` had not when their handoff ended, and were computed.
    """

    num_stored: int = 0
    num_present: int = 0
    num_loaded: int = 0
    num_missing: int = 0
