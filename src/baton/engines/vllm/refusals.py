"""Why a request's KV is not handed over: counted, and logged once for each cause."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

logger = logging.getLogger(__name__)

RefusalCode: TypeAlias = Literal[
    "stale_ticket",
    "invalid_ticket",
    "replayed_ticket",
    "not_a_producer",
    "not_a_consumer",
    "unsupported_request",
    "handoff_failed",
    "overloaded",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """No handoff for this request: it is computed here. `reason` is for people."""

    code: RefusalCode
    reason: str


class RefusalCounter:
    """Refusals since they were last taken. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def add(self, refusal: Refusal) -> None:
        """Count one, and log the first of its code."""
        self._counts[refusal.code] += 1
        if refusal.code not in self._logged:
            self._logged.add(refusal.code)
            logger.warning(
                "a request is computed here, without a handoff (%s): %s; further ones are counted "
                "in vllm:baton_refused_tickets_total",
                refusal.code,
                refusal.reason,
            )

    def take(self) -> dict[str, int]:
        """Counts by code, which start again at nothing."""
        counts, self._counts = dict(self._counts), Counter()
        return counts
