"""A store's tiers as Prometheus sees them: `baton_store_*` (docs/store.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from baton.store.counted_tier import TierReport


def make_families(reports: Sequence[TierReport]) -> Iterator[Metric]:
    """All families, each with all tiers."""
    yield from _counted(reports)
    yield from _lost(reports)
    used = GaugeMetricFamily("baton_store_used_bytes", "Taken up by entries.", labels=["tier"])
    capacity = GaugeMetricFamily(
        "baton_store_capacity_bytes", "That entries may take up.", labels=["tier"]
    )
    for report in reports:
        used.add_metric([report.kind], report.usage.used_bytes)
        capacity.add_metric([report.kind], report.usage.capacity_bytes)
    yield from (used, capacity)


def _counted(reports: Sequence[TierReport]) -> Iterator[Metric]:
    puts = CounterMetricFamily(
        "baton_store_puts", "Entries put by this worker.", labels=["tier", "result"]
    )
    leases = CounterMetricFamily(
        "baton_store_leases", "Entries asked for by this worker.", labels=["tier", "result"]
    )
    moved = CounterMetricFamily(
        "baton_store_bytes", "Of entries put or asked for.", labels=["tier", "direction"]
    )
    for report in reports:
        kind, counts = report.kind, report.counts
        puts.add_metric([kind, "stored"], counts.num_stored)
        puts.add_metric([kind, "exists"], counts.num_existing)
        puts.add_metric([kind, "full"], counts.num_full)
        puts.add_metric([kind, "failed"], counts.num_failed)
        leases.add_metric([kind, "hit"], counts.num_hits)
        leases.add_metric([kind, "miss"], counts.num_misses)
        moved.add_metric([kind, "written"], counts.written_bytes)
        moved.add_metric([kind, "read"], counts.read_bytes)
    yield from (puts, leases, moved)


def _lost(reports: Sequence[TierReport]) -> Iterator[Metric]:
    evictions = CounterMetricFamily(
        "baton_store_evictions", "Entries that made room for others.", labels=["tier", "outcome"]
    )
    damaged = CounterMetricFamily(
        "baton_store_damaged", "Entries that were not what was put; removed.", labels=["tier"]
    )
    for report in reports:
        kind, usage = report.kind, report.usage
        evictions.add_metric([kind, "demoted"], usage.num_demoted)
        evictions.add_metric([kind, "dropped"], usage.num_dropped)
        damaged.add_metric([kind], usage.num_damaged)
    yield from (evictions, damaged)
