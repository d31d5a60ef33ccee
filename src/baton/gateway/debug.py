"""`/debug/requests`, `/debug/workers`, `/debug/links`: the latest requests; workers; handoffs."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
from yarl import URL

from baton.errors import UNDECODABLE, BatonError
from baton.events.blocks import DEFAULT_MEDIUM, FeedHealth
from baton.gateway.errors import SERVER_ERROR, PathNotFoundError
from baton.gateway.kv_events import Followed, NotFollowed
from baton.gateway.members.member_set import CONFIGURED
from baton.gateway.workers import Down, Draining, Pending, Preemption, Rejected, Up
from baton.protocol.worker_http import KV_EVENTS_PREFIX, Role, WorkerLoad, trace_path
from baton.router.handoff_costs import CostSource
from baton.router.health import HealthState
from baton.router.topology import Distance
from baton.telemetry.trace import RequestSpan, TraceSummary, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Clock
    from baton.gateway.kv_events import Following, KVEvents, Source
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.router.fleet import WorkerView
    from baton.router.learning import WorkerCost
    from baton.router.load import FleetLoad
    from baton.router.placement import Placement
    from baton.router.worker_prefixes import WorkerPrefixes


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: the gateway's trace, and where it was placed last."""

    trace: RequestSpan
    placement: Placement | None
    status: int


