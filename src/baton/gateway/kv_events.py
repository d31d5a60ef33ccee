"""KV events of workers: where they are published, and which blocks each worker holds.

vLLM's are subscribed to on this host. A Baton worker is asked for its own, and a vLLM server for
those of its store, and from other hosts for those of its cache, where somebody uses them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from yarl import URL

from baton.clock import Clock, Instant
from baton.config.cluster_key import is_loopback
from baton.errors import ConfigError
from baton.events.blocks import DEFAULT_MEDIUM, STORE_MEDIUM, EventDomain, WorkerBlockIndex
from baton.events.endpoint import LiveEndpoint, ReplayEndpoint
from baton.events.journal import BATON_HASHES
from baton.events.metrics import KVEventCollector
from baton.gateway.journal_feed import JournalFeed
from baton.gateway.worker_info import is_same_host
from baton.router.worker_prefixes import MEDIA, WorkerPrefixes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from baton.events.blocks import KVEventFeed
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.prefixes import Prefixes
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.ids import Epoch, WorkerId
    from baton.protocol.worker_http import KVEventsSource
    from baton.router.fleet import Fleet

IPC: Final = "ipc://"
MAX_PATH_BYTES: Final = 107
"""Of a Unix socket's address on Linux, without the NUL that ends it."""

LOOPBACK: Final = "127.0.0.1"
ANY_HOST: Final = frozenset({"*", "0.0.0.0"})  # noqa: S104 - read here, not bound
MAX_PORT: Final = 65_535
_TCP: Final = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where one worker is followed. Without `replay`, whatever is missed is lost."""

    live: LiveEndpoint
    replay: ReplayEndpoint | None


def locate_events(source: KVEventsSource, listed: URL) -> EventEndpoints:
    """What to connect to, or to bind, for a worker that the operator listed at this address.

    Raises:
        ConfigError: it cannot be followed from here, or must not be; names what to change.
    """
    replay = source.replay_endpoint
    return EventEndpoints(
        _live(source.endpoint, source.topic, listed.host or ""),
        None if replay is None else _replay(replay, listed.host or ""),
    )


def _live(text: str, topic: str, listed: str) -> LiveEndpoint:
    if text.startswith(IPC):
        return LiveEndpoint(_path(text, listed), topic)
    host, port = _read_tcp(text)
    if host == "*":
        return LiveEndpoint(_tcp(_reachable(listed), port), topic)
    if is_loopback(host) and is_loopback(listed):
        return LiveEndpoint(_tcp(_address(host), port), topic, bind=True)
    raise ConfigError(
        f"vLLM connects to its endpoint {text!r} and does not listen there; "
        f'start it with "endpoint": "tcp://*:{port}"'
    )


def _replay(text: str, listed: str) -> ReplayEndpoint:
    """This one vLLM listens at in any case."""
    if text.startswith(IPC):
        return ReplayEndpoint(_path(text, listed))
    host, port = _read_tcp(text)
    if host in ANY_HOST:
        return ReplayEndpoint(_tcp(_reachable(listed), port))
    if is_same_host(host, listed):
        return ReplayEndpoint(_tcp(_address(host), port))
    raise ConfigError(
        f"its replay endpoint {text!r} is not on the host by which it is listed, {listed}; "
        f'start it with "replay_endpoint": "tcp://*:{port}"'
    )


def _path(text: str, listed: str) -> str:
    if not is_loopback(listed):
        raise ConfigError(
            f"its endpoint {text!r} is a file of the host {listed}, which is not known to be this "
            "one; list the worker by a loopback address, or let it publish at tcp://*:PORT"
        )
    path = text.removeprefix(IPC)
    if not path.isprintable() or not 0 < len(path.encode()) <= MAX_PATH_BYTES:
        raise ConfigError(
            f"its endpoint {text!r} is no path of a socket (1 to {MAX_PATH_BYTES} bytes)"
        )
    return text


def _read_tcp(text: str) -> tuple[str, int]:
    """Host, in lower case, and port."""
    match = _TCP.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= MAX_PORT:
        raise ConfigError(
            f"its endpoint {text!r} is neither ipc://PATH nor tcp://*:PORT, with a port that is "
            "known beforehand"
        )
    return match[1].lower(), int(match[2])


def _reachable(listed: str) -> str:
    """Where a worker that listens everywhere is reached: by IPv4, as vLLM's sockets are."""
    if is_loopback(listed):
        return LOOPBACK
    if ":" in listed:
        raise ConfigError(
            f"vLLM publishes over IPv4 alone; list the worker by an IPv4 address or a name, "
            f"not as [{listed}]"
        )
    return listed


