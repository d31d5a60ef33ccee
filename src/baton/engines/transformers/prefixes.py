"""The engine's use of the store: prompts' beginnings are loaded from it, and kept in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.clock import Instant
from baton.engines.interface import PrefillRequest
from baton.engines.lookup_cost import LOAD_TIMEOUT_S, LookupCost
from baton.engines.transformers.scheduler import make_load_order
from baton.protocol.worker_http import StoreLoads

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.engines.transformers.pinned_blocks import KeptBlocks
    from baton.engines.transformers.scheduler import PendingLoad, Plan
    from baton.engines.transformers.sequence import Sequence
    from baton.handoff.interface import PrefixStore
    from baton.ids import TicketId


class EnginePrefixes:
    """Loads that are under way, and what computing takes instead. Owned by the engine's thread.

    ordered ──answered──► over
       └──late──► computed instead ──answered, or quiescent──► over
    """

    def __init__(self, store: PrefixStore | None, kept: KeptBlocks, clock: Clock) -> None:
        """`store` None: nothing is ever asked for, or kept."""
        self._store, self._kept, self._clock = store, kept, clock
        self._deadlines: dict[TicketId, Instant] = {}
        self._asked: dict[TicketId, PendingLoad] = {}
        self._late: set[TicketId] = set()
        self._cost = LookupCost(clock.now())
        self.loads = None if store is None else StoreLoads(0, 0, 0.0)
        """What the store has given; what came too late counts as no tokens."""

    def __contains__(self, order: TicketId) -> bool:
        """Whether the store has yet to answer a load of this name."""
        return order in self._deadlines or order in self._late

    @property
    def next_deadline(self) -> Instant | None:
        """When the next load is late; None if none is under way."""
        return min(self._deadlines.values(), default=None)

    def count_worth_asking(self) -> int | None:
        """See `Scheduler.min_load_tokens`. A store that does not answer is not asked again."""
        if self._store is None or self._late:
            return None
        return self._cost.count_worth_asking(self._clock.now(), self._store.block_size)

    def begin(self, load: PendingLoad) -> None:
        """Ask for a prompt's beginning."""
        if self._store is not None:
            self._deadlines[load.id] = Instant(self._clock.now() + LOAD_TIMEOUT_S)
            self._asked[load.id] = load
            self._store.start_load(make_load_order(load, self._cost.token_s))

    def finish(self, order: TicketId, num_tokens: int) -> None:
        """The store has answered: the first `num_tokens` of the prompt are in place."""
        deadline, load = self._deadlines.get(order), self._asked.get(order)
        if deadline is not None and load is not None:
            now, num_loaded = self._clock.now(), num_tokens - load.start
            waited_s = now - (deadline - LOAD_TIMEOUT_S)
            self._cost.observe_answer(
                now,
                num_found=num_loaded,
                num_missing=load.sequence.num_prompt_tokens - load.start,
                waited_s=waited_s,
            )
            if num_loaded:
                self._count_load(num_loaded, waited_s)
        self.end(order)

    def end(self, order: TicketId) -> None:
        """Nothing of this load is in use at the store."""
        self._deadlines.pop(order, None)
        self._asked.pop(order, None)
        self._late.discard(order)

    def take_late(self) -> list[TicketId]:
        """Loads that are late since the last call: no request waits for them any more."""
        now = self._clock.now()
        late = [order for order, deadline in self._deadlines.items() if deadline <= now]
        for order in late:
            self._abort(order)
            self._count_load(0, LOAD_TIMEOUT_S)
        return late

    def leave(self, sequence: Sequence) -> None:
        """A request ends: it waits for nothing, and what it computed is of use to others.

        What a prefill request of mode pool computes is kept by its handoff.
        """
        if self._store is None:
            return
        if sequence.load_id in self._deadlines:
            self._abort(sequence.load_id)
        ticket = sequence.ticket
        if isinstance(sequence.kind, PrefillRequest) and ticket and ticket.mode == "pool":
            return
        order = self._kept.hold(sequence, self._store.block_size)
        if order is not None:
            self._store.start_keep(order)
        elif refused := self._kept.take_refused_tokens():
            self._store.drop(refused)

    def observe_step(self, plan: Plan, seconds: float) -> None:
        """What a token of a prompt takes: learned from steps that are mostly prompts."""
        if self._store is None:
            return
        if 2 * sum(work.num_tokens for work in plan.work if work.is_prefill) > plan.num_tokens:
            self._cost.observe_step(plan.num_tokens, seconds)

    def _count_load(self, num_tokens: int, seconds: float) -> None:
        if self.loads is not None:
            before = self.loads
            self.loads = StoreLoads(
                before.num_loads + 1, before.num_tokens + num_tokens, before.seconds + seconds
            )

    def _abort(self, order: TicketId) -> None:
        if self._store is not None:
            del self._deadlines[order]
            self._late.add(order)
            self._store.abort_load(order)
