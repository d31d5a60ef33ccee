"""The decode worker's handoffs: carries out what `ReceiveSession` asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from baton.authority.ticket import seal
from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.carriage import REFERENCE
from baton.handoff.graves import Grave, Graves
from baton.handoff.incoming import Incoming
from baton.handoff.inspecting import is_as_read, is_as_written
from baton.handoff.messages import (
    Available,
    Declined,
    Failed,
    Finished,
    Grant,
    Lent,
    Renewed,
    Rerouted,
    Taken,
    Underway,
    Unlent,
    decode_notice,
)
from baton.handoff.reading import Reader
from baton.handoff.renewing import Renewals
from baton.handoff.routes import Reach
from baton.handoff.session.actions import (
    Borrow,
    CloseWindow,
    Emit,
    Fence,
    OpenWindow,
    Read,
    ReceiveAction,
    Say,
    SayTaken,
)
from baton.handoff.session.posted import Posted
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.terms import Terms
from baton.handoff.staging import STAGING_STAGE, Holder
from baton.telemetry.trace import Stamp
from baton.transfer.interface import Arrived, ReadCompleted, ReadFailed, WindowQuiescent

if TYPE_CHECKING:
    from baton.authority.ticket import Ticket
    from baton.handoff.borrowing import BorrowingDesk
    from baton.handoff.desk import Desk
    from baton.handoff.interface import ReceiveOrder
    from baton.handoff.messages import GrantMover, Notice
    from baton.handoff.peers import Peer
    from baton.handoff.reading import PendingRead
    from baton.handoff.routes import RouteFound, RouteLost
    from baton.handoff.session.actions import Sayable
    from baton.ids import TicketId
    from baton.transfer.interface import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a read was of no use."""

    stage: str
    reason: str