def _address(host: str) -> str:
    return LOOPBACK if host == "localhost" else host


def _tcp(host: str, port: int) -> str:
    return f"tcp://{host}:{port}"


POLL_INTERVAL_S: Final = 0.1
RETRY_AFTER_S: Final = 1.0
"""What stands in the way may pass: a port to be bound may be another gateway's, which drains."""

EVENTS_PER_TURN: Final = 128
"""Taken up before requests get their turn again: a replay may bring tens of thousands."""

VLLM_HASHES: Final = EventDomain("vllm/sha256")
OF_CACHE: Final = frozenset({DEFAULT_MEDIUM})
OF_STORE: Final = frozenset({STORE_MEDIUM})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where events of these media come from: a publisher, or an address that is asked for them."""

    at: KVEventsSource | URL
    media: frozenset[str]


@dataclass(frozen=True, slots=True)
class Publisher:
    """One incarnation of a worker, and where its events come from."""

    worker: WorkerId
    epoch: Epoch
    model: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Followed:
    """`feed` is counted; `stop` ends what it comes from."""

    stop: Callable[[], Awaitable[None]]
    feed: KVEventFeed
    block_index: WorkerBlockIndex


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """It publishes, and its events are not followed, for this reason."""

    reason: str
    retry_at: Instant


Following: TypeAlias = Followed | NotFollowed


@dataclass(frozen=True, slots=True)
class FollowedWorker:
    """A worker that publishes. `prefixes` None: not looked at."""

    publisher: Publisher
    prefixes: WorkerPrefixes | None
    feeds: dict[Source, Following] = field(default_factory=dict)


class KVEvents:
    """Follows the workers that publish. Owner: the event loop's thread.

    Whom to follow is read off the workers' states once the fleet has changed, not sent by whoever
    changes them. zmq is imported for the first worker that publishes.
    """

    def __init__(
        self,
        workers: Workers,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        upstream: Upstream,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._workers, self._metrics, self._clock = workers, metrics, clock
        self._upstream, self._prefixes = upstream, prefixes
        self._collector = KVEventCollector(metrics.registry)
        self._following: dict[Worker, FollowedWorker] = {}
        self._all_followed_of: Fleet | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Future[None]] = set()

    def of(self, worker: Worker) -> FollowedWorker | None:
        """How this worker is followed; None if it does not publish, or is not used."""
        return self._following.get(worker)

    def follows(self, worker: WorkerId) -> bool:
        """Whether events of a worker of that name may still be taken up."""
        return any(each.publisher.worker == worker for each in self._following.values())

    @property
    def not_tokenized(self) -> dict[str, str]:
        """Models whose prompts cannot be looked for in what is followed, and why."""
        return {} if self._prefixes is None else self._prefixes.not_tokenized

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End every subscriber's thread; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(self._drop(worker) for worker in list(self._following)))
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                fleet = self._workers.fleet
                if fleet is not self._all_followed_of and not await self._drop_stale():
                    # Only now: a bound port is free some time after it was dropped.
                    self._all_followed_of = fleet if self._follow_new() else None
                await self._apply_events()
            except Exception:
                log.exception("following KV events failed; trying again")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _drop_stale(self) -> bool:
        """Forget incarnations that are over; whether there were any."""
        gone = [w for w, f in self._following.items() if f.publisher != self._publisher_of(w)]
        if gone:
            await asyncio.gather(*(self._drop(worker) for worker in gone))
        return bool(gone)

    def _follow_new(self) -> bool:
        """Whether all are followed that publish: else some must be tried again."""
        are_all = True
        for worker in self._workers.all:
            publisher = self._publisher_of(worker)
            if publisher is None:
                continue
            if worker not in self._following:
                self._following[worker] = self._begin(publisher)
            followed = self._following[worker]
            for source in publisher.sources:
                before = followed.feeds.get(source)
                if before is None or (
                    isinstance(before, NotFollowed) and self._clock.now() >= before.retry_at
                ):
                    followed.feeds[source] = self._try_follow(worker, publisher, source)
                are_all = are_all and isinstance(followed.feeds[source], Followed)
            if followed.prefixes is not None:
                followed.prefixes.reports_cache = any(
                    isinstance(feed, Followed) and DEFAULT_MEDIUM in source.media
                    for source, feed in followed.feeds.items()
                )
        return are_all

    def _begin(self, publisher: Publisher) -> FollowedWorker:
        prefixes = None
        if self._prefixes is not None:
            prefixes = self._prefixes.follow(publisher.model, publisher.worker)
        return FollowedWorker(publisher, prefixes)

    def _try_follow(self, worker: Worker, publisher: Publisher, source: Source) -> Following:
        if isinstance(source.at, URL):
            journal = JournalFeed(source.at, self._upstream)
            return self._count(publisher, journal, journal.stop, WorkerBlockIndex(BATON_HASHES))
        try:
            return self._subscribe(publisher, locate_events(source.at, worker.url))
        except ConfigError as exc:
            if source not in self._following[worker].feeds:
                self._metrics.kv_events_not_followed.inc()
                log.warning("KV events of %s are not followed: %s", worker, exc)
            return NotFollowed(str(exc), Instant(self._clock.now() + RETRY_AFTER_S))

    def _subscribe(self, publisher: Publisher, endpoints: EventEndpoints) -> Followed:
        from baton.events.subscriber import (  # noqa: PLC0415 - zmq, which few gateways need
            KVEventSubscriber,
            SubscriberOptions,
        )

        options = SubscriberOptions(publisher.worker, VLLM_HASHES, endpoints.live, endpoints.replay)
        subscriber = KVEventSubscriber(options, self._clock)
        subscriber.start()
        stop = partial(asyncio.to_thread, subscriber.stop)
        return self._count(publisher, subscriber, stop, WorkerBlockIndex(VLLM_HASHES))

    def _count(
        self,
        publisher: Publisher,
        feed: KVEventFeed,
        stop: Callable[[], Awaitable[None]],
        block_index: WorkerBlockIndex,
    ) -> Followed:
        counted = self._collector.watch(publisher.worker, feed, block_index)
        return Followed(stop, counted, block_index)

    async def _drop(self, worker: Worker) -> None:
        followed = self._following.pop(worker)
        publisher = followed.publisher
        self._collector.forget(publisher.worker)
        if self._prefixes is not None:
            self._prefixes.forget(publisher.model, publisher.worker)
        stops = [feed.stop() for feed in followed.feeds.values() if isinstance(feed, Followed)]
        ending = asyncio.ensure_future(_all(stops))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)  # who drops it may be cancelled: `stop` waits for it

    def _publisher_of(self, worker: Worker) -> Publisher | None:
        """The worker's present incarnation, if it publishes, or is expected to cache prompts."""
        info = worker.info
        if info is None or worker.is_gone:
            return None
        sources = []
        if info.protocol == "vllm" and info.kv_events is not None:
            if not info.relays_kv_events or is_loopback(worker.url.host or ""):
                sources.append(Source(info.kv_events, OF_CACHE))
            elif self._prefixes is not None:
                sources.append(Source(worker.url, OF_CACHE))
        if info.has_kv_journal and self._prefixes is not None:
            # Whose address it is was checked before the worker came up.
            media = MEDIA if info.protocol == "baton" else OF_STORE
            sources.append(Source(worker.control_urls[0], media))
        if not sources and self._prefixes is None:
            return None  # else what is expected of a worker ends with its incarnation
        served = info.served_model_name
        return Publisher(info.worker, info.epoch, served, tuple(sources))

    async def _apply_events(self) -> None:
        for followed in list(self._following.values()):
            for source, feed in list(followed.feeds.items()):
                if isinstance(feed, Followed):
                    await _apply(feed, followed.prefixes, source.media, self._clock.now())


async def _all(stops: list[Awaitable[None]]) -> None:
    await asyncio.gather(*stops)


async def _apply(
    followed: Followed, prefixes: WorkerPrefixes | None, media: frozenset[str], now: float
) -> None:
    for num_taken, event in enumerate(followed.feed.poll(), start=1):
        followed.block_index.apply(event)
        if prefixes is not None:
            prefixes.apply(event, media, now)
        if num_taken % EVENTS_PER_TURN == 0:
            await asyncio.sleep(0)
