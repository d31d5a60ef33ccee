"""The engine's use of the store: prompts' beginnings are loaded from it, and kept in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.clock import Clock, Instant
from baton.engines.interface import PrefillRequest
from baton.engines.lookup_cost import LOAD_TIMEOUT_S, LookupCost
from baton.engines.transformers.orders import make_load_order, make_lookup_order
from baton.engines.transformers.queued_prefixes import PendingLoad, PendingLookup, WorthAsking
from baton.handoff.interface import EngineSteps, LoadOrder, PrefixFound, PrefixStore
from baton.protocol.worker_http import StoreLoads

if TYPE_CHECKING:
    from baton.engines.transformers.pinned_blocks import KeptBlocks
    from baton.engines.transformers.scheduler import Plan
    from baton.engines.transformers.sequence import Sequence
    from baton.ids import TicketId
    from baton.telemetry.trace import RequestSpan


@dataclass(slots=True)
class _Lookup:
    """`held_at`: since when a request waits for this answer that could be computed."""

    trace: RequestSpan
    num_missing: int
    start: int
    deadline: Instant
    limit_s: float
    held_at: Instant | None = None
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class _Load:
    order: LoadOrder
    began_at: Instant

    @property
    def deadline(self) -> Instant:
        """When the store has not answered, nor put a batch in place, for too long."""
        return Instant(max(self.began_at, self.order.progress.last_at) + LOAD_TIMEOUT_S)


class EnginePrefixes:
    """Lookups and loads that are under way, and what computing takes instead.

    Owned by the engine's thread.

    looked for ──answered──► loaded ──answered──► over
       └──late──┐               └──late──┐
                └────────────────────────┴──► computed instead ──answered, or quiescent──► over
    """

    def __init__(
        self, store: PrefixStore | None, kept: KeptBlocks, clock: Clock, step_tokens: int
    ) -> None:
        """`store` None: nothing is ever asked for, or kept. A step computes `step_tokens`."""
        self._store, self._kept, self._clock = store, kept, clock
        self._step_tokens = step_tokens
        self.steps = EngineSteps() if store is None else store.steps
        """Counted by whoever computes them."""
        self._lookups: dict[TicketId, _Lookup] = {}
        self._loads: dict[TicketId, _Load] = {}
        self._late: set[TicketId] = set()
        self._aborted: set[TicketId] = set()
        """Those of them whose request has left in time."""
        self._cost = LookupCost(clock.now())
        self.loads = None if store is None else StoreLoads(0, 0, 0.0)
        """What the store has given; what came too late counts as no tokens."""

    def __contains__(self, order: TicketId) -> bool:
        """Whether the store has yet to answer a load of this name."""
        return order in self._loads or order in self._late

    @property
    def num_under_way(self) -> int:
        """Lookups and loads that the store has yet to answer."""
        return len(self._lookups) + len(self._loads) + len(self._late)

    @property
    def next_deadline(self) -> Instant | None:
        """When the next lookup or load is late, or waited for no longer; None if there is none."""
        limits = (
            Instant(each.held_at + each.limit_s)
            for each in self._lookups.values()
            if each.held_at is not None and each.is_held
        )
        lookups = (each.deadline for each in self._lookups.values())
        loads = (each.deadline for each in self._loads.values())
        return min((*limits, *lookups, *loads), default=None)

    def compute_worth_asking(self) -> WorthAsking | None:
        """None where there is no store, and where it has yet to answer what is late."""
        if self._store is None or self._late:
            return None
        size = self._store.block_size
        held = self._cost.count_answered_in_time(size)
        # Now and then one that will be computed meanwhile is asked for: it shows what that takes.
        is_trial = self._cost.is_forgotten(self._clock.now())
        return WorthAsking(held, size if is_trial else max(size, self._step_tokens + 1), size)

    def look_up(self, lookup: PendingLookup) -> None:
        """Ask for a prompt's beginning."""
        if self._store is None:
            return
        num_missing = lookup.sequence.num_prompt_tokens - lookup.start
        deadline = Instant(self._clock.now() + LOAD_TIMEOUT_S)
        limit_s = self._cost.compute_held_s(num_missing)
        self._lookups[lookup.id] = _Lookup(
            lookup.sequence.request.trace, num_missing, lookup.start, deadline, limit_s
        )
        self._store.start_lookup(make_lookup_order(lookup, self._cost.token_s))

    def hold(self, sequence: Sequence) -> None:
        """A request could be computed now, and waits for the store's answer only."""
        lookup = None if sequence.load_id is None else self._lookups.get(sequence.load_id)
        if lookup is not None and lookup.held_at is None:
            lookup.held_at = self._clock.now()

    def take_held_too_long(self) -> list[TicketId]:
        """Lookups for which requests waited as long as they may, since the last call."""
        now, found = self._clock.now(), []
        for order, lookup in self._lookups.items():
            if lookup.held_at is not None and lookup.is_held:
                lookup.is_held = now < lookup.held_at + lookup.limit_s
                if not lookup.is_held:
                    lookup.trace.held_s = now - lookup.held_at
                    found.append(order)
        return found

    def find(self, found: PrefixFound) -> int | None:
        """How many first tokens of a prompt the store has; None where they are nothing new."""
        lookup = self._lookups.pop(found.ticket, None)
        self._late.discard(found.ticket)
        self._aborted.discard(found.ticket)
        if lookup is None:
            return None
        num_found = found.num_tokens - lookup.start
        self._cost.observe_answer(
            self._clock.now(),
            num_found=num_found,
            num_missing=lookup.num_missing,
            waited_s=self._compute_wait_s(lookup, found.took_s),
        )
        return found.num_tokens if num_found else None

    def begin(self, load: PendingLoad) -> None:
        """Load what was found."""
        if self._store is not None:
            order = make_load_order(load, self._cost.token_s)
            self._loads[load.id] = _Load(order, self._clock.now())
            self._store.start_load(order)

    def finish(self, order: TicketId, num_tokens: int) -> None:
        """The store has answered: the first `num_tokens` of the prompt are in place."""
        load = self._loads.get(order)
        if load is not None and num_tokens > load.order.start:
            self._count_load(num_tokens - load.order.start, self._clock.now() - load.began_at)
        self.end(order)

    def end(self, order: TicketId) -> None:
        """Nothing of this load is in use at the store."""
        self._loads.pop(order, None)
        self._late.discard(order)
        self._aborted.discard(order)

    def take_late(self) -> list[TicketId]:
        """Lookups and loads that are late since the last call: no request waits for them."""
        now = self._clock.now()
        late = [order for order, each in self._lookups.items() if each.deadline <= now]
        for order in late:
            del self._lookups[order]
            self._late.add(order)
        late_loads = [order for order, each in self._loads.items() if each.deadline <= now]
        for order in late_loads:
            began_at = self._loads[order].began_at
            self._abort(order)
            self._count_load(0, now - began_at)
        return late + late_loads

    def leave(self, sequence: Sequence) -> None:
        """A request ends: it waits for nothing, and what it computed is of use to others.

        What a prefill request of mode pool computes is kept by its handoff.
        """
        if self._store is None:
            return
        if sequence.load_id in self._lookups:
            del self._lookups[sequence.load_id]
        elif sequence.load_id in self._loads:
            self._abort(sequence.load_id)
            self._aborted.add(sequence.load_id)
        ticket = sequence.ticket
        if isinstance(sequence.kind, PrefillRequest) and ticket and ticket.mode == "pool":
            return
        if self._late > self._aborted:  # orders would pile up at a store that does not answer
            self._store.drop(max(0, sequence.num_computed - sequence.num_cached_tokens))
            return
        order = self._kept.hold(sequence, self._store.block_size)
        if order is not None:
            self._store.start_keep(order)
        if refused := self._kept.take_refused_tokens():
            self._store.drop(refused)

    def observe_step(self, plan: Plan, seconds: float) -> None:
        """What a token of a prompt takes: learned from steps that are mostly prompts."""
        if self._store is None:
            return
        if 2 * sum(work.num_tokens for work in plan.work if work.is_prefill) > plan.num_tokens:
            self._cost.observe_step(plan.num_tokens, seconds)

    def _compute_wait_s(self, lookup: _Lookup, took_s: float) -> float:
        """What a request was held for an answer; for another, and a late one, what it took."""
        if lookup.held_at is None or not lookup.is_held:
            return took_s
        lookup.trace.held_s = self._clock.now() - lookup.held_at
        return lookup.trace.held_s

    def _count_load(self, num_tokens: int, seconds: float) -> None:
        if self.loads is not None:
            before = self.loads
            self.loads = StoreLoads(
                before.num_loads + 1, before.num_tokens + num_tokens, before.seconds + seconds
            )

    def _abort(self, order: TicketId) -> None:
        if self._store is not None:
            del self._loads[order]
            self._late.add(order)
            self._store.abort_load(order)
