"""Which blocks each vLLM worker holds: its KV events, followed for as long as its life lasts.

    Workers ── who is there, in which life ──► KVEvents ──► a subscriber (a thread) for each
                                                  ▲ poll            │ events
                                                  └─────────────────┘──► WorkerBlockIndex

A worker that is down keeps its holdings: if it comes back in the same life, they are still right.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.clock import Instant
from baton.errors import ConfigError
from baton.events.block_index import WorkerBlockIndex
from baton.events.blocks import EventDomain
from baton.events.metrics import KVEventCollector
from baton.gateway.event_endpoints import locate_events

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.events.blocks import KVEventFeed
    from baton.events.subscriber import KVEventSubscriber
    from baton.gateway.event_endpoints import EventEndpoints
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.worker_info import KVEventsSource
    from baton.gateway.workers import Worker, Workers
    from baton.ids import Epoch, WorkerId

POLL_INTERVAL_S: Final = 0.1
RETRY_AFTER_S: Final = 1.0
"""What stands in the way may pass: a port to be bound may be another gateway's, which drains."""

EVENTS_PER_TURN: Final = 128
"""Taken up before requests get their turn again: a replay may bring tens of thousands."""

VLLM_HASHES: Final = EventDomain("vllm/sha256")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publisher:
    """One life of a worker, and where it says that its events are had."""

    worker: WorkerId
    epoch: Epoch
    source: KVEventsSource


@dataclass(frozen=True, slots=True)
class Followed:
    """`feed` is the subscriber's, counted."""

    publisher: Publisher
    subscriber: KVEventSubscriber
    feed: KVEventFeed
    block_index: WorkerBlockIndex


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """It publishes, and nobody listens, for this reason."""

    publisher: Publisher
    reason: str
    retry_at: Instant


Following: TypeAlias = Followed | NotFollowed


class KVEvents:
    """Follows the workers that publish. Owner: the event loop's thread.

    Whom to follow is read off the workers' states before each poll, not told by whoever changes
    them. zmq is imported for the first worker that publishes.
    """

    def __init__(self, workers: Workers, metrics: GatewayMetrics, clock: Clock) -> None:
        self._workers, self._metrics, self._clock = workers, metrics, clock
        self._collector = KVEventCollector(metrics.registry)
        self._following: dict[Worker, Following] = {}
        self._task: asyncio.Task[None] | None = None

    def of(self, worker: Worker) -> Following | None:
        """How this worker is followed; None if it does not publish, or is not used."""
        return self._following.get(worker)

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End every subscriber's thread; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(self._drop(worker) for worker in list(self._following)))

    async def _run(self) -> None:
        while True:
            try:
                if not await self._drop_stale():  # a bound port is free only some time later
                    self._follow_new()
                await self._apply_events()
            except Exception:
                log.exception("following KV events failed; trying again")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _drop_stale(self) -> bool:
        """Forget lives that are over; whether there were any."""
        gone = [w for w, f in self._following.items() if f.publisher != _publisher_of(w)]
        await asyncio.gather(*(self._drop(worker) for worker in gone))
        return bool(gone)

    def _follow_new(self) -> None:
        for worker in self._workers.all:
            publisher = _publisher_of(worker)
            if publisher is not None and self._is_due(worker):
                self._following[worker] = self._try_follow(worker, publisher)

    def _is_due(self, worker: Worker) -> bool:
        match self._following.get(worker):
            case None:
                return True
            case NotFollowed(retry_at=at):
                return self._clock.now() >= at
            case Followed():
                return False

    def _try_follow(self, worker: Worker, publisher: Publisher) -> Following:
        try:
            return self._follow(publisher, locate_events(publisher.source, worker.url))
        except ConfigError as exc:
            if worker not in self._following:
                self._metrics.kv_events_not_followed.inc()
                log.warning("KV events of %s are not followed: %s", worker, exc)
            retry_at = Instant(self._clock.now() + RETRY_AFTER_S)
            return NotFollowed(publisher, str(exc), retry_at)

    def _follow(self, publisher: Publisher, endpoints: EventEndpoints) -> Followed:
        from baton.events.subscriber import (  # noqa: PLC0415 - zmq, which few gateways need
            KVEventSubscriber,
            SubscriberOptions,
        )

        options = SubscriberOptions(publisher.worker, VLLM_HASHES, endpoints.live, endpoints.replay)
        subscriber = KVEventSubscriber(options, self._clock)
        subscriber.start()
        block_index = WorkerBlockIndex(VLLM_HASHES)
        feed = self._collector.watch(publisher.worker, subscriber, block_index)
        return Followed(publisher, subscriber, feed, block_index)

    async def _drop(self, worker: Worker) -> None:
        following = self._following.pop(worker)
        if isinstance(following, Followed):
            self._collector.forget(following.publisher.worker)
            await asyncio.to_thread(following.subscriber.stop)

    async def _apply_events(self) -> None:
        for following in list(self._following.values()):
            if isinstance(following, Followed):
                await _apply(following)


async def _apply(followed: Followed) -> None:
    for num_taken, event in enumerate(followed.feed.poll(), start=1):
        followed.block_index.apply(event)
        if num_taken % EVENTS_PER_TURN == 0:
            await asyncio.sleep(0)


def _publisher_of(worker: Worker) -> Publisher | None:
    """The worker's present life, if it publishes and is used. Only vLLM's events are known."""
    info = worker.info
    if info is None or info.kv_events is None or info.protocol != "vllm":
        return None
    return Publisher(info.worker, info.epoch, info.kv_events)
