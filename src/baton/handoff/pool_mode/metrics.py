"""What a worker's handoffs through the store came to, and its tiers (docs/store.md)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.errors import StoreError
from baton.store.counted_tier import make_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric

    from baton.handoff.pool_mode.prefix_store import PrefixCounts
    from baton.handoff.pool_mode.store_access import StoreAccess

logger = logging.getLogger(__name__)


class PoolModeCollector(Collector):
    """Reads the counts at each scrape, from the scraper's thread."""

    def __init__(self, access: StoreAccess, prefixes: PrefixCounts) -> None:
        self._access, self._prefixes = access, prefixes

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
        yield from _encoding_families(self._access)
        if self._access.keeps_prefixes:
            yield from _prefix_families(self._prefixes)
        try:
            reports = self._access.store.reports()
        except StoreError as exc:
            logger.warning("store: not in the metrics: %s", exc)
            return
        yield from make_families(reports)


def _encoding_families(access: StoreAccess) -> Iterator[Metric]:
    """Both directions of the store's encoding; of `raw` as well: then the two sizes are equal."""
    name = access.encoding.name
    num_bytes = CounterMetricFamily(
        "baton_encoding_bytes", "KV that was encoded or decoded.", labels=["encoding", "op", "form"]
    )
    seconds = CounterMetricFamily(
        "baton_encoding_seconds", "What that took.", labels=["encoding", "op"]
    )
    for op, counts in (("encode", access.encoded), ("decode", access.decoded)):
        num_bytes.add_metric([name, op, "raw"], counts.raw_bytes)
        num_bytes.add_metric([name, op, "encoded"], counts.encoded_bytes)
        seconds.add_metric([name, op], counts.seconds)
    yield from (num_bytes, seconds)


def _prefix_families(counts: PrefixCounts) -> Iterator[Metric]:
    loads = CounterMetricFamily(
        "baton_prefix_loads", "Prompts looked for in the store, by outcome.", labels=["result"]
    )
    for result, num in (
        ("loaded", counts.num_whole),
        ("missing", counts.num_missing),
        ("given_up", counts.num_given_up),
        ("failed", counts.num_failed),
        ("unused", counts.num_unused),
    ):
        loads.add_metric([result], num)
    seconds = CounterMetricFamily(
        "baton_prefix_load_seconds",
        "What loads took, and were expected to.",
        labels=["kind", "tier"],
    )
    refused = CounterMetricFamily(
        "baton_prefix_refused_tokens",
        "Tokens that were found, and computed: a load would take longer.",
        labels=["tier"],
    )
    for tier, tier_loads in tuple(counts.tiers.items()):
        seconds.add_metric(["actual", tier], tier_loads.loaded_s)
        seconds.add_metric(["predicted", tier], tier_loads.predicted_s)
        refused.add_metric([tier], tier_loads.refused_tokens)
    entries = CounterMetricFamily(
        "baton_prefix_entries", "Entries of what was computed, by outcome.", labels=["result"]
    )
    entries.add_metric(["stored"], counts.num_stored)
    entries.add_metric(["present"], counts.num_present)
    entries.add_metric(["dropped"], counts.num_dropped)
    tokens = CounterMetricFamily("baton_prefix_loaded_tokens", "Tokens loaded instead of computed.")
    tokens.add_metric([], counts.loaded_tokens)
    waiting = GaugeMetricFamily("baton_prefix_waiting_entries", "Entries that are to be kept.")
    waiting.add_metric([], counts.num_waiting)
    kept = CounterMetricFamily("baton_prefix_keep_seconds", "What keeping entries took.")
    kept.add_metric([], counts.kept_s)
    yield from (loads, seconds, refused, entries, tokens, waiting, kept)
