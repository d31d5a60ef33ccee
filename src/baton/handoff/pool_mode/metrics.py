"""What a worker's handoffs through the store came to, and its tiers (docs/store.md)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.errors import StoreError
from baton.store.counted_tier import make_families

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from baton.handoff.pool_mode.store_access import StoreAccess

logger = logging.getLogger(__name__)


class PoolModeCollector(Collector):
    """Reads the counts at each scrape, from the scraper's thread."""

    def __init__(self, access: StoreAccess) -> None:
        self._access = access

    def collect(self) -> Iterable[Metric]:
        """See `Collector`. A store that cannot be looked at costs its own samples only."""
        counts = self._access.counts
        entries = CounterMetricFamily(
            "baton_pool_entries", "Entries of handoffs in mode pool.", labels=["role", "result"]
        )
        entries.add_metric(["prefill", "stored"], counts.num_stored)
        entries.add_metric(["prefill", "present"], counts.num_present)
        entries.add_metric(["decode", "loaded"], counts.num_loaded)
        entries.add_metric(["decode", "missing"], counts.num_missing)
        yield entries
        try:
            reports = self._access.store.reports()
        except StoreError as exc:
            logger.warning("store: not in the metrics: %s", exc)
            return
        yield from make_families(reports)

    def describe(self) -> Iterable[Metric]:
        """See `Collector`: nothing, so that registering reads nothing."""
        return ()
