"""A feed, counted: neither the feed nor the holdings know of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from baton.events.blocks import FeedEvent, FeedHealth, KVEventFeed, WorkerBlockIndex
    from baton.ids import WorkerId

_TYPES: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "Restarted", "Lost")
_COUNTS: Final = (
    ("gaps", "Times at which a live message was missing.", "num_gaps"),
    ("replays", "Times at which a worker was asked to repeat messages.", "num_replays"),
    ("lost", "Times at which messages could not be had any more.", "num_lost"),
    ("restarts", "Times at which a worker began to publish anew.", "num_restarts"),
    ("duplicates", "Messages that had been taken up before.", "num_duplicates"),
    ("unreadable", "Messages that could not be decoded.", "num_unreadable"),
    ("unknown", "Events of an unknown type.", "num_unknown_events"),
)


class MeasuredFeed:
    """A `KVEventFeed` that counts what it gives out, by type."""

    def __init__(self, inner: KVEventFeed) -> None:
        self._inner = inner
        self.num_events: Counter[str] = Counter(dict.fromkeys(_TYPES, 0))

    def poll(self) -> list[FeedEvent]:
        events = self._inner.poll()
        self.num_events.update(type(event).__name__ for event in events)
        return events

    @property
    def health(self) -> FeedHealth:
        return self._inner.health


class KVEventCollector(Collector):
    """All feeds of one process, as Prometheus reads them: nothing is counted twice.

    A worker that restarts keeps its series: its feed goes on over the restart.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._watched: dict[WorkerId, tuple[MeasuredFeed, WorkerBlockIndex]] = {}
        registry.register(self)

    def watch(
        self, worker: WorkerId, feed: KVEventFeed, block_index: WorkerBlockIndex
    ) -> MeasuredFeed:
        """Count this worker's feed from now on. Poll what is returned in its place."""
        measured = MeasuredFeed(feed)
        self._watched[worker] = (measured, block_index)
        return measured

    def forget(self, worker: WorkerId) -> None:
        """This worker is gone for good. Unknown ones are ignored."""
        self._watched.pop(worker, None)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. Any thread may ask."""
        watched = list(self._watched.items())
        events = CounterMetricFamily(
            "baton_kv_events", "KV events taken up.", labels=("worker", "type")
        )
        for worker, (feed, _) in watched:
            for kind in _TYPES:
                events.add_metric((worker, kind), feed.num_events[kind])
        yield events
        for name, text, field in _COUNTS:
            family = CounterMetricFamily(f"baton_kv_event_{name}", text, labels=("worker",))
            for worker, (feed, _) in watched:
                family.add_metric((worker,), getattr(feed.health, field))
            yield family
        yield _connected(watched)
        yield _held(watched)


def _connected(watched: list[tuple[WorkerId, tuple[MeasuredFeed, WorkerBlockIndex]]]) -> Metric:
    family = GaugeMetricFamily(
        "baton_kv_event_connected", "1 while a worker's events are followed.", labels=("worker",)
    )
    for worker, (feed, _) in watched:
        family.add_metric((worker,), float(feed.health.connected))
    return family


def _held(watched: list[tuple[WorkerId, tuple[MeasuredFeed, WorkerBlockIndex]]]) -> Metric:
    family = GaugeMetricFamily(
        "baton_kv_blocks_held",
        "Blocks in a worker's prefix cache, as its events report.",
        labels=("worker", "medium", "group"),
    )
    for worker, (_, block_index) in watched:
        for (medium, group), num_blocks in block_index.num_blocks.items():
            family.add_metric((worker, medium, str(group)), num_blocks)
    return family
