"""What a worker reports of its store in `GET /baton/v1/transfers`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.errors import StoreError
from baton.telemetry.transfer_report import MAX_TEXT_CHARS, MAX_TIERS, StoreReport, StoreTier

if TYPE_CHECKING:
    from baton.handoff.pool_mode.store_handoff import StoreHandoff
    from baton.store.counted_tier import TierReport

logger = logging.getLogger(__name__)


def report_store(handoffs: StoreHandoff | None) -> StoreReport | None:
    """Tiers and prompts. None: there is no store, or it cannot be looked at. From any thread."""
    if handoffs is None:
        return None
    try:
        tiers = tuple(map(_report_tier, handoffs.access.store.reports()[:MAX_TIERS]))
    except StoreError as exc:
        logger.debug("store: it is not reported: %s", exc)
        return None
    prefixes = handoffs.prefixes.counts
    return StoreReport(
        tiers=tiers,
        num_prompts_found=prefixes.num_whole + prefixes.num_given_up,
        num_prompts_missing=prefixes.num_missing,
    )


def _report_tier(report: TierReport) -> StoreTier:
    counts, usage = report.counts, report.usage
    return StoreTier(
        tier=report.kind[:MAX_TEXT_CHARS],
        used_bytes=max(0, usage.used_bytes),
        capacity_bytes=max(0, usage.capacity_bytes),
        num_hits=counts.num_hits,
        num_misses=counts.num_misses,
        read_bytes=counts.read_bytes,
        written_bytes=counts.written_bytes,
        is_available=usage.server is None or usage.server.is_available,
    )
