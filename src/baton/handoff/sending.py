"""The prefill worker's handoffs: carries out what `SendSession` asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from baton.clock import Instant
from baton.errors import BatonError
from baton.handoff.grants import EarlyGrants, Granted, check_grant, check_ticket, epoch_of
from baton.handoff.graves import Grave, Graves
from baton.handoff.interface import DECLINED_STAGE
from baton.handoff.messages import Declined, Failed, Finished, Grant, Taken
from baton.handoff.session.actions import (
    Announce,
    Emit,
    Say,
    SayFinished,
    SendAction,
    Submit,
)
from baton.handoff.session.send import SendPhase, SendSession
from baton.handoff.shipping import announce, lay_footprint, write
from baton.handoff.staging import STAGING_STAGE, Holder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.desk import Desk
    from baton.handoff.footprint import Footprint
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.peers import Peer
    from baton.handoff.routes import RouteFound, RouteLost
    from baton.ids import TicketId
    from baton.transfer.interface import TransferId, Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Outgoing:
    """One handoff out of this worker. `footprint` is known from `SendSession.begin` on."""

    session: SendSession
    granted: Granted | None = None
    footprint: Footprint | None = None

    def reaches(self, peer: Peer) -> bool:
        """Whether this peer granted it."""
        return self.granted is not None and self.granted.peer is peer


class SendingDesk:
    """All handoffs out of this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._outgoing: dict[TicketId, _Outgoing] = {}
        self._early = EarlyGrants()
        self._writes: dict[tuple[str, TransferId], TicketId] = {}
        self._dead = Graves()

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over."""
        return len(self._outgoing)

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort.offer`."""
        desk = self._desk
        session = SendSession(
            order,
            num_layers=desk.num_layers,
            deadline=Instant(min(order.deadline, desk.clock.now() + desk.timeout_s)),
        )
        outgoing = self._outgoing[session.ticket] = _Outgoing(session)
        grave = self._dead.take(session.ticket)
        if grave is not None:
            self._perform(outgoing, session.peer_failed(grave.reason, stage=grave.stage))
            return
        granted = self._early.take(session.ticket)
        if granted is not None:
            self._take_grant(outgoing, granted)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort.layer_ready`."""
        for ticket, stop in tickets:
            outgoing = self._outgoing.get(ticket)
            if outgoing is not None:
                self._perform(outgoing, outgoing.session.layer_ready(layer, stop))

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort.finish`."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            self._perform(outgoing, outgoing.session.finish(first_token))

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            return False
        self._perform(outgoing, outgoing.session.fail(reason, stage="abort"))
        return True

    def heard(self, peer: Peer, message: Grant | Declined | Taken | Failed) -> None:
        """The decode worker says something about one handoff.

        Raises:
            TicketError: this peer declined a ticket that is not its own.
        """
        match message:
            case Grant():
                self._hear_grant(peer, message)
            case Declined(sealed, reason):
                ticket = check_ticket(self._desk, peer, sealed)
                self._end(peer, ticket.id, reason, DECLINED_STAGE)
            case Taken(ticket_id):
                outgoing = self._outgoing.get(ticket_id)
                if outgoing is not None and outgoing.reaches(peer):
                    self._perform(outgoing, outgoing.session.taken())
            case Failed(ticket_id, reason):
                self._end(peer, ticket_id, reason, "decode")
            case _:
                assert_never(message)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        self._early.forget_peer(peer)
        for outgoing in self._of(peer):
            session = outgoing.session
            self._perform(outgoing, session.peer_failed(str(error), stage=str(session.phase)))

    def route_found(self, event: RouteFound) -> None:
        """A peer's pages can be written."""
        for outgoing in self._of(event.peer):
            self._try_begin(outgoing)

    def route_lost(self, event: RouteLost) -> None:
        """No transport reaches this peer (any more)."""
        for outgoing in self._of(event.peer):
            self._perform(outgoing, outgoing.session.fail(str(event.error), stage="attach"))

    def staged(self, ticket: TicketId) -> None:
        """The turn of a handoff that waited for staging pages has come."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            self._try_begin(outgoing)

    def write_completed(self, transport: Transport, transfer: TransferId) -> None:
        """A write is done."""
        outgoing = self._take_write(transport, transfer)
        if outgoing is not None:
            self._perform(outgoing, outgoing.session.completed(transfer))

    def write_failed(self, transport: Transport, transfer: TransferId, error: BatonError) -> None:
        """A write failed."""
        outgoing = self._take_write(transport, transfer)
        if outgoing is not None:
            reason = f"{transport.kind}: {error}"
            self._perform(outgoing, outgoing.session.write_failed(transfer, reason))

    def tick(self) -> None:
        """Fail what is past its deadline; forget grants for requests that never came."""
        now = self._desk.clock.now()
        for outgoing in tuple(self._outgoing.values()):
            self._perform(outgoing, outgoing.session.expire(now))
        self._early.forget_expired(self._desk.clock.unix_now())

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for outgoing in tuple(self._outgoing.values()):
            self._perform(outgoing, outgoing.session.fail(reason, stage="stop"))

    def _hear_grant(self, peer: Peer, grant: Grant) -> None:
        """Take a good grant; answer a bad one, so that the decode worker need not wait."""
        try:
            granted = check_grant(self._desk, peer, grant)
        except BatonError as exc:
            logger.warning("handoff: refused a grant of %s: %s", peer.name, exc)
            self._desk.peers.say(peer, Failed(grant.id, str(exc)[:2000]))
            return
        outgoing = self._outgoing.get(granted.ticket.id)
        if outgoing is not None:
            self._take_grant(outgoing, granted)
            return
        grave = self._dead.take(granted.ticket.id)
        if grave is not None:
            self._desk.peers.say(peer, Failed(granted.ticket.id, grave.reason))
            return
        self._early.keep(granted)

    def _take_grant(self, outgoing: _Outgoing, granted: Granted) -> None:
        if outgoing.granted is not None:
            return
        outgoing.granted = granted
        self._perform(outgoing, outgoing.session.granted(granted.grant))
        self._try_begin(outgoing)

    def _try_begin(self, outgoing: _Outgoing) -> None:
        """Begin to send, if the peer can be reached and the KV has pages to lie in."""
        session, granted = outgoing.session, outgoing.granted
        if session.phase is not SendPhase.OFFERED or granted is None:
            return
        if granted.grant.mover == "prefill" and not self._has_route(granted.peer):
            return
        face = self._desk.face_to(granted.peer)
        try:
            outgoing.footprint = lay_footprint(face, session.order, granted.grant)
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage=STAGING_STAGE))
            return
        if outgoing.footprint is not None:
            self._perform(outgoing, session.begin(face.page_tokens))

    def _has_route(self, peer: Peer) -> bool:
        """Whether there is a route; if not, `route_found` or `route_lost` follows."""
        if self._desk.routes.find(peer) is not None:
            return True
        lost = self._desk.routes.seek(peer)
        if lost is not None:
            self.route_lost(lost)
        return False

    def _end(self, peer: Peer, ticket: TicketId, reason: str, stage: str) -> None:
        """The decode worker wants no more of this ticket."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            self._early.take(ticket)
            self._dead.bury(ticket, Grave(reason, stage))
        elif outgoing.session.order.ticket.decode.epoch == epoch_of(peer):
            self._perform(outgoing, outgoing.session.peer_failed(reason, stage=stage))

    def _perform(self, outgoing: _Outgoing, actions: list[SendAction]) -> None:
        for action in actions:
            self._carry_out(outgoing, action)
        session = outgoing.session
        if session.over and self._outgoing.pop(session.ticket, None) is not None:
            holder = Holder("send", session.ticket)
            for face in self._desk.faces:
                face.give_back(holder)

    def _carry_out(self, outgoing: _Outgoing, action: SendAction) -> None:
        match action:
            case Submit():
                self._submit(outgoing, action)
            case Announce():
                self._announce(outgoing, action)
            case SayFinished(first_token):
                self._say_finished(outgoing, first_token)
            case Say(message):
                self._say(outgoing, message)
            case Emit(event):
                self._desk.emit(event)
            case _:
                assert_never(action)

    def _submit(self, outgoing: _Outgoing, submit: Submit) -> None:
        """Write one layer's range, in parcels; a failure ends the session."""
        session, granted, footprint = outgoing.session, outgoing.granted, outgoing.footprint
        if session.phase is not SendPhase.SENDING or granted is None or footprint is None:
            return  # an earlier write of the same batch failed
        route = self._desk.routes.find(granted.peer)
        if route is None:
            return  # route_lost has ended, or is about to end, this session
        try:
            writes = write(submit, route, granted, footprint, trace=session.order.trace)
            for transfer, stop in writes:
                self._writes[route.used, transfer] = session.ticket
                self._perform(outgoing, session.submitted(transfer, submit.layer, stop))
        except BatonError as exc:
            self._perform(outgoing, session.fail(f"{route.used}: {exc}", stage="submit"))

    def _announce(self, outgoing: _Outgoing, action: Announce) -> None:
        """Say where one layer's range lies, in parcels; a failure ends the session."""
        session, granted, footprint = outgoing.session, outgoing.granted, outgoing.footprint
        if session.phase is not SendPhase.SENDING or granted is None or footprint is None:
            return
        try:
            for message in announce(action, granted, footprint, trace=session.order.trace):
                self._desk.peers.say(granted.peer, message)
                self._perform(outgoing, session.announced(action.layer, message.stop))
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage="announce"))

    def _say_finished(self, outgoing: _Outgoing, first_token: SampledToken | None) -> None:
        if outgoing.granted is None:
            return
        trace = outgoing.session.order.trace
        message = Finished(
            ticket=outgoing.session.ticket,
            first_token=first_token,
            transport=trace.transport or "",
            expected_transport=trace.expected_transport or "",
            stamps=trace.stamps.copy(),
        )
        self._desk.peers.say(outgoing.granted.peer, message)

    def _say(self, outgoing: _Outgoing, message: Failed | Grant | Taken) -> None:
        if outgoing.granted is not None:
            self._desk.peers.say(outgoing.granted.peer, message)
        elif isinstance(message, Failed):
            self._dead.bury(outgoing.session.ticket, Grave(message.reason, "prefill"))

    def _take_write(self, transport: Transport, transfer: TransferId) -> _Outgoing | None:
        ticket = self._writes.pop((transport.kind, transfer), None)
        return self._outgoing.get(ticket) if ticket is not None else None

    def _of(self, peer: Peer) -> list[_Outgoing]:
        return [outgoing for outgoing in self._outgoing.values() if outgoing.reaches(peer)]
