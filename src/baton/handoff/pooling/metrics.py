"""What a worker's handoffs through the store came to, and its tiers (docs/store.md)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.errors import StoreError
from baton.store.metrics import make_families

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from baton.handoff.pooling.pool import Pool

logger = logging.getLogger(__name__)


class PoolCollector(Collector):
    """Reads the counts at each scrape, from the scraper's thread."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """See `Collector`. A store that cannot be looked at costs its own samples only."""
        tally = self._pool.tally
        entries = CounterMetricFamily(
            "baton_pool_entries", "Entries of handoffs in mode pool.", labels=["leg", "result"]
        )
        entries.add_metric(["prefill", "kept"], tally.num_kept)
        entries.add_metric(["prefill", "known"], tally.num_known)
        entries.add_metric(["decode", "taken"], tally.num_taken)
        entries.add_metric(["decode", "missing"], tally.num_missing)
        yield entries
        try:
            reports = self._pool.store.reports()
        except StoreError as exc:
            logger.warning("store: not in the metrics: %s", exc)
            return
        yield from make_families(reports)

    def describe(self) -> Iterable[Metric]:
        """See `Collector`: nothing, so that registering reads nothing."""
        return ()
