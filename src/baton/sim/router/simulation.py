"""Clients, gateways and their workers, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import BatonError
from baton.events.blocks import BlockEvent, TiersListed
from baton.ids import StoreId, WorkerId
from baton.kv.prefix_names import PrefixNames
from baton.protocol.worker_http import WorkerLoad
from baton.router.fleet import Fleet, WorkerView
from baton.router.placement import PlacementPolicy, Unplaceable
from baton.sim.router.gateway import NO_SALT, SimulatedGateway
from baton.sim.router.outcomes import RequestOutcome
from baton.sim.router.sessions import Session, TokenRun, TokenWriter
from baton.sim.router.store import SimulatedStore, StoreReporter
from baton.sim.router.worker import Job, Processors, SimulatedWorker, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.router.load import FleetLoad
    from baton.sim.router.costs import SimulatedCosts

EVICTION_SEEN_S: Final = 1.0
"""Until a worker finds that what it has reported is not in the store any more, on the average."""
RAMP_S: Final = 0.01
"""Between the first requests of two clients."""
NO_STORE: Final = StoreId("")


class NoRoomError(BatonError):
    """A request needs more than a simulated worker holds, or no worker takes it."""


@dataclass(frozen=True, slots=True)
class _Client:
    """Who asks: by way of which gateway, and what it asks when a session is over; None: no more."""

    gateway: SimulatedGateway
    sessions: Iterator[Session] | None = None


class Simulation:
    """One run: deterministic, the same seed gives the same outcomes. Owner: one thread.

    Each of `policies` is that of one gateway; clients, or the sessions of a replay, use them in
    turns. `fleet` is what placement sees, and may be replaced between two calls of `run`; workers
    that are not in it any more finish what they have. `first_shares`: each gateway's, none: 0
    (`Fleet.beginning_at`). `itl_s`: the target of all requests for the gaps between tokens.
    """

    def __init__(
        self,
        policies: Sequence[PlacementPolicy],
        views: Sequence[WorkerView],
        costs: SimulatedCosts,
        seed: int = 0,
        *,
        first_shares: Sequence[float] = (),
        itl_s: float | None = None,
    ) -> None:
        self._costs, self._seed = costs, seed
        self._model = views[0].model
        self._stores: dict[StoreId, SimulatedStore] = {}
        self._room = WorkerLoad(0, costs.num_blocks, costs.num_blocks, costs.block_size)
        views = [self._report(view) for view in views]
        if costs.workers_per_device is not None:
            views = _place_on_devices(views, costs.workers_per_device)
        self.fleet = Fleet.of(views)
        self.outcomes: list[RequestOutcome] = []
        self._timeline, self._tokens = Timeline(), TokenWriter(seed)
        self._naming = seed.to_bytes(16, "little", signed=True)
        self._names = PrefixNames(self._naming)
        self._root = self._names.root(NO_SALT)
        shares = first_shares or [0.0] * len(policies)
        self.gateways = [
            SimulatedGateway(policy, self._names, share, itl_s)
            for policy, share in zip(policies, shares, strict=True)
        ]
        self._in_turns = cycle(self.gateways)
        self._processors = {"": Processors(costs.num_processors, costs.jitter, seed)}
        self._store_of = self._assign_stores(views) if costs.store_tokens else {}
        self._reporters = {
            worker: StoreReporter(store, self._stores[store], self._naming, costs.block_size)
            for worker, store in self._store_of.items()
        }
        self._workers = {view.id: self._start(view) for view in views}

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._timeline.now

    @property
    def load(self) -> FleetLoad:
        """As the first gateway keeps it."""
        return self.gateways[0].load

    def add_worker(self, view: WorkerView) -> None:
        """Another worker, with a cache that is empty, and without a store; the fleet has it now."""
        view = self._report(view)
        self._workers[view.id] = self._start(view)
        served = self.fleet.models[self._model]
        self.fleet = Fleet.of((*served.prefills, *served.decodes, view))

    def add_clients(self, sessions: Iterator[Session], num_clients: int) -> None:
        """Closed loops: each client asks for one session after another, until there are no more."""
        for number in range(num_clients):
            client = _Client(next(self._in_turns), sessions)
            self._timeline.after(RAMP_S * number, partial(self._next, client))

    def replay(self, sessions: Iterator[Session]) -> None:
        """Each session begins at its `arrival_s`, in seconds from now; they come in this order."""
        self._arrive(sessions, self._timeline.now)

    def run(self, until_s: float = inf) -> None:
        """Until this time, or until all is done.

        Raises:
            NoRoomError: a request cannot be served, ever.
        """
        self._timeline.run(until_s)
        if until_s < inf:
            self._timeline.now = until_s

    def check_invariants(self) -> None:
        """Raise AssertionError where blocks are counted wrongly."""
        for worker in self._workers.values():
            worker.cache.check_invariants()
        for gateway in self.gateways:
            gateway.check_invariants()

    def _report(self, view: WorkerView) -> WorkerView:
        return replace(view, load=self._room, max_step_tokens=self._costs.chunk_tokens)

    def _assign_stores(self, views: Sequence[WorkerView]) -> dict[WorkerId, StoreId]:
        costs, found = self._costs, {}
        for at, view in enumerate(views):
            store = StoreId(f"{at // (costs.workers_per_store or len(views)):032x}")
            if store not in self._stores:
                self._stores[store] = SimulatedStore(costs.store_tokens // costs.block_size)
            found[view.id] = store
        return found

    def _start(self, view: WorkerView) -> SimulatedWorker:
        for gateway in self.gateways:
            gateway.follow(view.id)
        is_followed = any(gateway.prefixes is not None for gateway in self.gateways)
        if view.id in self._store_of:
            self._apply(view.id, TiersListed((self._store_of[view.id],)))
        return SimulatedWorker(
            self._costs,
            self._timeline,
            self._processors_of(view),
            computed=self._hand_over,
            publish=partial(self._publish, view.id) if is_followed else None,
            store=self._stores.get(self._store_of.get(view.id, NO_STORE)),
        )

    def _publish(self, worker: WorkerId, event: BlockEvent) -> None:
        self._timeline.after(self._costs.event_delay_s, partial(self._apply, worker, event))

    def _apply(self, worker: WorkerId, event: BlockEvent) -> None:
        for gateway in self.gateways:
            gateway.apply(worker, event, self._timeline.now)

    def _processors_of(self, view: WorkerView) -> Processors:
        path = view.topology if self._costs.workers_per_device is not None else ""
        if path not in self._processors:
            seed = self._seed + len(self._processors)
            self._processors[path] = Processors(1, self._costs.jitter, seed)
        return self._processors[path]

    def _arrive(self, sessions: Iterator[Session], since: float) -> None:
        for session in islice(sessions, 1):
            delay_s = since + (session.arrival_s or 0.0) - self._timeline.now
            self._timeline.after(
                max(0.0, delay_s), partial(self._arrived, session, sessions, since)
            )

    def _arrived(self, session: Session, sessions: Iterator[Session], since: float) -> None:
        self._begin(session, 0, _Client(next(self._in_turns)))
        self._arrive(sessions, since)

    def _next(self, client: _Client) -> None:
        for session in islice(client.sessions or (), 1):
            self._begin(session, 0, client)

    def _begin(self, session: Session, at: int, client: _Client) -> None:
        """Place a turn, and give it to its workers."""
        turn, now = session.turns[at], self._timeline.now
        if self._costs.count_blocks(turn.num_tokens) > self._costs.num_blocks:
            raise NoRoomError(
                f"a request of {turn.num_tokens} tokens does not fit in a simulated worker, which "
                f"holds {self._costs.kv_tokens}: set kv_tokens in --costs"
            )
        token_ids, size = self._tokens.write(turn.prompt), self._costs.block_size
        placed = client.gateway.place(self.fleet, self._model, token_ids, now)
        if isinstance(placed, Unplaceable):
            raise NoRoomError(placed.reason)
        names = placed.names.get(size) or self._names.of(token_ids, size, self._root)
        finish = partial(self._finish, session, at, client)
        job = Job(turn, token_ids, names, placed.placement, placed.running, now, finish)
        if placed.placement.num_prefix_tokens:
            self._load_prefix(job)
        else:
            self._workers[placed.placement.computing.id].compute(job)

    def _load_prefix(self, job: Job) -> None:
        """Its beginning is loaded from the worker that has it, as far as that still does."""
        placement, costs = job.placement, self._costs
        if placement.prefill is None:
            raise AssertionError("a prefix is loaded, and no worker has it")
        num_blocks = placement.num_prefix_tokens // costs.block_size
        names, decode = job.names[:num_blocks], self._workers[placement.decode.id]
        num_found = self._workers[placement.prefill.id].cache.count_cached(names)
        num_handed = num_found - decode.cache.count_cached(names)
        takes_s = costs.handoff_s
        if num_found == num_blocks:  # else it computes the prompt, or waits as long
            job.num_loaded = num_blocks * costs.block_size
            takes_s += costs.handoff_token_s * max(0, num_handed) * costs.block_size
        self._timeline.after(takes_s, partial(decode.compute, job))

    def _hand_over(self, job: Job) -> None:
        """Its prompt is computed: the answer begins here, or where it is handed over to."""
        placement, costs = job.placement, self._costs
        decode = self._workers[placement.decode.id]
        if placement.computing is placement.decode:
            decode.answer(job)
            return
        num_cached = decode.cache.count_cached(job.names[: decode.count_findable(job)])
        num_handed = job.turn.num_prompt_tokens - num_cached * costs.block_size
        takes_s = costs.handoff_s + costs.handoff_token_s * num_handed
        self._timeline.after(takes_s, partial(self._handed_over, job))

    def _handed_over(self, job: Job) -> None:
        placement = job.placement
        if placement.prefill is not None:
            self._workers[placement.prefill.id].release(job)
        self._workers[placement.decode.id].receive(job)

    def _finish(self, session: Session, at: int, client: _Client, job: Job) -> None:
        """An answer is complete: its blocks are found by what follows, and its client goes on."""
        turn, now, placement = job.turn, self._timeline.now, job.placement
        names = job.names
        if turn.answer_key is not None:
            names = self._keep_answer(job, turn.answer_key)
        self._keep_in_store(placement.decode.id, names)
        num_steps = turn.num_answer_tokens - 1
        prefill = placement.prefill
        self.outcomes.append(
            RequestOutcome(
                began_at=job.began_at,
                ended_at=now,
                ttft_s=job.first_at - job.began_at,
                tpot_s=(now - job.first_at) / num_steps if num_steps > 0 else 0.0,
                itl_s=job.itl_s,
                num_tokens=turn.num_prompt_tokens,
                num_predicted=turn.num_prompt_tokens - job.running.num_tokens,
                num_saved=job.num_saved,
                num_loaded=job.num_loaded,
                prefill=None if prefill is None else prefill.id,
                decode=placement.decode.id,
            )
        )
        if at + 1 < len(session.turns):
            self._timeline.after(session.pause_s, partial(self._begin, session, at + 1, client))
        else:
            self._timeline.after(0.0, partial(self._next, client))

    def _keep_answer(self, job: Job, key: str) -> list[int]:
        """Names of the blocks of prompt and answer, which its worker has now."""
        answer = self._tokens.write([TokenRun(key, job.turn.num_answer_tokens)])
        token_ids = np.concatenate([job.token_ids, answer[:-1]])  # the last one was never read
        size, first = self._costs.block_size, len(job.names)
        after = job.names[-1] if job.names else self._root
        names = job.names + self._names.of(token_ids[first * size :], size, after)
        self._workers[job.placement.decode.id].store(job, names, token_ids, first)
        return names

    def _keep_in_store(self, worker: WorkerId, names: list[int]) -> None:
        """Its worker leaves what it has computed in its store, and reports that."""
        store = self._store_of.get(worker)
        if store is None or not names:
            return
        gone = self._stores[store].keep(names)
        self._reporters[worker].add(names)
        self._publish_stored(worker)
        if gone:
            self._timeline.after(EVICTION_SEEN_S, partial(self._look_for, store, gone))

    def _look_for(self, store: StoreId, names: list[int]) -> None:
        """All workers of a store have looked whether these are still there."""
        for worker, own in self._store_of.items():
            if own == store:
                self._reporters[worker].look_for(names)
                self._publish_stored(worker)

    def _publish_stored(self, worker: WorkerId) -> None:
        for event in self._reporters[worker].take_events():
            self._publish(worker, event)


def _place_on_devices(views: Sequence[WorkerView], num_each: int) -> list[WorkerView]:
    """The first so many on one device, the next ones on another."""
    return [
        replace(view, topology=f"//simulated/device-{at // num_each}")
        for at, view in enumerate(views)
    ]
