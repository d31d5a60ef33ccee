"""Counters around a tier, and their Prometheus families `baton_store_*` (docs/store.md)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from baton.errors import StoreError, StoreFullError
from baton.store.interface import (
    NO_TENANT,
    DelaysPromotion,
    NamedBody,
    PutResult,
    PutsMany,
    RemoteLookup,
    Usage,
    WritesBehind,
)
from baton.store.puts import put_each, take_one

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from baton.store.capacity import StoredEntry
    from baton.store.interface import (
        Body,
        EntryLease,
        EntryName,
        PutOutcome,
        PutsEntries,
        TenantLabel,
        Tier,
    )


@dataclass(slots=True)
class TierCounts:
    """Since the tier was opened. Bytes are of bodies."""

    num_stored: int = 0
    num_existing: int = 0
    num_full: int = 0
    num_failed: int = 0
    num_hits: int = 0
    num_misses: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of a store at one moment."""

    kind: str
    counts: TierCounts
    usage: Usage


class CountedTier:
    """See `Tier`. `kind` is what the tier is called in metrics.

    An entry that is leased counts as read. What the tier does of itself (handing down, looking
    before it writes) is not counted here; `inner` is the tier.
    """

    def __init__(self, kind: str, tier: Tier) -> None:
        self.inner, self.kind = tier, kind
        self.remote = tier if isinstance(tier, RemoteLookup) else None
        self._many = tier if isinstance(tier, PutsMany) else None
        self._counts = TierCounts()
        self._open = threading.Lock()
        self._last: Usage | None = None

    def find(self, names: Sequence[EntryName]) -> int:
        return self.inner.find(names)

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return take_one(self.put_many((NamedBody(name, body),), tenant))

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> Sequence[PutOutcome]:
        """See `PutsMany`; one after the other where the tier cannot do better."""
        if self._many is None:
            return self._count(entries, put_each(self.inner.put, entries, tenant))
        return self._count(entries, self._many.put_many(entries, tenant))

    def as_lower(self) -> PutsEntries:
        """Where the tier above puts its entries: without a wait, if this tier can take them so."""
        return _WritesBehind(self) if isinstance(self.inner, WritesBehind) else self

    def _count(
        self, entries: Sequence[NamedBody], outcomes: Sequence[PutOutcome]
    ) -> Sequence[PutOutcome]:
        counts = self._counts
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome is PutResult.STORED:
                counts.num_stored += 1
                counts.written_bytes += len(entry.body)
            elif outcome is PutResult.EXISTS:
                counts.num_existing += 1
            elif isinstance(outcome, StoreFullError):
                counts.num_full += 1
            else:
                counts.num_failed += 1
        return outcomes

    def try_lease(self, name: EntryName) -> EntryLease | None:
        lease = self.inner.try_lease(name)
        if lease is None:
            self._counts.num_misses += 1
            return None
        self._counts.num_hits += 1
        self._counts.read_bytes += lease.num_bytes
        return lease

    def is_copied_up(self, name: EntryName) -> bool:
        """Whether the entry, which was read now, is to be copied into the first tier."""
        return not isinstance(self.inner, DelaysPromotion) or self.inner.count_read(name)

    def discard(self, name: EntryName) -> None:
        self.inner.discard(name)

    def entries(self) -> list[StoredEntry]:
        return self.inner.entries()

    def is_whole(self, name: EntryName) -> bool:
        return self.inner.is_whole(name)

    def usage(self) -> Usage:
        """See `Tier`. When it is closed: as it was then."""
        with self._open:
            return self._last or self.inner.usage()

    def report(self) -> TierReport:
        """What was counted. From any thread.

        Raises:
            StoreError: the tier cannot be looked at.
        """
        return TierReport(self.kind, replace(self._counts), self.usage())

    def close(self) -> None:
        with self._open:
            if self._last is None:
                self._last = self._try_usage()
            self.inner.close()

    def _try_usage(self) -> Usage:
        try:
            return self.inner.usage()
        except StoreError:
            return Usage(0, 0, 0, 0, 0)


class _WritesBehind:
    def __init__(self, tier: CountedTier) -> None:
        self._tier = tier

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return take_one(self.put_many((NamedBody(name, body),), tenant))

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> Sequence[PutOutcome]:
        put_behind = cast("WritesBehind", self._tier.inner).put_behind
        outcomes = put_each(put_behind, entries, tenant)
        return self._tier._count(entries, outcomes)  # noqa: SLF001 - one class in two


def make_families(reports: Sequence[TierReport]) -> Iterator[Metric]:
    """All families, each with all tiers."""
    yield from _counted(reports)
    yield from _lost(reports)
    yield from _reached(reports)
    yield from _shown(reports)
    yield from _compressed(reports)
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
        "baton_store_evictions",
        "Entries that made room for others, or were too old.",
        labels=["tier", "outcome"],
    )
    damaged = CounterMetricFamily(
        "baton_store_damaged", "Entries that were not what was put; removed.", labels=["tier"]
    )
    unread = CounterMetricFamily(
        "baton_store_read_errors",
        "Reads of entries that the system refused (EIO); the entries stay.",
        labels=["tier"],
    )
    for report in reports:
        kind, usage = report.kind, report.usage
        evictions.add_metric([kind, "demoted"], usage.num_demoted)
        evictions.add_metric([kind, "dropped"], usage.num_dropped)
        evictions.add_metric([kind, "expired"], usage.num_expired)
        damaged.add_metric([kind], usage.num_damaged)
        unread.add_metric([kind], usage.num_read_errors)
    yield from (evictions, damaged, unread)


def _compressed(reports: Sequence[TierReport]) -> Iterator[Metric]:
    num_bytes = CounterMetricFamily(
        "baton_store_compression_bytes", "Of bodies that were compressed.", labels=["tier", "form"]
    )
    is_on = GaugeMetricFamily(
        "baton_store_compressing", "1: bodies are compressed; 0: it does not pay.", labels=["tier"]
    )
    for report in reports:
        compression = report.usage.compression
        if compression is not None:
            num_bytes.add_metric([report.kind, "raw"], compression.raw_bytes)
            num_bytes.add_metric([report.kind, "compressed"], compression.compressed_bytes)
            is_on.add_metric([report.kind], compression.is_on)
    yield from (num_bytes, is_on)


def _reached(reports: Sequence[TierReport]) -> Iterator[Metric]:
    failures = CounterMetricFamily(
        "baton_store_failures", "Requests to a server that failed or were late.", labels=["tier"]
    )
    available = GaugeMetricFamily(
        "baton_store_available", "1: it is asked; 0: it has failed.", labels=["tier"]
    )
    for report in reports:
        server = report.usage.server
        if server is not None:
            failures.add_metric([report.kind], server.num_failures)
            available.add_metric([report.kind], server.is_available)
    yield from (failures, available)


def _shown(reports: Sequence[TierReport]) -> Iterator[Metric]:
    entries = CounterMetricFamily(
        "baton_store_peer_entries",
        "Entries that other processes read from this tier, or put into it.",
        labels=["tier", "op"],
    )
    moved = CounterMetricFamily("baton_store_peer_bytes", "Of those.", labels=["tier", "op"])
    for report in reports:
        peers = report.usage.peers
        if peers is not None:
            entries.add_metric([report.kind, "read"], peers.num_read)
            entries.add_metric([report.kind, "write"], peers.num_written)
            moved.add_metric([report.kind, "read"], peers.read_bytes)
            moved.add_metric([report.kind, "write"], peers.written_bytes)
    yield from (entries, moved)
