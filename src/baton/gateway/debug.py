"""`/debug/workers`, `/debug/links`: the workers as the gateway sees them; what handoffs cost."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
from yarl import URL

from baton.events.blocks import DEFAULT_MEDIUM, FeedHealth
from baton.gateway.kv_events import Followed, Following, KVEvents, NotFollowed, Source
from baton.gateway.members.member_set import CONFIGURED
from baton.gateway.workers import Down, Draining, Pending, Preemption, Rejected, Up, Worker, Workers
from baton.protocol.worker_http import KV_EVENTS_PREFIX, Role, WorkerLoad
from baton.router.handoff_costs import CostSource
from baton.router.health import HealthState
from baton.router.topology import Distance, complete

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.router.learning import WorkerCost
    from baton.router.load import FleetLoad
    from baton.router.worker_prefixes import WorkerPrefixes


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


class LearnedCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds `fixed + each * size`, from so many observations; how wrong predictions were.

    Of a prompt's tokens `fixed + each * size * (1 + bend * (before + size / 2))`, behind others.
    """

    fixed_s: float
    each_s: float
    num_seen: int
    error: float
    bend: float = 0.0


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
    `topology` is where it is, `zone/rack/host/device`; what it does not report itself is of
    `discovered_topology`, as its source knows it. `store_events`: of a vLLM server's store,
    which Baton reports; its own engine's `kv_events` are of both. `sources` list it:
    "configuration" or texts of `gateway.members`, none once it has left; `why_withdrawn` is why it
    gets nothing new. `adapters`: LoRA adapters that clients may name as their model.
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
    discovered_topology: str | None = None
    store_events: FollowedEvents | None = None
    sources: tuple[str, ...] = (CONFIGURED,)
    why_withdrawn: str | None = None
    adapters: tuple[str, ...] = ()


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
            topology=(_find_topology(worker) or None) if worker.info else None,
            discovered_topology=worker.address.topology or None,
            sources=worker.sources,
            why_withdrawn=worker.why_withdrawn,
            adapters=tuple(sorted(worker.adapters)),
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
        bend = self._load.costs(info.served_model_name).prefill.bend
        return GivenWork(
            activity.num_prefills,
            activity.num_decodes,
            activity.queue_s(now),
            activity.prefill_share(now),
            _show_cost(activity.prefill_cost, bend),
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


def _find_topology(worker: Worker) -> str:
    reported = worker.info.topology if worker.info else ""
    return complete(reported, worker.address.topology)


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


def _show_cost(cost: WorkerCost, bend: float = 0.0) -> LearnedCost:
    fixed, each = cost.factor * cost.line.fixed, cost.factor * cost.line.each
    return LearnedCost(fixed, each, cost.num_seen, cost.error, bend)


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