class ReceivingDesk:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """All handoffs into this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk, borrowing: BorrowingDesk) -> None:
        self._desk, self._borrowing = desk, borrowing
        self._reader = Reader(desk.routes)
        self._incoming: dict[TicketId, Incoming] = {}
        self._given_up = Graves()
        self._renewals = Renewals(desk)

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over."""
        return len(self._incoming)

    @property
    def is_moving(self) -> bool:
        """Whether a read is under way."""
        return self._reader.is_moving

    def keep(self, ticket: Ticket) -> None:
        """See `HandoffPort.keep`."""
        self._renewals.keep(ticket)

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.expect`."""
        desk = self._desk
        self._renewals.drop(order.ticket.id)
        session = ReceiveSession(
            order,
            sealed_ticket=seal(order.ticket, desk.key),
            num_layers=desk.num_layers,
            deadline=Instant(min(order.deadline, desk.clock.now() + desk.timeout_s)),
        )
        incoming = self._incoming[session.ticket] = Incoming(session)
        grave = self._given_up.take(session.ticket)
        if grave is not None:
            self._perform(incoming, session.fail(grave.reason, stage=grave.stage))
            return
        incoming.peer = desk.peers.dial(order.ticket.prefill)
        if incoming.peer is None:
            self._perform(incoming, session.fail("cannot reach the prefill worker", stage="link"))
        else:
            self._try_begin(incoming)

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort.decline`."""
        self._renewals.drop(ticket.id)
        peer = self._desk.peers.dial(ticket.prefill)
        if peer is not None:
            self._desk.peers.say(peer, Declined(seal(ticket, self._desk.key), reason[:2000]))

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            return False
        self._perform(incoming, incoming.session.abort(reason))
        return True

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The gateway knows that no KV will come: fail now, or as soon as it is expected."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            self._given_up.bury(ticket, Grave(reason, "prefill"))
        else:
            self._perform(incoming, incoming.session.fail(reason, stage="prefill"))

    def peer_up(self, peer: Peer) -> None:
        """Grant what waited for this link."""
        self._renewals.meet(peer)
        for incoming in self._of(peer):
            self._try_begin(incoming)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        for incoming in self._of(peer):
            session = incoming.session
            self._perform(incoming, session.fail(str(error), stage=str(session.phase)))

    def route_found(self, event: RouteFound) -> None:
        """A peer's pages can be read."""
        for incoming in self._of(event.peer):
            self._try_begin(incoming)

    def route_lost(self, event: RouteLost) -> None:
        """A route to a peer's pages is gone: what has not begun may be written by the peer."""
        for incoming in self._of(event.peer):
            if incoming.session.terms is None:
                self._try_begin(incoming)
            elif not self._desk.routes.can_read(event.peer):
                self._stop_reading(incoming, event.transport)

    def lender_changed(self, peer: Peer) -> None:
        """A peer's blocks can be borrowed from now on, or cannot."""
        for incoming in self._of(peer):
            self._try_begin(incoming)

    def staged(self, ticket: TicketId) -> None:
        """The turn of a handoff that waited for staging pages has come."""
        incoming = self._incoming.get(ticket)
        if incoming is not None:
            self._try_begin(incoming)

    def heard(
        self, peer: Peer, message: Available | Rerouted | Lent | Unlent | Finished | Failed
    ) -> None:
        """The prefill worker says something about one handoff."""
        incoming = self._incoming.get(message.ticket)
        if incoming is None or incoming.peer is not peer:
            return
        session = incoming.session
        match message:
            case Available():
                self._hear_available(incoming, message)
            case Rerouted():
                self._hear_rerouted(incoming, message)
            case Lent() | Unlent():
                self._hear_of_loan(incoming, message)
            case Finished():
                if session.phase is ReceivePhase.GRANTED:
                    incoming.note_sender(message)
                self._perform(incoming, session.finished(message))
            case Failed(_, reason):
                self._perform(incoming, session.fail(f"prefill worker: {reason}", stage="prefill"))
            case _:
                assert_never(message)

    def assured(self, peer: Peer, message: Renewed | Underway) -> None:
        """The prefill worker says what it holds, or what its engine has yet to compute."""
        now = self._desk.clock.now()
        for incoming in filter(None, map(self._incoming.get, message.tickets)):
            if incoming.peer is not peer:
                continue
            match message:
                case Renewed(at) if at <= now:  # else it answers what was never said to it
                    incoming.session.tenancy.confirmed(Instant(at))
                case Underway(idle_s):
                    incoming.session.wait_until(Instant(now - idle_s + self._desk.timeout_s))
                case Renewed():
                    pass
                case _:
                    assert_never(message)

    def lost(self, peer: Peer, message: Failed) -> None:
        """What a queued request waits for is gone: it will fail as soon as it is expected."""
        if self._renewals.is_queued_from(message.ticket, peer):
            self._renewals.drop(message.ticket)
            self._given_up.bury(message.ticket, Grave(f"prefill worker: {message.reason}", "lease"))

    def moved(
        self, transport: Transport, event: Arrived | ReadCompleted | ReadFailed | WindowQuiescent
    ) -> None:
        """A transport says something about pages of this worker."""
        match event:
            case Arrived(window, notice):
                self._arrived(transport, window, notice)
            case ReadCompleted(transfer):
                self._read_completed(Posted(transport.kind, transfer))
            case ReadFailed(transfer, error):
                self._read_failed(Posted(transport.kind, transfer), error)
            case WindowQuiescent(window):
                self._window_quiescent(transport, window)
            case _:
                assert_never(event)

    def tick(self) -> None:
        """Fail what is past its deadline; renew leases."""
        self._renewals.tick(each.session.order.ticket for each in self._incoming.values())
        now = self._desk.clock.now()
        for incoming in tuple(self._incoming.values()):
            self._perform(incoming, incoming.session.expire(now))

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for incoming in tuple(self._incoming.values()):
            self._perform(incoming, incoming.session.fail(reason, stage="stop"))

    def _arrived(self, transport: Transport, ticket: TicketId, raw_notice: bytes) -> None:
        """A peer's write is in place: check it against what is expected and its digests."""
        incoming = self._incoming.get(ticket)
        if incoming is None or not incoming.admits(transport):
            return
        session = incoming.session
        try:
            notices = decode_notice(raw_notice).split()
            if not all(session.expects(notice) for notice in notices):
                return
        except ProtocolError as exc:
            self._perform(incoming, session.fail(str(exc), stage="landing"))
            return
        for notice in notices:
            if session.phase is not ReceivePhase.GRANTED:
                return  # the pages are not this handoff's any more
            self._layer_arrived(transport, incoming, notice)

    def _layer_arrived(self, transport: Transport, incoming: Incoming, notice: Notice) -> None:
        """What is expected was written: see whether it is what its sender had."""
        session = incoming.session
        if is_as_written(self._desk.verification, incoming, notice, transport):
            incoming.note_arrival(transport, notice)
            self._take_in(incoming, notice)
        elif incoming.has_other(transport):
            self._perform(incoming, session.suspect(transport.kind, explain_digests(notice)))
        else:
            self._perform(incoming, session.fail(explain_digests(notice), stage="verify"))

    def _read_completed(self, posted: Posted) -> None:
        """What a peer said to be available is in this worker's pages: check its digests."""
        pending = self._reader.take(posted)
        if pending is None:
            return
        self._desk.routes.carried(pending.route)
        incoming = self._incoming.get(pending.available.ticket)
        if incoming is None:
            return
        session, notice = incoming.session, pending.notice
        if session.phase is not ReceivePhase.GRANTED:
            self._perform(incoming, session.read_ended(posted))
        elif lost := session.outlived(self._desk.clock.now()):
            self._perform(incoming, lost)
            self._perform(incoming, session.read_ended(posted))
        elif is_as_read(incoming, notice, posted.transport):
            self._blame_others(incoming, pending)
            self._perform(incoming, session.read_ended(posted))
            self._take_in(incoming, notice)
            if incoming.unreadable:
                self._stop_reading(incoming, posted.transport)
        else:
            self._read_again(incoming, posted, pending, Trouble("verify", explain_digests(notice)))

    def _read_failed(self, posted: Posted, error: BatonError) -> None:
        """A read did not complete."""
        pending = self._reader.take(posted)
        if pending is None:
            return
        pending.route.broke_off()
        incoming = self._incoming.get(pending.available.ticket)
        if incoming is not None:
            trouble = Trouble("read", f"{posted.transport}: {error}")
            self._read_again(incoming, posted, pending, trouble)

    def _read_again(
        self, incoming: Incoming, posted: Posted, pending: PendingRead, trouble: Trouble
    ) -> None:
        """Read the same by another transport; without one, have it written, or fail."""
        session, peer = incoming.session, incoming.peer
        kind, routes = posted.transport, self._desk.routes
        if peer is not None and session.phase is ReceivePhase.GRANTED:
            if routes.is_up(peer, pending.tried_now):
                self._note_reroute(incoming, kind, trouble.reason)
                self._read(incoming, pending.available, pending.tried_now)
            elif trouble.stage == "verify" or not routes.can_be_written(peer, pending.tried_now):
                self._perform(incoming, session.fail(trouble.reason, stage=trouble.stage))
            else:
                incoming.unreadable |= pending.tried_now
        self._perform(incoming, session.read_ended(posted))
        if incoming.unreadable:
            self._stop_reading(incoming, kind)

    def _stop_reading(self, incoming: Incoming, kind: str) -> None:
        """Have the rest written by the peer, once no read is under way; or fail."""
        session, peer = incoming.session, incoming.peer
        if peer is None or session.terms is None or session.terms.mover != "decode":
            return
        incoming.unreadable.add(kind)
        routes = self._desk.routes
        if not routes.can_be_written(peer, incoming.unreadable):
            self._perform(incoming, session.fail(str(routes.explain(peer)), stage="read"))
            return
        actions = session.reverse(incoming.unreadable)
        if actions:
            self._note_reroute(incoming, kind, str(routes.explain(peer)))
            incoming.is_reversed_from(kind)
            self._perform(incoming, actions)

    def _blame_others(self, incoming: Incoming, pending: PendingRead) -> None:
        """What another transport could not bring was there all the time."""
        for kind in pending.tried:
            if incoming.peer is not None:
                self._desk.routes.blame(incoming.peer, kind, "it read something else, or failed")

    def _note_reroute(self, incoming: Incoming, kind: str, reason: str) -> None:
        incoming.session.order.trace.reroutes.append(f"{kind}: {reason}"[:500])
        self._desk.routes.observer.failed("pull", kind)

    def _window_quiescent(self, transport: Transport, ticket: TicketId) -> None:
        """One transport says that nothing can land in a closed window."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            return
        if incoming.is_fenced(transport):
            self._perform(incoming, incoming.session.fenced(transport.kind))
        if incoming.falls_quiet(transport):
            self._perform(incoming, incoming.session.window_quiescent())

    def _hear_rerouted(self, incoming: Incoming, message: Rerouted) -> None:
        session = incoming.session
        try:
            actions = session.rerouted(message)
        except ProtocolError as exc:
            actions = session.fail(str(exc), stage="landing")
        self._perform(incoming, actions)

    def _try_begin(self, incoming: Incoming) -> None:
        """Settle the terms, if the peer is up, reachable, and the KV has pages to go to."""
        session, peer = incoming.session, incoming.peer
        if session.phase is not ReceivePhase.WAITING or peer is None or peer.hello is None:
            return
        mover = self._choose_mover(incoming, peer)
        if mover is None:
            return
        face, order = self._desk.face_to(peer), session.order
        if order.start % face.page_tokens:
            reason = f"token {order.start} is not the first of a page of {face.page_tokens}"
            self._perform(incoming, session.fail(reason, stage=STAGING_STAGE))
            return
        try:
            incoming.footprint = face.try_lay(Holder("receive", session.ticket), order.blocks)
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage=STAGING_STAGE))
            return
        if incoming.footprint is not None:
            desk = self._desk
            undigested = desk.verification.undigested(desk.transports)
            terms = Terms(mover, incoming.footprint.pages, face.is_staged, undigested)
            self._perform(incoming, session.begin(terms))

    def _choose_mover(self, incoming: Incoming, peer: Peer) -> GrantMover | None:
        """Who moves the bytes; None while a way to read, or to borrow, is looked for.

        What is pulled is complete: reading it is no work for a core that computes another prompt.
        """
        order, routes = incoming.session.order, self._desk.routes
        if order.ticket.mode == "reference" and not incoming.is_moved:
            reach = self._borrowing.reach(peer)
            if reach is not Reach.NONE:
                return "nobody" if reach is Reach.READY else None
            incoming.is_moved = True
            order.trace.reroutes.append(f"{REFERENCE}: {self._borrowing.explain(peer)}"[:500])
        if self._desk.mover == "prefill" and order.ticket.mode != "pull":
            return "prefill"
        routes.seek(peer)
        match routes.reach(peer):
            case Reach.READY:
                return "decode"
            case Reach.WAITING:
                return None
            case Reach.NONE:
                return "prefill"

    def _hear_available(self, incoming: Incoming, message: Available) -> None:
        try:
            actions = incoming.session.available(message)
        except ProtocolError as exc:
            actions = incoming.session.fail(str(exc), stage="landing")
        self._perform(incoming, actions)

    def _hear_of_loan(self, incoming: Incoming, message: Lent | Unlent) -> None:
        session = incoming.session
        try:
            match message:
                case Lent():
                    actions = session.lent(message)
                case Unlent(_, reason):
                    actions = session.unlent(reason)
                case _:
                    assert_never(message)
        except ProtocolError as exc:
            actions = session.fail(str(exc), stage="landing")
        self._perform(incoming, actions)

    def _take(self, incoming: Incoming, action: Read | Borrow) -> None:
        match action:
            case Read(available):
                self._read(incoming, available)
            case Borrow(lent):
                self._borrow(incoming, lent)
            case _:
                assert_never(action)

    def _borrow(self, incoming: Incoming, lent: Lent) -> None:
        session = incoming.session
        if incoming.peer is None:
            raise AssertionError("nobody lends who was not dialed")
        try:
            blocks = self._borrowing.borrow(incoming.peer, session.order, lent)
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage="borrow"))
            return
        trace = session.order.trace
        trace.transport = trace.expected_transport = REFERENCE
        actions = session.borrowed(blocks)
        incoming.stamp_progress(self._desk.clock.now())
        self._perform(incoming, actions)

    def _take_in(self, incoming: Incoming, notice: Notice) -> None:
        """Count what is in the pages, and is what the sender had."""
        incoming.scatter(notice)
        actions = incoming.session.landed(notice)
        incoming.stamp_progress(self._desk.clock.now())
        self._perform(incoming, actions)

    def _perform(self, incoming: Incoming, actions: list[ReceiveAction]) -> None:
        for action in actions:
            self._carry_out(incoming, action)
        session = incoming.session
        if session.over and self._incoming.pop(session.ticket, None) is not None:
            holder = Holder("receive", session.ticket)
            for face in self._desk.faces:
                face.give_back(holder)
            if session.may_owe_loan:
                self._borrowing.owe(session.ticket, session.order.ticket.prefill.epoch)

    def _carry_out(self, incoming: Incoming, action: ReceiveAction) -> None:
        match action:
            case OpenWindow():
                self._open_windows(incoming)
            case CloseWindow():
                self._close_windows(incoming)
            case Fence(kind):
                if incoming.fence(kind):
                    self._perform(incoming, incoming.session.fenced(kind))
            case Read() | Borrow():
                self._take(incoming, action)
            case Say() | SayTaken():
                self._speak(incoming, action)
            case Emit(event):
                incoming.write_trace()
                self._desk.emit(event)
            case _:
                assert_never(action)

    def _open_windows(self, incoming: Incoming) -> None:
        """Open the window on every transport; where one refuses, the handoff ends."""
        try:
            incoming.open_windows(self._desk.transports)
        except BatonError as exc:
            self._perform(incoming, incoming.session.fail(str(exc), stage="window"))

    def _close_windows(self, incoming: Incoming) -> None:
        if not incoming.close_windows():
            self._perform(incoming, incoming.session.window_quiescent())

    def _read(
        self, incoming: Incoming, available: Available, tried: frozenset[str] = frozenset()
    ) -> None:
        session = incoming.session
        if incoming.unreadable:
            return  # the peer will be asked to write it
        try:
            session.reading(self._reader.post(incoming, available, tried))
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage="read"))

    def _speak(self, incoming: Incoming, action: Say | SayTaken) -> None:
        match action:
            case Say(message):
                self._say(incoming, message)
            case SayTaken():
                self._say_taken(incoming)
            case _:
                assert_never(action)

    def _say_taken(self, incoming: Incoming) -> None:
        trace = incoming.session.order.trace
        message = Taken(
            incoming.session.ticket, trace.transport or "", trace.expected_transport or ""
        )
        if incoming.peer is not None:
            self._desk.peers.say(incoming.peer, message)

    def _say(self, incoming: Incoming, message: Sayable) -> None:
        if isinstance(message, Grant):
            if incoming.session.phase is not ReceivePhase.GRANTED:
                return  # no window could be opened
            now = self._desk.clock.now()
            incoming.session.order.trace.stamp(Stamp.GRANTED, now)
            if incoming.peer is not None and incoming.peer.hello is not None:
                incoming.session.tenancy.begin(now, incoming.peer.hello.lease_s)
        if incoming.peer is not None:
            self._desk.peers.say(incoming.peer, message)

    def _of(self, peer: Peer) -> list[Incoming]:
        return [incoming for incoming in self._incoming.values() if incoming.peer is peer]


def explain_digests(notice: Notice) -> str:
    """What was expected, and is not there."""
    return f"digest mismatch in layer {notice.layer}, tokens [{notice.start}, {notice.stop})"
