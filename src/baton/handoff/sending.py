"""The prefill worker's handoffs: carries out what `SendSession` asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Instant
from baton.errors import BatonError
from baton.handoff.carriage import REFERENCE
from baton.handoff.grants import (
    EarlyGrants,
    Granted,
    check_grant,
    check_reversal,
    check_ticket,
    epoch_of,
)
from baton.handoff.graves import Grave, Graves
from baton.handoff.interface import DECLINED_STAGE, KVLent, SendFailed
from baton.handoff.messages import (
    Avoid,
    Declined,
    Failed,
    Finished,
    Grant,
    Lent,
    Missing,
    Renew,
    Reversed,
    Taken,
    Unlent,
    pack_blocks,
)
from baton.handoff.outgoing import Outgoing
from baton.handoff.renewing import answer_renewal
from baton.handoff.routes import Reach
from baton.handoff.session.actions import (
    Announce,
    Emit,
    Lend,
    Say,
    SayFinished,
    SendAction,
    Submit,
)
from baton.handoff.session.lease import LEASE_STAGE
from baton.handoff.session.posted import Posted
from baton.handoff.session.send import SendPhase, SendSession
from baton.handoff.shipping import announce, join_submits, lay_footprint, write
from baton.handoff.staging import STAGING_STAGE, Holder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.desk import Desk
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.lending import LendingDesk
    from baton.handoff.messages import Returned
    from baton.handoff.peers import Peer
    from baton.handoff.pulse import Roll
    from baton.handoff.route import Route
    from baton.handoff.routes import RouteFound, RouteLost
    from baton.handoff.session.actions import Sayable
    from baton.ids import TicketId
    from baton.transfer.interface import TransferId, Transport

logger = logging.getLogger(__name__)

_WRITING: Final = frozenset({SendPhase.SENDING, SendPhase.DRAINING})


class SendingDesk:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """All handoffs out of this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk, lending: LendingDesk) -> None:
        self._desk, self._lending = desk, lending
        self._outgoing: dict[TicketId, Outgoing] = {}
        self._early = EarlyGrants()
        self._writes: dict[Posted, tuple[Route, TicketId]] = {}
        self._dead = Graves()
        self.num_lapsed_leases = 0

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over, but for prompts that wait to be pulled."""
        return sum(not outgoing.is_held for outgoing in self._outgoing.values())

    @property
    def is_moving(self) -> bool:
        """Whether a write is under way."""
        return bool(self._writes)

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort.offer`."""
        desk = self._desk
        session = SendSession(
            order,
            num_layers=desk.num_layers,
            deadline=_deadline_of(order, desk),
            lease_s=desk.lease_s,
        )
        outgoing = self._outgoing[session.ticket] = Outgoing(session)
        grave = self._dead.take(session.ticket, order.ticket.decode.epoch)
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

    def all_ready(self, ticket: TicketId, stop: int) -> None:
        """All layers of tokens `[0, stop)` are in place: see `one_piece.py`."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            self._perform(outgoing, outgoing.session.all_ready(stop))

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort.finish`."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            now = self._desk.clock.now()
            outgoing.session.lease.hold(now)
            outgoing.session.wait_until(Instant(now + self._desk.timeout_s))
            self._perform(outgoing, outgoing.session.finish(first_token))

    def working(self, roll: Roll) -> None:
        """This worker's engine lives, and has yet to compute these: their deadlines can wait."""
        until = Instant(roll.lived_at + self._desk.timeout_s)
        for ticket in roll.prompts:
            outgoing = self._outgoing.get(ticket.id)
            if outgoing is not None:
                outgoing.session.wait_until(until)

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            return False
        self._perform(outgoing, outgoing.session.fail(reason, stage="abort"))
        return True

    def withdraw_oldest(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort.withdraw_oldest`."""
        for outgoing in filter(None, map(self._outgoing.get, tickets)):
            if outgoing.granted is None:
                self._perform(outgoing, outgoing.session.fail(reason, stage="offered"))
                return

    def heard(
        self,
        peer: Peer,
        message: Grant | Declined | Taken | Missing | Avoid | Reversed | Failed | Renew,
    ) -> None:
        """The decode worker says something about one handoff, or all of them.

        Raises:
            TicketError: this peer declined a ticket that is not its own.
            ProtocolError: its ranges or pages are none.
        """
        match message:
            case Grant():
                self._hear_grant(peer, message)
            case Declined(sealed, reason):
                ticket = check_ticket(self._desk, peer, sealed)
                self._end(peer, ticket.id, reason, DECLINED_STAGE)
            case Failed(ticket_id, reason):
                self._end(peer, ticket_id, reason, "decode")
            case Renew():
                answer_renewal(
                    self._desk,
                    peer,
                    message,
                    outgoing=self._outgoing,
                    dead=self._dead,
                    early=self._early,
                )
            case Taken() | Missing() | Avoid() | Reversed():
                outgoing = self._outgoing.get(message.ticket)
                if outgoing is not None and outgoing.reaches(peer):
                    self._hear_of(outgoing, message)
            case _:
                assert_never(message)

    def returned(self, peer: Peer, message: Returned) -> None:
        """A borrower is done with these, lent already or not."""
        for ticket in message.tickets:
            self._end(peer, ticket, "the decode worker gave up", "decode")
        self._lending.returned(peer, message)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        self._early.forget_peer(peer)
        for outgoing in self._of(peer):
            session = outgoing.session
            self._perform(outgoing, session.peer_failed(str(error), stage=str(session.phase)))

    def route_found(self, event: RouteFound) -> None:
        """A peer's pages can be written, over one more route."""
        for outgoing in self._of(event.peer):
            self._try_begin(outgoing)
            self._resume(outgoing)

    def route_lost(self, event: RouteLost) -> None:
        """A transport does not reach this peer (any more): go on over another, if there is one."""
        for outgoing in self._of(event.peer):
            if outgoing.session.phase is SendPhase.OFFERED:
                self._try_begin(outgoing)
                continue
            if outgoing.session.is_written and not self._leave(
                outgoing, event.peer, event.transport
            ):
                error = self._desk.routes.explain(event.peer)
                self._perform(outgoing, outgoing.session.fail(str(error), stage="attach"))
            self._resume(outgoing)

    def staged(self, ticket: TicketId) -> None:
        """The turn of a handoff that waited for staging pages has come."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            self._try_begin(outgoing)

    def write_completed(self, transport: Transport, transfer: TransferId) -> None:
        """A write is done."""
        posted = Posted(transport.kind, transfer)
        route, outgoing = self._take_write(posted)
        if route is not None:
            self._desk.routes.carried(route)
        if outgoing is not None:
            self._perform(outgoing, outgoing.session.ended(posted))

    def write_failed(self, transport: Transport, transfer: TransferId, error: BatonError) -> None:
        """A write failed: another transport takes over, if there is one."""
        posted = Posted(transport.kind, transfer)
        route, outgoing = self._take_write(posted)
        if route is not None:
            route.broke_off()
        if outgoing is None or outgoing.granted is None:
            return
        session = outgoing.session
        if not self._leave(outgoing, outgoing.granted.peer, transport.kind):
            reason = f"{transport.kind}: {error}"
            self._perform(outgoing, session.fail(reason, stage="transfer"))
        self._perform(outgoing, session.ended(posted))

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
        grave = self._dead.take(granted.ticket.id, granted.ticket.decode.epoch)
        if grave is not None:
            self._desk.peers.say(peer, Failed(granted.ticket.id, grave.reason))
            return
        if granted.ticket.mode == "pull":  # it was held before decode was asked
            self._desk.peers.say(peer, Failed(granted.ticket.id, "it is held no more"))
            return
        self._early.keep(granted)

    def _take_grant(self, outgoing: Outgoing, granted: Granted) -> None:
        if outgoing.granted is not None:
            return
        outgoing.granted = granted
        outgoing.session.renew(self._desk.clock.now())
        self._perform(outgoing, outgoing.session.granted(granted.grant))
        if outgoing.session.is_lent and not outgoing.session.over:
            reason = self._lending.promise(granted)
            if reason is not None:
                outgoing.session.order.trace.reroutes.append(f"reference: {reason}"[:500])
                self._desk.peers.say(granted.peer, Unlent(granted.ticket.id, reason))
                return  # the peer will say into what to write
        self._try_begin(outgoing)

    def _try_begin(self, outgoing: Outgoing) -> None:
        """Begin to send, if the peer can be reached and the KV has pages to lie in."""
        session, granted = outgoing.session, outgoing.granted
        if session.phase is not SendPhase.OFFERED or granted is None:
            return
        if session.is_lent and not self._lending.has_promised(session.ticket):
            return  # a loan was refused: the peer has yet to say into what to write
        face = self._desk.face_to(granted.peer)
        stage = "attach"
        try:
            if session.is_written and not self._has_route(granted.peer):
                return
            stage = STAGING_STAGE
            outgoing.footprint = lay_footprint(face, session.order, granted.grant)
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage=stage))
            return
        if outgoing.footprint is not None:
            self._perform(outgoing, session.begin(face.page_tokens))

    def _has_route(self, peer: Peer) -> bool:
        """Whether there is a route; if not, `route_found` or `route_lost` follows.

        Raises:
            TransferError: there is none, and none is being looked for.
        """
        routes = self._desk.routes
        routes.seek(peer)
        match routes.reach(peer):
            case Reach.READY:
                return True
            case Reach.WAITING:
                return False
            case Reach.NONE:
                raise routes.explain(peer)

    def _leave(self, outgoing: Outgoing, peer: Peer, kind: str) -> bool:
        """Have a session go on without a transport; whether there is another for it."""
        session, routes = outgoing.session, self._desk.routes
        if routes.reach(peer, {*session.avoids, kind}) is Reach.NONE:
            return False
        if kind in session.avoids or not session.is_written:
            return True
        outgoing.session.order.trace.reroutes.append(f"{kind}: {routes.explain(peer)}"[:500])
        routes.observer.failed("push", kind)
        self._perform(outgoing, session.reroute(kind))
        return True

    def _resume(self, outgoing: Outgoing) -> None:
        if outgoing.waits:
            outgoing.waits = False
            self._perform(outgoing, outgoing.session.resume())

    def _hear_of(self, outgoing: Outgoing, message: Taken | Missing | Avoid | Reversed) -> None:
        """The decode worker says something about a handoff that it granted."""
        session, granted = outgoing.session, outgoing.granted
        if granted is None:
            return
        match message:
            case Taken(_, transport, expected):
                trace = session.order.trace
                trace.transport, trace.expected_transport = transport, expected
                self._perform(outgoing, session.taken())
            case Missing(_, transport):
                # It was no refusal by a handoff that had ended over there.
                if transport in session.avoids:
                    self._desk.routes.blame(granted.peer, transport, "writes did not arrive")
                self._perform(outgoing, session.missing(message))
            case Avoid(_, transport, reason):
                if not self._leave(outgoing, granted.peer, transport):
                    self._perform(outgoing, session.fail(reason, stage="transfer"))
            case Reversed():
                outgoing.granted = check_reversal(granted, message)
                self._desk.routes.seek(granted.peer)
                self._perform(outgoing, session.reversed(message))
                self._try_begin(outgoing)
            case _:
                assert_never(message)

    def _end(self, peer: Peer, ticket: TicketId, reason: str, stage: str) -> None:
        """The decode worker wants no more of this ticket."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            self._early.forget(ticket, peer)
            self._dead.bury(ticket, Grave(reason, stage), by=epoch_of(peer))
        elif outgoing.session.order.ticket.decode.epoch == epoch_of(peer):
            self._perform(outgoing, outgoing.session.peer_failed(reason, stage=stage))

    def _perform(self, outgoing: Outgoing, actions: list[SendAction]) -> None:
        for action in join_submits(actions) if len(actions) > 1 else actions:
            self._carry_out(outgoing, action)
        session = outgoing.session
        if session.over and self._outgoing.pop(session.ticket, None) is not None:
            holder = Holder("send", session.ticket)
            for face in self._desk.faces:
                face.give_back(holder)
            self._lending.forget(session.ticket)

    def _carry_out(self, outgoing: Outgoing, action: SendAction) -> None:
        match action:
            case Submit():
                self._submit(outgoing, action)
            case Announce():
                self._announce(outgoing, action)
            case SayFinished(first_token):
                self._say_finished(outgoing, first_token)
            case Lend():
                self._lend(outgoing, action)
            case Say(message):
                self._say(outgoing, message)
            case Emit(event):
                if isinstance(event, SendFailed) and event.error.stage == LEASE_STAGE:
                    self.num_lapsed_leases += 1
                outgoing.write_trace()
                self._desk.emit(event)
            case _:
                assert_never(action)

    def _submit(self, outgoing: Outgoing, submit: Submit) -> None:
        """Write a range of one layer or more, in parcels; a failure ends the session."""
        session, granted, footprint = outgoing.session, outgoing.granted, outgoing.footprint
        if session.phase not in _WRITING or granted is None or footprint is None:
            return  # an earlier write of the same batch failed
        routes = self._desk.routes
        peer, avoided = granted.peer, session.avoids
        if not routes.is_up(peer, avoided) and routes.reach(peer, avoided) is Reach.WAITING:
            outgoing.waits = True  # `resume` will ask for it again
            return
        try:
            for shipment in write(
                submit, routes, outgoing=outgoing, granted=granted, footprint=footprint
            ):
                self._writes[shipment.posted] = shipment.way.route, session.ticket
                for stretch in shipment.stretches:
                    self._perform(outgoing, session.submitted(shipment.posted, stretch))
                if session.phase not in _WRITING:
                    return
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage="submit"))

    def _announce(self, outgoing: Outgoing, action: Announce) -> None:
        """Say where one layer's range lies, in parcels; a failure ends the session."""
        session, granted, footprint = outgoing.session, outgoing.granted, outgoing.footprint
        if session.phase is not SendPhase.SENDING or granted is None or footprint is None:
            return
        try:
            for message in announce(action, outgoing, granted=granted, footprint=footprint):
                self._desk.peers.say(granted.peer, message)
                self._perform(outgoing, session.announced(action.layer, message.stop))
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage="announce"))

    def _lend(self, outgoing: Outgoing, action: Lend) -> None:
        """Lend what was promised. From here on only the borrower's word, or its end, ends it."""
        granted, order = outgoing.granted, outgoing.session.order
        if granted is None:
            raise AssertionError("nothing is lent before it was granted")
        size = self._desk.face_to(granted.peer).face.layout.block_size
        first, stop = action.start // size, -(-order.num_tokens // size)
        blocks = order.blocks.blocks[first - order.blocks.first : stop - order.blocks.first]
        self._lending.lend(order.ticket.id, order.deadline)
        order.trace.transport = order.trace.expected_transport = REFERENCE
        self._desk.emit(KVLent(order.ticket.id, tuple(int(block) for block in blocks)))
        self._desk.peers.say(granted.peer, Lent(order.ticket.id, first, pack_blocks(blocks)))
        self._say_finished(outgoing, action.first_token)

    def _say_finished(self, outgoing: Outgoing, first_token: SampledToken | None) -> None:
        if outgoing.granted is None:
            return
        outgoing.write_trace()
        trace = outgoing.session.order.trace
        message = Finished(
            ticket=outgoing.session.ticket,
            first_token=first_token,
            transport=trace.transport or "",
            expected_transport=trace.expected_transport or "",
            stamps=trace.stamps.copy(),
        )
        self._desk.peers.say(outgoing.granted.peer, message)

    def _say(self, outgoing: Outgoing, message: Sayable) -> None:
        if outgoing.granted is not None:
            self._desk.peers.say(outgoing.granted.peer, message)
        elif isinstance(message, Failed):
            ticket = outgoing.session.order.ticket
            self._dead.bury(ticket.id, Grave(message.reason, "prefill"), by=ticket.decode.epoch)

    def _take_write(self, posted: Posted) -> tuple[Route | None, Outgoing | None]:
        found = self._writes.pop(posted, None)
        return (None, None) if found is None else (found[0], self._outgoing.get(found[1]))

    def _of(self, peer: Peer) -> list[Outgoing]:
        return [outgoing for outgoing in self._outgoing.values() if outgoing.reaches(peer)]


def _deadline_of(order: SendOrder, desk: Desk) -> Instant:
    """A pull waits for decode to have room: for as long as the request may, and its lease lasts."""
    if order.ticket.mode == "pull":
        return order.deadline
    return Instant(min(order.deadline, desk.clock.now() + desk.timeout_s))
