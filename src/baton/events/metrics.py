"""A feed, counted: neither the feed nor the holdings know of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.events.blocks import FeedEvent, FeedHealth, KVEventFeed, WorkerBlockIndex
from baton.events.wire import EVENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from baton.ids import WorkerId

_TYPES: Final = (*EVENT_TYPES, "Restarted", "Lost")
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


_Watched: TypeAlias = tuple[MeasuredFeed, WorkerBlockIndex]


class KVEventCollector(Collector):
    """All feeds of one process, as Prometheus reads them: nothing is counted twice.

    The counts of a worker that has several are added up.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._watched: dict[WorkerId, list[_Watched]] = {}
        registry.register(self)

    def watch(
        self, worker: WorkerId, feed: KVEventFeed, block_index: WorkerBlockIndex
    ) -> MeasuredFeed:
        """Count this feed of a worker from now on. Poll what is returned in its place."""
        measured = MeasuredFeed(feed)
        self._watched[worker] = [*self._watched.get(worker, ()), (measured, block_index)]
        return measured

    def forget(self, worker: WorkerId) -> None:
        """None of this worker's feeds is followed any more. Unknown ones are ignored."""
        self._watched.pop(worker, None)

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. Any thread may ask."""
        watched = list(self._watched.items())
        events = CounterMetricFamily(
            "baton_kv_events", "KV events taken up.", labels=("worker", "type")
        )
        for worker, feeds in watched:
            for kind in _TYPES:
                num = sum(feed.num_events[kind] for feed, _ in feeds)
                events.add_metric((worker, kind), num)
        yield events
        for name, text, field in _COUNTS:
            family = CounterMetricFamily(f"baton_kv_event_{name}", text, labels=("worker",))
            for worker, feeds in watched:
                num = sum(getattr(feed.health, field) for feed, _ in feeds)
                family.add_metric((worker,), num)
            yield family
        yield _connected(watched)
        yield _held(watched)


def _connected(watched: list[tuple[WorkerId, list[_Watched]]]) -> Metric:
    family = GaugeMetricFamily(
        "baton_kv_event_connected", "1 while a worker's events are followed.", labels=("worker",)
    )
    for worker, feeds in watched:
        family.add_metric((worker,), float(all(feed.health.connected for feed, _ in feeds)))
    return family


def _held(watched: list[tuple[WorkerId, list[_Watched]]]) -> Metric:
    family = GaugeMetricFamily(
        "baton_kv_blocks_held",
        "Blocks in a worker's prefix cache, and in its store, as its events report.",
        labels=("worker", "medium", "group"),
    )
    for worker, feeds in watched:
        held: Counter[tuple[str, int]] = Counter()
        for _, block_index in feeds:
            held.update(block_index.num_blocks)
        for (medium, group), num_blocks in held.items():
            family.add_metric((worker, medium, str(group)), num_blocks)
    return family
