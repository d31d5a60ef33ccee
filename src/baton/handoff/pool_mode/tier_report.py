"""What a worker reports of its store's tiers in `GET /baton/v1/transfers`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.errors import StoreError
from baton.telemetry.transfer_report import MAX_TEXT_CHARS, MAX_TIERS, StoreTier

if TYPE_CHECKING:
    from baton.store.counted_tier import TierReport
    from baton.store.tiered import TieredStore

logger = logging.getLogger(__name__)


def report_tiers(store: TieredStore) -> tuple[StoreTier, ...]:
    """All tiers, the quickest first; none if one of them cannot be looked at. From any thread."""
    try:
        reports = store.reports()
    except StoreError as exc:
        logger.debug("store: its tiers are not reported: %s", exc)
        return ()
    return tuple(map(_report_tier, reports[:MAX_TIERS]))


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
