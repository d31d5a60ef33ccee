"""An agent that keeps its contract and lets a test say when, and how well, each handoff ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import HandoffError
from baton.handoff.interface import (
    BlocksQuiescent,
    HandoffEvent,
    KVFailed,
    KVLanded,
    KVSent,
    ReceiveOrder,
    SendFailed,
    SendOrder,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import SampledToken
    from baton.handoff.read_prefixes import ReadsPrefixes
    from baton.ids import TicketId
    from baton.testing.clocks import ManualClock


@dataclass
class Sending:
    order: SendOrder
    ready: dict[int, int]
    is_finished: bool = False
    is_aborted: bool = False


@dataclass
class Receiving:
    order: ReceiveOrder
    is_failed: bool = False
    is_aborted: bool = False


class ScriptedPort:
    """Live handoffs by ticket; those that were aborted end when `settle_aborted` is called.

    `failed` and `offered` are the gateway's ids of all requests of which that is true.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.wake_event = threading.Event()
        self.sends: dict[TicketId, Sending] = {}
        self.receives: dict[TicketId, Receiving] = {}
        self.declined: list[Ticket] = []
        self.given_up: list[TicketId] = []
        self.failed: set[str] = set()
        self.offered: set[str] = set()
        self.is_alive = True
        self.prefixes: ReadsPrefixes | None = None
        self.kept: list[Ticket] = []
        self.cut: list[TicketId] = []
        self.writes_can_be_cut = True
        self.uncomputed: list[tuple[TicketId, ...]] = []
        self.positions: dict[int, object] = {}
        self._events: list[HandoffEvent] = []

    def renew_lease(self, ticket: Ticket) -> None:
        self.kept.append(ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        assert order.ticket.id not in self.receives
        if self.is_alive:
            self.receives[order.ticket.id] = Receiving(order)

    def start_send(self, order: SendOrder) -> None:
        assert order.ticket.id not in self.sends
        self.offered.add(order.ticket.request_id)
        ready = dict.fromkeys(range(self.num_layers), order.num_ready_tokens)
        if self.is_alive:
            self.sends[order.ticket.id] = Sending(order, ready)

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        self.uncomputed.append(tuple(ticket.id for ticket in prompts))

    def layer_ready(
        self, tickets: Sequence[tuple[TicketId, int]], layer: int, after: object = None
    ) -> None:
        self.positions[layer] = after
        for ticket, stop in tickets:
            send = self.sends.get(ticket)
            if send is not None:
                assert stop <= send.order.num_tokens
                send.ready[layer] = max(send.ready[layer], stop)

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        assert first_token is None
        send = self.sends.get(ticket)
        if send is not None:
            assert min(send.ready.values()) == send.order.num_tokens
            send.is_finished = True

    def decline(self, ticket: Ticket, reason: str) -> None:
        assert reason
        self.declined.append(ticket)

    def abort(self, ticket: TicketId, reason: str) -> None:
        assert reason
        if ticket in self.sends:
            self.sends[ticket].is_aborted = True
        elif ticket in self.receives:
            self.receives[ticket].is_aborted = True

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        self.given_up.append(ticket)
        if ticket in self.sends:
            self.abort(ticket, reason)
        elif ticket in self.receives:
            self.fail(ticket)

    def cut_writes(self, ticket: TicketId) -> None:
        assert self.sends[ticket].is_aborted
        self.cut.append(ticket)
        if self.writes_can_be_cut:
            self.fail_send(ticket, "abort")

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """None is granted in this port: the first of them it is."""
        assert reason
        for ticket in tickets:
            if ticket in self.sends:
                self.fail_send(ticket, "offered")
                return

    def poll(self) -> list[HandoffEvent]:
        events, self._events = self._events, []
        return events

    def land(self, ticket: TicketId, num_tokens: int | None = None) -> None:
        del self.receives[ticket]
        self._emit(KVLanded(ticket, None, num_tokens))

    def fail(self, ticket: TicketId, stage: str = "transfer") -> None:
        receive = self.receives[ticket]
        if not receive.is_failed:
            receive.is_failed = True
            self.failed.add(receive.order.ticket.request_id)
            self._emit(KVFailed(ticket, HandoffError("scripted", stage=stage)))

    def quiesce(self, ticket: TicketId) -> None:
        receive = self.receives.pop(ticket)
        assert receive.is_failed or receive.is_aborted
        self._emit(BlocksQuiescent(ticket))

    def sent(self, ticket: TicketId) -> None:
        assert self.sends[ticket].is_finished
        del self.sends[ticket]
        self._emit(KVSent(ticket))

    def fail_send(self, ticket: TicketId, stage: str = "transfer") -> None:
        del self.sends[ticket]
        self._emit(SendFailed(ticket, HandoffError("scripted", stage=stage)))

    def settle_aborted(self) -> None:
        for ticket, send in tuple(self.sends.items()):
            if send.is_aborted:
                self.fail_send(ticket, "abort")
        for ticket, receive in tuple(self.receives.items()):
            if receive.is_aborted:
                self.quiesce(ticket)

    def _emit(self, event: HandoffEvent) -> None:
        self._events.append(event)
        self.wake_event.set()


class SettlingEvent(threading.Event):
    """Whoever waits for it lets time pass, in which aborted handoffs end."""

    def __init__(self, port: ScriptedPort, clock: ManualClock) -> None:
        super().__init__()
        self._port, self._clock = port, clock
        self.num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.num_waits += 1
        if self.is_set():
            return True
        self._clock.advance(timeout)
        self._port.settle_aborted()
        return True