class RequestHistory:
    """A ring of the latest `capacity` records, by request id. Of two with one id, the latest.

    `num_added` counts all since the start, `num_failed` those that ended with a server's error.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_added = self.num_failed = 0
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Remember one, and forget the oldest if there is no room."""
        self.num_added += 1
        self.num_failed += record.status >= SERVER_ERROR
        self._records.pop(record.trace.request_id, None)
        self._records[record.trace.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request, if it is remembered still."""
        return self._records.get(request_id)

    def latest_first(self) -> Iterator[RequestRecord]:
        """All of them."""
        return reversed(self._records.values())


NUM_LISTED: Final = 100
FETCH_TIMEOUT_S: Final = 2.0
OK: Final = 200

log = logging.getLogger(__name__)


class ListedRequest(msgspec.Struct, frozen=True):
    """One line of `/debug/requests`."""

    id: str
    status: int
    mode: str | None
    outcome: str | None


class RequestList(msgspec.Struct, frozen=True):
    """The answer to `/debug/requests`: the latest first."""

    requests: tuple[ListedRequest, ...]


class RequestTrace(msgspec.Struct, frozen=True):
    """The answer to `/debug/requests/{id}`. `missing` names the roles that kept no trace."""

    id: str
    status: int
    placement: tuple[str, ...]
    summary: TraceSummary | None
    gateway: RequestSpan
    decode: RequestSpan | None
    prefill: RequestSpan | None
    missing: tuple[str, ...]


_trace_decoder = msgspec.json.Decoder(RequestSpan)


class RequestTraces:
    """Merges what gateway and workers remember of a request, when somebody asks."""

    def __init__(self, records: RequestHistory, workers: Workers, upstream: Upstream) -> None:
        self._records, self._workers, self._upstream = records, workers, upstream

    def latest(self) -> RequestList:
        """The latest requests."""
        return RequestList(
            tuple(
                ListedRequest(r.trace.request_id, r.status, r.trace.mode, r.trace.outcome)
                for r in islice(self._records.latest_first(), NUM_LISTED)
            )
        )

    async def of(self, request_id: str) -> RequestTrace:
        """One request, with the traces of its workers as far as they have them.

        Raises:
            PathNotFoundError: the gateway has forgotten it.
        """
        record = self._records.find(request_id)
        if record is None:
            raise PathNotFoundError(f"no request {request_id!r} is remembered")
        placed = record.placement
        decode, prefill = await asyncio.gather(
            self._fetch(placed.decode if placed else None, request_id),
            self._fetch(placed.prefill if placed else None, request_id),
        )
        return _merge(record, decode, prefill)

    async def _fetch(self, view: WorkerView | None, request_id: str) -> RequestSpan | None:
        worker = None if view is None else self._workers.with_id(view.id)
        if worker is None:
            return None
        path = trace_path(request_id)
        for url in worker.control_urls:  # each rank has one of its own: the first stands for all
            try:
                status, body = await self._upstream.get(
                    url.with_path(path, encoded=True), FETCH_TIMEOUT_S
                )
                if status == OK:
                    return _trace_decoder.decode(body)
            except (BatonError, *UNDECODABLE) as exc:
                log.info("no trace of %s from %s: %s", request_id, worker, exc)
        return None


def _merge(
    record: RequestRecord, decode: RequestSpan | None, prefill: RequestSpan | None
) -> RequestTrace:
    placed = record.placement
    missing: list[str] = []
    if placed is not None and decode is None:
        missing.append(f"decode ({placed.decode.id})")
    if placed is not None and placed.prefill is not None and prefill is None:
        missing.append(f"prefill ({placed.prefill.id})")
    return RequestTrace(
        id=record.trace.request_id,
        status=record.status,
        placement=(*placed.reasons, *placed.why) if placed is not None else (),
        summary=None if decode is None else summarize(record.trace, decode, prefill),
        gateway=record.trace,
        decode=decode,
        prefill=prefill,
        missing=tuple(missing),
    )


class CachedBlocks(msgspec.Struct, frozen=True):
    """How many blocks of one kind a worker holds."""

    medium: str
    group: int
    num_blocks: int


class FollowedEvents(msgspec.Struct, frozen=True):
    """A worker's KV events. `problem` is why they are not followed, if they are not.

    `num_ignored` of the blocks that it reported cannot be found by a prompt's tokens.
    """

    endpoint: str
    problem: str | None = None
    blocks: tuple[CachedBlocks, ...] = ()
    num_ignored: int = 0
    feed: FeedHealth | None = None


class LearnedCost(msgspec.Struct, frozen=True):
    """Seconds `fixed + each * size`, from so many observations; how wrong predictions were."""

    fixed_s: float
    each_s: float
    num_seen: int
    error: float


class GivenWork(msgspec.Struct, frozen=True):
    """Prompts and answers under way; when a new prompt would begin; costs as they were learned.

    `prefill` is for a prompt's tokens, `step` for the answers that are generated at once, `load`
    for tokens that are loaded from the store.
    """

    num_prefills: int
    num_decodes: int
    queue_s: float
    prefill_share: float
    prefill: LearnedCost
    step: LearnedCost
    load: LearnedCost


class ListedWorker(msgspec.Struct, frozen=True):
    """One worker that the operator or a source lists.

    `kv_events` is null where it publishes none, `load` where it does not report its load. `given`
    is what this gateway has given it to do, null before its first request. `health` is what is
    thought of a worker that is up, `share` its part of the requests that it would get otherwise.
    `topology` is where it is, `zone/rack/host/device`. `store_events`: of a vLLM server's store,
    which Baton reports; its own engine's `kv_events` are of both. `sources` list it:
    "configuration" or texts of `gateway.members`, none once it has left; `why_withdrawn` is why it
    gets nothing new.
    """

    worker: str | None
    epoch: str | None
    url: str
    role: Role
    state: str
    reason: str | None
    kv_events: FollowedEvents | None
    load: WorkerLoad | None = None
    given: GivenWork | None = None
    health: HealthState = HealthState.HEALTHY
    share: float = 1.0
    topology: str | None = None
    store_events: FollowedEvents | None = None
    sources: tuple[str, ...] = (CONFIGURED,)
    why_withdrawn: str | None = None


class WorkerListReply(msgspec.Struct, frozen=True):
    """The answer to `/debug/workers`, in the order in which they were listed.

    `not_tokenized`: why prompts of a model are not tokenized here, so that what is cached of them
    is not known. `source_problems`: a line for each source that lists no worker, or cannot be read.
    """

    workers: tuple[ListedWorker, ...]
    not_tokenized: dict[str, str] = {}
    source_problems: tuple[str, ...] = ()


class WorkerList:
    """Shows the workers as the gateway sees them now."""

    def __init__(self, workers: Workers, events: KVEvents, load: FleetLoad, clock: Clock) -> None:
        self._workers, self._events, self._load, self._clock = workers, events, load, clock

    def show(self, most: int | None = None) -> WorkerListReply:
        """All workers, or the first `most` of them."""
        workers = tuple(self._show(worker) for worker in islice(self._workers.all, most))
        problems = tuple(self._workers.explain_sources())
        return WorkerListReply(workers, self._events.not_tokenized, problems)

    def _show(self, worker: Worker) -> ListedWorker:
        of_cache, of_store = self._show_feeds(worker)
        return ListedWorker(
            worker=worker.info.worker if worker.info else None,
            epoch=worker.info.epoch if worker.info else None,
            url=str(worker.url),
            role=worker.address.role,
            state=type(worker.state).__name__.lower(),
            reason=_reason(worker),
            kv_events=of_cache,
            store_events=of_store,
            load=worker.load,
            given=self._show_given(worker),
            health=worker.health.state,
            share=self._share_of(worker),
            topology=(worker.info.topology or None) if worker.info else None,
            sources=worker.sources,
            why_withdrawn=worker.why_withdrawn,
        )

    def _show_feeds(self, worker: Worker) -> tuple[FollowedEvents | None, FollowedEvents | None]:
        """Of its own cache, and of its store where those come by another way."""
        followed = self._events.of(worker)
        of_cache = of_store = None
        if followed is None:
            return None, None
        for source, feed in followed.feeds.items():
            shown = _show_events(source, feed, followed.prefixes)
            if DEFAULT_MEDIUM in source.media:
                of_cache = shown
            else:
                of_store = shown
        return of_cache, of_store

    def _share_of(self, worker: Worker) -> float:
        slow_start = worker.health.slow_start
        return 1.0 if slow_start is None else slow_start.share(self._clock.now())

    def _show_given(self, worker: Worker) -> GivenWork | None:
        if worker.info is None:
            return None
        info, now = worker.info, self._clock.now()
        activity = self._load.find(info.worker, info.served_model_name)
        if activity is None:
            return None
        return GivenWork(
            activity.num_prefills,
            activity.num_decodes,
            activity.queue_s(now),
            activity.prefill_share(now),
            _show_cost(activity.prefill_cost),
            _show_cost(activity.step_cost),
            _show_cost(activity.load_cost),
        )


class HandoffLine(msgspec.Struct, frozen=True):
    """Exposed seconds of a handoff over one distance, `fixed_s + each_s * tokens`.

    `source` is what they rest on, `num_pairs` those that have handed over.
    """

    distance: str
    source: CostSource
    fixed_s: float
    each_s: float
    num_pairs: int
    link_bytes_per_s: float | None


class ListedLink(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """What two workers have measured: `latency_s + bytes / bytes_per_s`, one way.

    `kv_bytes_per_s` are bytes of KV as it goes now: what is encoded counts as raw.
    """

    from_: str
    to: str
    transport: str
    latency_s: float
    bytes_per_s: float
    encoding: str
    kv_bytes_per_s: float


class ModelLinks(msgspec.Struct, frozen=True):
    """One model's: the costs that placement uses, and the measured links; `MOST_LINKS` of them."""

    model: str
    handoffs: tuple[HandoffLine, ...]
    links: tuple[ListedLink, ...]


class LinkListReply(msgspec.Struct, frozen=True):
    """The answer to `/debug/links`."""

    models: tuple[ModelLinks, ...]


MOST_LINKS: Final = 1000


class LinkList:
    """Shows what handoffs cost between the workers, as this gateway knows it."""

    def __init__(self, workers: Workers, load: FleetLoad) -> None:
        self._workers, self._load = workers, load

    def show(self) -> LinkListReply:
        """All models that some worker serves."""
        return LinkListReply(tuple(map(self._show, sorted(self._workers.fleet.models))))

    def _show(self, model: str) -> ModelLinks:
        costs = self._load.costs(model).handoffs
        lines = (
            HandoffLine(
                str(each),
                costs.source(each),
                line.fixed,
                line.each,
                line.num_workers,
                costs.measured_rate(each),
            )
            for each, line in zip(Distance, costs.lines, strict=True)
        )
        links = (
            ListedLink(
                one,
                other,
                link.transport,
                link.latency_s,
                1 / link.byte_s,
                link.encoding,
                1 / link.kv_byte_s,
            )
            for (one, other), link in islice(costs.links.items(), MOST_LINKS)
        )
        return ModelLinks(model, tuple(lines), tuple(links))


def _show_cost(cost: WorkerCost) -> LearnedCost:
    fixed, each = cost.factor * cost.line.fixed, cost.factor * cost.line.each
    return LearnedCost(fixed, each, cost.num_seen, cost.error)


def _reason(worker: Worker) -> str | None:
    match worker.state:
        case Pending(reason) | Down(_, reason) | Rejected(reason):
            return reason
        case Up() if worker.health.state not in {HealthState.HEALTHY, HealthState.RECOVERING}:
            return worker.health.reason
        case Draining(_, Preemption(reason)):
            return reason
        case Up() | Draining():
            return None
        case _ as never:
            assert_never(never)


def _show_events(
    source: Source, feed: Following, prefixes: WorkerPrefixes | None
) -> FollowedEvents:
    endpoint = KV_EVENTS_PREFIX if isinstance(source.at, URL) else source.at.endpoint
    match feed:
        case NotFollowed(reason=reason):
            return FollowedEvents(endpoint, problem=reason)
        case Followed(feed=counted, block_index=block_index):
            held = sorted(block_index.num_blocks.items())
            blocks = tuple(CachedBlocks(*key, num_blocks) for key, num_blocks in held)
            num_ignored = 0 if prefixes is None else prefixes.num_ignored
            return FollowedEvents(
                endpoint, blocks=blocks, num_ignored=num_ignored, feed=counted.health
            )
        case _ as never:
            assert_never(never)
