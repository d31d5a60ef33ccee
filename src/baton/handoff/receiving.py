"""The decode worker's handoffs: carries out what `ReceiveSession` asks for."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, assert_never

from baton.authority.ticket import seal
from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.graves import Grave, Graves
from baton.handoff.messages import Declined, Failed, Finished, decode_notice
from baton.handoff.parcels import Inspector
from baton.handoff.session.actions import (
    CloseWindow,
    Emit,
    OpenWindow,
    ReceiveAction,
    Say,
)
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.kv.copies import PagedSequence
from baton.telemetry.trace import Stamp
from baton.transfer.interface import Window

if TYPE_CHECKING:
    from baton.authority.ticket import Ticket
    from baton.handoff.desk import Desk
    from baton.handoff.interface import ReceiveOrder
    from baton.handoff.peers import Peer
    from baton.ids import TicketId
    from baton.transfer.interface import Transport

logger = logging.getLogger(__name__)


class ReceivingDesk:
    """All handoffs into this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._sessions: dict[TicketId, ReceiveSession] = {}
        self._peers: dict[TicketId, Peer] = {}
        self._windows: dict[TicketId, list[Transport]] = {}
        self._unsettled: Counter[TicketId] = Counter()
        self._given_up = Graves()

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over."""
        return len(self._sessions)

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.expect`."""
        desk = self._desk
        session = ReceiveSession(
            order,
            sealed_ticket=seal(order.ticket, desk.key),
            num_layers=desk.layout.num_layers,
            deadline=Instant(min(order.deadline, desk.clock.now() + desk.timeout_s)),
        )
        self._sessions[session.ticket] = session
        grave = self._given_up.take(session.ticket)
        if grave is not None:
            self._perform(session, session.fail(grave.reason, stage=grave.stage))
            return
        peer = desk.peers.dial(order.ticket.prefill)
        if peer is None:
            self._perform(session, session.fail("cannot reach the prefill worker", stage="link"))
            return
        self._peers[session.ticket] = peer
        if peer.hello is not None:
            self._perform(session, session.link_up())

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort.decline`."""
        peer = self._desk.peers.dial(ticket.prefill)
        if peer is not None:
            self._desk.peers.say(peer, Declined(seal(ticket, self._desk.key), reason[:2000]))

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        session = self._sessions.get(ticket)
        if session is None:
            return False
        self._perform(session, session.abort(reason))
        return True

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The gateway knows that no KV will come: fail now, or as soon as it is expected."""
        session = self._sessions.get(ticket)
        if session is None:
            self._given_up.bury(ticket, Grave(reason, "prefill"))
        else:
            self._perform(session, session.fail(reason, stage="prefill"))

    def peer_up(self, peer: Peer) -> None:
        """Grant what waited for this link."""
        for session in self._of(peer):
            self._perform(session, session.link_up())

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        for session in self._of(peer):
            self._perform(session, session.fail(str(error), stage=str(session.phase)))

    def heard(self, peer: Peer, message: Finished | Failed) -> None:
        """The prefill worker says how one handoff ended on its side."""
        session = self._sessions.get(message.ticket)
        if session is None or self._peers.get(message.ticket) is not peer:
            return
        match message:
            case Finished():
                self._note_sender(session, peer, message)
                self._perform(session, session.finished(message))
            case Failed(_, reason):
                self._perform(session, session.fail(f"prefill worker: {reason}", stage="prefill"))
            case _:
                assert_never(message)

    def arrived(self, ticket: TicketId, raw_notice: bytes) -> None:
        """A write is in place: check it against what is expected and its digests, count it."""
        session = self._sessions.get(ticket)
        if session is None:
            return
        try:
            notice = decode_notice(raw_notice)
            if not session.expects(notice):
                return
        except ProtocolError as exc:
            self._perform(session, session.fail(str(exc), stage="landing"))
            return
        if not self._inspector(session).is_intact(notice):
            reason = (
                f"digest mismatch in layer {notice.layer}, tokens [{notice.start}, {notice.stop})"
            )
            self._perform(session, session.fail(reason, stage="verify"))
            return
        actions = session.landed(notice)
        self._stamp_progress(session)
        self._perform(session, actions)

    def window_quiescent(self, ticket: TicketId) -> None:
        """One transport says that nothing can land in a closed window."""
        session = self._sessions.get(ticket)
        if session is None:
            return
        self._unsettled[ticket] -= 1
        if self._unsettled[ticket] == 0:
            self._perform(session, session.window_quiescent())

    def tick(self) -> None:
        """Fail what is past its deadline."""
        now = self._desk.clock.now()
        for session in tuple(self._sessions.values()):
            self._perform(session, session.expire(now))

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for session in tuple(self._sessions.values()):
            self._perform(session, session.fail(reason, stage="stop"))

    def _perform(self, session: ReceiveSession, actions: list[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case OpenWindow():
                    if not self._try_open_window(session):
                        return
                case CloseWindow():
                    self._close_window(session)
                case Say(message):
                    self._desk.peers.say(self._peers[session.ticket], message)
                case Emit(event):
                    self._desk.emit(event)
                case _:
                    assert_never(action)
        if session.over:
            self._forget(session.ticket)

    def _try_open_window(self, session: ReceiveSession) -> bool:
        """Open the window on every transport; where one refuses, the handoff ends."""
        order = session.order
        opened = self._windows.setdefault(session.ticket, [])
        window = Window(
            id=session.ticket,
            region=self._desk.region.handle,
            writer=order.ticket.prefill.epoch,
            pages=order.blocks.blocks,
        )
        try:
            for transport in self._desk.transports:
                transport.open_window(window)
                opened.append(transport)
        except BatonError as exc:
            self._perform(session, session.fail(str(exc), stage="window"))
            return False
        order.trace.stamp(Stamp.GRANTED, self._desk.clock.now())  # the grant is said next
        return True

    def _close_window(self, session: ReceiveSession) -> None:
        opened = self._windows.pop(session.ticket, [])
        self._unsettled[session.ticket] = len(opened)
        for transport in opened:
            transport.close_window(session.ticket)
        if not opened:
            self._perform(session, session.window_quiescent())

    def _forget(self, ticket: TicketId) -> None:
        self._sessions.pop(ticket, None)
        self._peers.pop(ticket, None)
        self._windows.pop(ticket, None)
        self._unsettled.pop(ticket, None)

    def _of(self, peer: Peer) -> list[ReceiveSession]:
        return [
            session for ticket, session in self._sessions.items() if self._peers.get(ticket) is peer
        ]

    def _inspector(self, session: ReceiveSession) -> Inspector:
        peer = self._peers[session.ticket]
        if peer.hello is None:
            raise AssertionError("a window is only opened for a peer that introduced itself")
        target = PagedSequence(self._desk.layout, session.order.blocks)
        return Inspector(self._desk.region, target, peer.hello.layout)

    def _stamp_progress(self, session: ReceiveSession) -> None:
        trace, now = session.order.trace, self._desk.clock.now()
        if session.coverage.num_complete_layers:
            trace.stamp(Stamp.FIRST_LAYER_LANDED, now)
        if session.coverage.complete:
            trace.stamp(Stamp.LAST_LAYER_LANDED, now)

    def _note_sender(self, session: ReceiveSession, peer: Peer, message: Finished) -> None:
        if session.phase is not ReceivePhase.GRANTED:
            return
        order, layout = session.order, self._desk.layout
        trace = order.trace
        trace.transport = message.transport
        trace.expected_transport = message.expected_transport
        trace.peer_stamps = {stamp: peer.to_local(at) for stamp, at in message.stamps.items()}
        num_tokens = order.num_tokens - order.start
        trace.num_bytes = num_tokens * layout.bytes_per_token
        trace.num_pages = len(order.blocks.blocks) * layout.num_layers
