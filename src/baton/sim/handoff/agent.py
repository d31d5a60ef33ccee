"""The production agent and dispatcher, watched: messages, engine events and engine calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.agent import HandoffAgent
from baton.handoff.agent_loop import AgentLoop
from baton.handoff.dispatcher import HandoffDispatcher
from baton.handoff.messages import (
    Declined,
    Grant,
    Keepalive,
    LeaseRenewed,
    Release,
    ReleaseAck,
    RenewLease,
    Revoke,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import (
        EngineSteps,
        HandoffEvent,
        KeepOrder,
        LoadOrder,
        LookupOrder,
        PrefixStore,
        ReceiveOrder,
        SampledToken,
        SendOrder,
        StreamPosition,
    )
    from baton.handoff.options import AgentOptions
    from baton.handoff.peers import MessageReceived
    from baton.handoff.pool_mode.store_handoff import StoreHandoff
    from baton.ids import TicketId
    from baton.sim.handoff.checker import Checker
    from baton.sim.handoff.process import SimProcess


class _SimAgentLoop(AgentLoop):
    """An `AgentLoop` whose messages are watched. Set `process` before the first step."""

    process: SimProcess

    def _dispatch_message(self, event: MessageReceived) -> None:
        checker = self.process.checker
        before = checker.before_message(self.process, event)
        super()._dispatch_message(event)
        checker.after_message(self.process, event, before)


class SimAgent(HandoffAgent):
    """A `HandoffAgent` without a thread, whose process is watched."""

    def __init__(self, options: AgentOptions, process: SimProcess, checker: Checker) -> None:
        super().__init__(options)
        self._process, self._checker = process, checker

    def _make_loop(self) -> AgentLoop:
        loop = _SimAgentLoop(
            self.options, heartbeat=self._heartbeat, observer=self._observer, emit=self._emit
        )
        loop.process = self._process
        loop.reraises = True
        return loop

    def _emit(self, event: HandoffEvent) -> None:
        self._checker.on_event(self._process, event)
        super()._emit(event)


class SimDispatcher(HandoffDispatcher):
    """A `HandoffDispatcher` whose process is watched."""

    def __init__(
        self, agent: SimAgent, store: StoreHandoff | None, process: SimProcess, checker: Checker
    ) -> None:
        super().__init__(agent, store)
        self._process, self._checker = process, checker

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffDispatcher`."""
        super().abort_from_peer(ticket, reason)
        self.wake_store_handoff()

    def wake_store_handoff(self) -> None:
        """Something was asked of the store handoff."""
        if self.store is not None:
            self._process.store_handoff_driver.wake()

    def _emit(self, event: HandoffEvent) -> None:
        self._checker.on_event(self._process, event)
        super()._emit(event)


class CheckedPort:  # noqa: PLR0904 - two contracts
    """Between an engine and its dispatcher; implements `HandoffPort` and `PrefixStore`."""

    def __init__(self, handoffs: SimDispatcher, process: SimProcess, checker: Checker) -> None:
        self._handoffs, self._process, self._checker = handoffs, process, checker
        self._uncomputed: tuple[Ticket, ...] = ()

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        self._checker.on_start_receive(self._process, order)
        self._handoffs.start_receive(order)
        self._handoffs.wake_store_handoff()

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        self._checker.on_start_send(self._process, order)
        self._handoffs.start_send(order)
        self._handoffs.wake_store_handoff()

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self._uncomputed = tuple(prompts)
        self._checker.deadlines.engine_alive(self._process, self._uncomputed)
        self._handoffs.report_progress(prompts)

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """See `HandoffPort`."""
        self._checker.deadlines.engine_alive(self._process, self._uncomputed)
        self._handoffs.layer_ready(tickets, layer, after)
        self._handoffs.wake_store_handoff()

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        self._checker.leases.start(self._process, ticket)
        self._handoffs.prefill_done(ticket, first_token)
        self._handoffs.wake_store_handoff()

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        self._handoffs.decline(ticket, reason)

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self._checker.on_abort(self._process, ticket)
        self._handoffs.abort(ticket, reason)
        self._handoffs.wake_store_handoff()

    @property
    def prefixes(self) -> PrefixStore | None:
        """See `HandoffPort`."""
        return None if self._handoffs.prefixes is None else self

    @property
    def block_size(self) -> int:
        """See `PrefixStore`."""
        return self._stored.block_size

    @property
    def steps(self) -> EngineSteps:
        """See `PrefixStore`."""
        return self._stored.steps

    def start_lookup(self, order: LookupOrder) -> None:
        """See `PrefixStore`."""
        self._stored.start_lookup(order)
        self._handoffs.wake_store_handoff()

    def start_load(self, order: LoadOrder) -> None:
        """See `PrefixStore`."""
        self._checker.on_start_load(self._process, order)
        self._stored.start_load(order)
        self._handoffs.wake_store_handoff()

    def start_keep(self, order: KeepOrder) -> None:
        """See `PrefixStore`."""
        self._checker.on_start_keep(self._process, order)
        self._stored.start_keep(order)
        self._handoffs.wake_store_handoff()

    def drop(self, num_tokens: int) -> None:
        """See `PrefixStore`."""
        self._stored.drop(num_tokens)
        self._handoffs.wake_store_handoff()

    def abort_load(self, order: TicketId) -> None:
        """See `PrefixStore`."""
        self._checker.on_abort(self._process, order)
        self._stored.abort_load(order)
        self._handoffs.wake_store_handoff()

    @property
    def _stored(self) -> PrefixStore:
        prefixes = self._handoffs.prefixes
        if prefixes is None:
            raise AssertionError("this worker has no store")
        return prefixes

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        self._handoffs.renew_lease(ticket)

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""
        self._handoffs.release_imported(ticket)

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""
        self._handoffs.revoke_exported()

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self._handoffs.cancel_oldest_ungranted(tickets, reason)

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events = self._handoffs.poll()
        for event in events:
            self._checker.on_engine_event(self._process, event)
        return events


def tickets_of(event: MessageReceived, sealed: dict[str, TicketId]) -> tuple[TicketId, ...]:
    """Which tickets a message is about; `sealed` ones are known by their text too."""
    message = event.message
    match message:
        case Grant():
            return (message.id,)
        case Declined(text):
            return (sealed[text],) if text in sealed else ()
        case RenewLease() | LeaseRenewed() | Release() | Revoke() | ReleaseAck() | Keepalive():
            return message.tickets
        case _:
            ticket = getattr(message, "ticket", None)
            return () if ticket is None else (ticket,)
