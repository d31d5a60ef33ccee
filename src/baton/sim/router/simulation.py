"""Clients, a policy and its workers, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import BatonError
from baton.events.blocks import TiersListed
from baton.ids import StoreId
from baton.kv.prefix_names import PrefixNames
from baton.protocol.worker_http import WorkerLoad
from baton.router.fleet import Fleet
from baton.router.load import FleetLoad
from baton.router.placement import PlacementRequest, Unplaceable
from baton.router.prefixes import ModelPrefixes, PromptMatch
from baton.sim.router.outcomes import RequestOutcome
from baton.sim.router.sessions import TokenRun, TokenWriter
from baton.sim.router.store import SimulatedStore, StoreReporter
from baton.sim.router.worker import Job, Processors, SimulatedWorker, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.events.blocks import BlockEvent
    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView
    from baton.router.placement import PlacementPolicy
    from baton.router.prefixes import WorkerPrefixes
    from baton.sim.router.costs import SimulatedCosts
    from baton.sim.router.sessions import Session

EVICTION_SEEN_S: Final = 1.0
"""Until a worker finds that what it has reported is not in the store any more, on the average."""
RAMP_S: Final = 0.01
"""Between the first requests of two clients."""
NO_SALT: Final = ""
NO_STORE: Final = StoreId("")


class NoRoomError(BatonError):
    """A request needs more than a simulated worker holds, or no worker takes it."""


class Simulation:
    """One run: deterministic, the same seed gives the same outcomes. Owner: one thread.

    `fleet` is what placement sees, and may be replaced between two calls of `run`; workers that are
    not in it any more finish what they have. `load` is kept as a gateway keeps it.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        views: Sequence[WorkerView],
        costs: SimulatedCosts,
        seed: int = 0,
    ) -> None:
        self._policy, self._costs, self._seed = policy, costs, seed
        self._model = views[0].model
        self._stores: dict[StoreId, SimulatedStore] = {}
        self._room = WorkerLoad(0, costs.num_blocks, costs.num_blocks, costs.block_size)
        views = [replace(view, load=self._room) for view in views]
        if costs.workers_per_device is not None:
            views = _place_on_devices(views, costs.workers_per_device)
        self.fleet, self.load = Fleet.of(views), FleetLoad()
        self.outcomes: list[RequestOutcome] = []
        self._timeline, self._tokens = Timeline(), TokenWriter(seed)
        self._naming = seed.to_bytes(16, "little", signed=True)
        self._names = PrefixNames(self._naming)
        self._root = self._names.root(NO_SALT)
        self._prefixes = ModelPrefixes(self._names) if policy.uses_prefixes else None
        self._processors = {"": Processors(costs.num_processors, costs.jitter, seed)}
        self._followed: dict[WorkerId, WorkerPrefixes] = {}
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

    def add_worker(self, view: WorkerView) -> None:
        """Another worker, with a cache that is empty, and without a store; the fleet has it now."""
        view = replace(view, load=self._room)
        self._workers[view.id] = self._start(view)
        served = self.fleet.models[self._model]
        self.fleet = Fleet.of((*served.prefills, *served.decodes, view))

    def add_clients(self, sessions: Iterator[Session], num_clients: int) -> None:
        """Closed loops: each client asks for one session after another, until there are no more."""
        for client in range(num_clients):
            self._timeline.after(RAMP_S * client, partial(self._next, sessions))

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
        if self._prefixes is not None:
            self._prefixes.check_invariants()

    def _assign_stores(self, views: Sequence[WorkerView]) -> dict[WorkerId, StoreId]:
        costs, found = self._costs, {}
        for at, view in enumerate(views):
            store = StoreId(f"{at // (costs.workers_per_store or len(views)):032x}")
            if store not in self._stores:
                self._stores[store] = SimulatedStore(costs.store_tokens // costs.block_size)
            found[view.id] = store
        return found

    def _start(self, view: WorkerView) -> SimulatedWorker:
        publish = None
        if self._prefixes is not None:
            followed = self._followed[view.id] = self._prefixes.follow(view.id)
            if view.id in self._store_of:
                followed.apply(TiersListed((self._store_of[view.id],)))

            def publish(event: BlockEvent) -> None:
                self._timeline.after(self._costs.event_delay_s, partial(followed.apply, event))

        return SimulatedWorker(
            self._costs,
            self._timeline,
            self._processors_of(view),
            computed=self._hand_over,
            publish=publish,
            store=self._stores.get(self._store_of.get(view.id, NO_STORE)),
        )

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
        self._begin(session, 0, None)
        self._arrive(sessions, since)

    def _next(self, sessions: Iterator[Session]) -> None:
        for session in islice(sessions, 1):
            self._begin(session, 0, sessions)

    def _begin(self, session: Session, at: int, more: Iterator[Session] | None) -> None:
        """Place a turn, and give it to its workers. `more` is what its client asks afterwards."""
        turn, now = session.turns[at], self._timeline.now
        if self._costs.count_blocks(turn.num_tokens) > self._costs.num_blocks:
            raise NoRoomError(
                f"a request of {turn.num_tokens} tokens does not fit in a simulated worker, which "
                f"holds {self._costs.kv_tokens}: set kv_tokens in --costs"
            )
        token_ids = self._tokens.write(turn.prompt)
        num_tokens = len(token_ids)
        match = PromptMatch(num_tokens)
        if self._prefixes is not None:
            match = self._prefixes.find(token_ids, NO_SALT, now)
        request = PlacementRequest(
            self._model,
            num_prompt_tokens=num_tokens,
            at=now,
            cached=match.cached,
            stored=match.stored,
        )
        placement = self._policy.place(self.fleet, request, self.load)
        if isinstance(placement, Unplaceable):
            raise NoRoomError(placement.reason)
        computing = placement.computing
        if self._prefixes is not None:
            self._prefixes.expect(match, placement, now)
        num_cached = max(match.cached.get(computing.id, 0), placement.num_prefix_tokens)
        num_handed = placement.num_prefix_tokens or num_tokens
        running = self.load.begin(
            placement,
            num_tokens - num_cached - placement.num_stored_tokens,
            now,
            num_handed - match.cached.get(placement.decode.id, 0),
            num_cached=num_cached,
        )
        size = self._costs.block_size
        names = match.names.get(size) or self._names.of(token_ids, size, self._root)
        finish = partial(self._finish, session, at, more)
        job = Job(turn, token_ids, names, placement, running, now, finish)
        if placement.num_prefix_tokens:
            self._load_prefix(job)
        else:
            self._workers[computing.id].compute(job)

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

    def _finish(self, session: Session, at: int, more: Iterator[Session] | None, job: Job) -> None:
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
                num_tokens=turn.num_prompt_tokens,
                num_saved=job.num_saved,
                num_loaded=job.num_loaded,
                prefill=None if prefill is None else prefill.id,
                decode=placement.decode.id,
            )
        )
        if at + 1 < len(session.turns):
            self._timeline.after(session.pause_s, partial(self._begin, session, at + 1, more))
        elif more is not None:
            self._timeline.after(0.0, partial(self._next, more))

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
        followed = self._followed.get(worker)
        for event in self._reporters[worker].take_events():
            if followed is not None:
                self._timeline.after(self._costs.event_delay_s, partial(followed.apply, event))


def _place_on_devices(views: Sequence[WorkerView], num_each: int) -> list[WorkerView]:
    """The first so many on one device, the next ones on another."""
    return [
        replace(view, topology=f"//simulated/device-{at // num_each}")
        for at, view in enumerate(views)
    ]
