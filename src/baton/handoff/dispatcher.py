"""What an engine holds: each order goes to whoever carries out its mode.

engine ── HandoffPort ──► HandoffDispatcher ──► HandoffAgent   push, pull, reference: over links
                                           └──► StoreHandoff   pool: through the store
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from baton.errors import HandoffError
from baton.handoff.agent import HandoffAgent
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent, SendFailed
from baton.handoff.pool_mode.store_handoff import StoreHandoff
from baton.telemetry.handoff_metrics import ReceivePaths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.ticket import HandoffMode, Ticket
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
        StreamPosition,
    )
    from baton.handoff.options import AgentOptions
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.read_prefixes import ReadsPrefixes
    from baton.ids import TicketId

NO_STORE: Final = "this worker has no store ([store] tiers)"

_LAST: Final = KVLanded | BlocksQuiescent | KVSent | SendFailed
"""Events after which nothing follows for a ticket."""


def open_handoffs(options: AgentOptions, access: StoreAccess | None) -> HandoffDispatcher:
    """All of a worker's handoffs; starts nothing. Without `access` mode pool fails at once.

    Raises:
        ConfigError: KV in such pages cannot be kept in the store.
    """
    return HandoffDispatcher(
        HandoffAgent(options), None if access is None else open_store_handoff(options, access)
    )


def open_store_handoff(options: AgentOptions, access: StoreAccess) -> StoreHandoff:
    """The handler of mode pool, of the worker that `options` describe.

    Raises:
        ConfigError: KV in such pages cannot be kept in the store.
    """
    return StoreHandoff(
        access, fingerprint=options.fingerprint, clock=options.clock, timeout_s=options.timeout_s
    )


class HandoffDispatcher:  # noqa: PLR0904 - the engine's contract
    """Implements `HandoffPort`. Owner: the engine's thread; `abort_from_peer` may be any's."""

    def __init__(self, agent: HandoffAgent, store: StoreHandoff | None) -> None:
        self.agent, self.store = agent, store
        self._through_store: set[TicketId] = set()
        self._events: deque[HandoffEvent] = deque()
        self._wake_engine: Callable[[], None] | None = None

    @property
    def modes(self) -> tuple[HandoffMode, ...]:
        """The ways of handing over that this worker takes part in, on either side."""
        push, pull, *reference = self.agent.options.modes
        return push, pull, *(() if self.store is None else ("pool",)), *reference

    @property
    def receive_paths(self) -> ReceivePaths:
        """By what ways KV comes to this worker."""
        options = self.agent.options
        return ReceivePaths(
            tuple(each.kind for each in options.transports),
            frozenset(each.kind for each in options.transports if each.capabilities.same_host_only),
            self.modes,
            options.preferred_op,
        )

    @property
    def prefixes(self) -> ReadsPrefixes | None:
        """See `HandoffPort`."""
        if self.store is None or not self.store.access.keeps_prefixes:
            return None
        return self.store.prefixes

    @property
    def address(self) -> str:
        """Where peers reach this worker: `host:port`, known after `start`."""
        return self.agent.address

    @property
    def is_alive(self) -> bool:
        """Whether the agent's thread runs."""
        return self.agent.is_alive

    def start(self, wake_engine: Callable[[], None]) -> None:
        """Start the threads; see `HandoffAgent.start`. Call once.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the region of a view.
        """
        self.open_store(wake_engine)
        self.agent.start(wake_engine)
        if self.store is not None:
            self.store.start()

    def open_store(self, wake_engine: Callable[[], None]) -> None:
        """`start` without any thread, for mode pool alone."""
        self._wake_engine = wake_engine
        if self.store is not None:
            self.store.open(self._emit)

    def stop(self) -> None:
        """End every handoff and the threads. Idempotent."""
        if self.store is not None:
            self.store.stop()
        self.agent.stop()

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        if ticket.mode != "pool":  # no worker holds anything: it is in the store
            self.agent.renew_lease(ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        ticket = order.ticket
        if ticket.mode != "pool":
            self.agent.start_receive(order)
        elif self.store is not None:
            self._through_store.add(ticket.id)
            self.store.start_receive(order)
        else:
            error = HandoffError(NO_STORE, stage="store", peer=ticket.prefill.worker)
            self._emit(KVFailed(ticket.id, error))
            self._emit(BlocksQuiescent(ticket.id))

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        ticket = order.ticket
        if ticket.mode != "pool":
            self.agent.start_send(order)
        elif self.store is not None:
            self._through_store.add(ticket.id)
            self.store.start_send(order)
        else:
            error = HandoffError(NO_STORE, stage="store", peer=ticket.decode.worker)
            self._emit(SendFailed(ticket.id, error))

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self.agent.report_progress(prompts)
        if self.store is not None:
            self.store.report_progress(prompts)

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """See `HandoffPort`."""
        if self.store is not None:
            pooled = [each for each in tickets if each[0] in self._through_store]
            self.store.layer_ready(pooled, layer, after)
            if pooled:
                tickets = [each for each in tickets if each[0] not in self._through_store]
        self.agent.layer_ready(tickets, layer, after)

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        self._handler_of(ticket).prefill_done(ticket, first_token)

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        if ticket.mode != "pool":  # there the prefill worker's work is of use to others, too
            self.agent.decline(ticket, reason)

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self._handler_of(ticket).abort(ticket, reason)

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway reports that this ticket's other half failed: recompute (or stop) now.

        Thread-safe. The order may not be here yet, so that its mode is not known.
        """
        if self.store is not None:
            self.store.abort_from_peer(ticket, reason)
        self.agent.abort_from_peer(ticket, reason)

    def abort_all(self, reason: str) -> None:
        """See `HandoffAgent.abort_all`; what goes into the store is named by its content."""
        self.agent.abort_all(reason)

    def cut_writes(self, ticket: TicketId) -> None:
        """See `HandoffAgent.cut_writes`; in mode pool `StoreHandoff.cut_writes`."""
        self._handler_of(ticket).cut_writes(ticket)

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self.agent.cancel_oldest_ungranted(tickets, reason)

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""
        self.agent.release_imported(ticket)

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""
        self.agent.revoke_exported()

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events = self.agent.poll()
        while self._events:
            event = self._events.popleft()
            if isinstance(event, _LAST):
                self._through_store.discard(event.ticket)
            events.append(event)
        return events

    def _handler_of(self, ticket: TicketId) -> HandoffAgent | StoreHandoff:
        if self.store is not None and ticket in self._through_store:
            return self.store
        return self.agent

    def _emit(self, event: HandoffEvent) -> None:
        self._events.append(event)
        if self._wake_engine is not None:
            self._wake_engine()
