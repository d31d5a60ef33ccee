"""The prefill worker's handoffs: carries out what `SendSession` asks for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from baton.authority.ticket import Ticket, unseal
from baton.clock import Instant
from baton.errors import BatonError, ProtocolError, TicketError
from baton.handoff.graves import Grave, Graves
from baton.handoff.interface import DECLINED_STAGE
from baton.handoff.messages import Declined, Failed, Finished, Grant, unpack_blocks
from baton.handoff.parcels import Packer
from baton.handoff.session.actions import (
    Emit,
    Say,
    SayFinished,
    SendAction,
    Submit,
)
from baton.handoff.session.send import SendPhase, SendSession
from baton.kv.copies import BlockTable, PagedSequence
from baton.transfer.interface import PageWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.desk import Desk
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.peers import Peer
    from baton.handoff.routes import Route, RouteFound, RouteLost
    from baton.ids import TicketId
    from baton.transfer.interface import TransferId, Transport

logger = logging.getLogger(__name__)

MAX_EARLY_GRANTS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Granted:
    """A grant, checked, and who gave it."""

    peer: Peer
    ticket: Ticket
    grant: Grant
    target: BlockTable


class SendingDesk:
    """All handoffs out of this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._sessions: dict[TicketId, SendSession] = {}
        self._grants: dict[TicketId, _Granted] = {}
        self._early: OrderedDict[TicketId, _Granted] = OrderedDict()
        self._writes: dict[tuple[str, TransferId], TicketId] = {}
        self._dead = Graves()

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over."""
        return len(self._sessions)

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort.offer`."""
        desk = self._desk
        session = SendSession(
            order,
            num_layers=desk.layout.num_layers,
            deadline=Instant(min(order.deadline, desk.clock.now() + desk.timeout_s)),
        )
        self._sessions[session.ticket] = session
        grave = self._dead.take(session.ticket)
        if grave is not None:
            self._perform(session, session.peer_failed(grave.reason, stage=grave.stage))
            return
        granted = self._early.pop(session.ticket, None)
        if granted is not None:
            self._take_grant(session, granted)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort.layer_ready`."""
        for ticket, stop in tickets:
            session = self._sessions.get(ticket)
            if session is not None:
                self._perform(session, session.layer_ready(layer, stop))

    def finish(self, ticket: TicketId, first_token: SampledToken) -> None:
        """See `HandoffPort.finish`."""
        session = self._sessions.get(ticket)
        if session is not None:
            self._perform(session, session.finish(first_token))

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        session = self._sessions.get(ticket)
        if session is None:
            return False
        self._perform(session, session.fail(reason, stage="abort"))
        return True

    def heard(self, peer: Peer, message: Grant | Declined | Failed) -> None:
        """The decode worker says something about one handoff.

        Raises:
            TicketError: this peer declined a ticket that is not its own.
        """
        match message:
            case Grant():
                self._hear_grant(peer, message)
            case Declined(sealed, reason):
                self._end(peer, self._check_ticket(peer, sealed).id, reason, DECLINED_STAGE)
            case Failed(ticket, reason):
                self._end(peer, ticket, reason, "decode")
            case _:
                assert_never(message)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        self._desk.routes.forget(peer)
        for ticket, granted in tuple(self._early.items()):
            if granted.peer is peer:
                del self._early[ticket]
        for session in self._of(peer):
            self._perform(session, session.peer_failed(str(error), stage=str(session.phase)))

    def route_found(self, event: RouteFound) -> None:
        """Start to write to a peer."""
        for session in self._of(event.peer):
            self._perform(session, session.attached(event.route.remote))

    def route_lost(self, event: RouteLost) -> None:
        """No transport reaches this peer (any more)."""
        for session in self._of(event.peer):
            self._perform(session, session.fail(str(event.error), stage="attach"))

    def write_completed(self, transport: Transport, transfer: TransferId) -> None:
        """A write is done."""
        session = self._session_of(transport, transfer)
        if session is not None:
            self._perform(session, session.completed(transfer))

    def write_failed(self, transport: Transport, transfer: TransferId, error: BatonError) -> None:
        """A write failed."""
        session = self._session_of(transport, transfer)
        if session is not None:
            self._perform(session, session.write_failed(transfer, f"{transport.kind}: {error}"))

    def tick(self) -> None:
        """Fail what is past its deadline; forget grants for requests that never came."""
        now, unix_now = self._desk.clock.now(), self._desk.clock.unix_now()
        for session in tuple(self._sessions.values()):
            self._perform(session, session.expire(now))
        for ticket, granted in tuple(self._early.items()):
            if unix_now > granted.ticket.expires_at:
                del self._early[ticket]

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for session in tuple(self._sessions.values()):
            self._perform(session, session.fail(reason, stage="stop"))

    def _hear_grant(self, peer: Peer, grant: Grant) -> None:
        """Take a good grant; answer a bad one, so that the decode worker need not wait."""
        try:
            granted = self._check_grant(peer, grant)
        except BatonError as exc:
            logger.warning("handoff: refused a grant of %s: %s", peer.name, exc)
            self._desk.peers.say(peer, Failed(grant.id, str(exc)[:2000]))
        else:
            self._granted(granted)

    def _granted(self, granted: _Granted) -> None:
        session = self._sessions.get(granted.ticket.id)
        if session is not None:
            self._take_grant(session, granted)
            return
        grave = self._dead.take(granted.ticket.id)
        if grave is not None:
            self._desk.peers.say(granted.peer, Failed(granted.ticket.id, grave.reason))
            return
        self._early[granted.ticket.id] = granted
        while len(self._early) > MAX_EARLY_GRANTS:
            self._early.popitem(last=False)

    def _take_grant(self, session: SendSession, granted: _Granted) -> None:
        if session.grant is not None:
            return
        self._grants[session.ticket] = granted
        self._perform(session, session.granted(granted.grant))
        if session.over:
            return
        route = self._desk.routes.find(granted.peer)
        if route is not None:
            self._perform(session, session.attached(route.remote))
            return
        lost = self._desk.routes.seek(granted.peer)
        if lost is not None:
            self.route_lost(lost)

    def _end(self, peer: Peer, ticket: TicketId, reason: str, stage: str) -> None:
        """The decode worker wants no more of this ticket."""
        session = self._sessions.get(ticket)
        if session is None:
            self._early.pop(ticket, None)
            self._dead.bury(ticket, Grave(reason, stage))
        elif session.order.ticket.decode.epoch == _epoch(peer):
            self._perform(session, session.peer_failed(reason, stage=stage))

    def _check_ticket(self, peer: Peer, sealed: str) -> Ticket:
        desk = self._desk
        ticket = unseal(sealed, desk.key, desk.clock.unix_now())
        if (ticket.prefill.worker, ticket.prefill.epoch) != (desk.me.worker, desk.me.epoch):
            raise TicketError(f"a ticket for another prefill worker, {ticket.prefill.worker}")
        if ticket.decode.epoch != _epoch(peer):
            raise TicketError(f"{peer.name} used a ticket of {ticket.decode.worker}")
        return ticket

    def _check_grant(self, peer: Peer, grant: Grant) -> _Granted:
        ticket = self._check_ticket(peer, grant.ticket)
        if ticket.id != grant.id:
            raise TicketError("a grant for another ticket than it carries")
        if peer.hello is None or grant.start >= grant.num_tokens:
            raise ProtocolError(f"a grant of tokens [{grant.start}, {grant.num_tokens})")
        blocks = unpack_blocks(grant.blocks)
        block_size = peer.hello.layout.block_size
        first, stop = grant.first_block, grant.first_block + len(blocks)
        if first * block_size > grant.start or stop * block_size < grant.num_tokens:
            raise ProtocolError(
                f"blocks [{first}, {stop}) of {block_size} tokens do not hold tokens "
                f"[{grant.start}, {grant.num_tokens})"
            )
        return _Granted(peer, ticket, grant, BlockTable(first, blocks))

    def _perform(self, session: SendSession, actions: list[SendAction]) -> None:
        for action in actions:
            match action:
                case Submit():
                    self._submit(session, action)
                case SayFinished(first_token):
                    self._say_finished(session, first_token)
                case Say(message):
                    self._say(session, message)
                case Emit(event):
                    self._desk.emit(event)
                case _:
                    assert_never(action)
        if session.over:
            self._sessions.pop(session.ticket, None)
            self._grants.pop(session.ticket, None)

    def _submit(self, session: SendSession, submit: Submit) -> None:
        """Write one layer's range, in parcels; a failure ends the session."""
        granted = self._grants[session.ticket]
        route = self._desk.routes.find(granted.peer)
        if session.phase is not SendPhase.SENDING or route is None or granted.peer.hello is None:
            return  # an earlier write of the same batch failed
        packer = Packer(
            region=self._desk.region,
            source=PagedSequence(self._desk.layout, session.order.blocks),
            target=PagedSequence(granted.peer.hello.layout, granted.target),
        )
        try:
            for parcel in packer.pack(submit.layer, submit.start, submit.stop):
                write = PageWrite(
                    remote=route.remote,
                    window=session.ticket,
                    region=self._desk.region.handle,
                    copies=parcel.copies,
                    notice=parcel.notice_bytes,
                )
                self._note_write(session, route, write)
                transfer = route.transport.submit(write)
                self._writes[route.used, transfer] = session.ticket
                self._perform(
                    session, session.submitted(transfer, submit.layer, parcel.notice.stop)
                )
        except BatonError as exc:
            self._perform(session, session.fail(f"{route.used}: {exc}", stage="submit"))

    def _note_write(self, session: SendSession, route: Route, write: PageWrite) -> None:
        trace = session.order.trace
        trace.transport, trace.expected_transport = route.used, route.expected
        trace.num_bytes += write.copies.num_bytes
        trace.num_pages += write.copies.num_pages

    def _say_finished(self, session: SendSession, first_token: SampledToken) -> None:
        trace = session.order.trace
        granted = self._grants[session.ticket]
        message = Finished(
            ticket=session.ticket,
            first_token=first_token,
            transport=trace.transport or "",
            expected_transport=trace.expected_transport or "",
            stamps=trace.stamps.copy(),
        )
        self._desk.peers.say(granted.peer, message)

    def _say(self, session: SendSession, message: Failed | Grant) -> None:
        granted = self._grants.get(session.ticket)
        if granted is not None:
            self._desk.peers.say(granted.peer, message)
        elif isinstance(message, Failed):
            self._dead.bury(session.ticket, Grave(message.reason, "prefill"))

    def _session_of(self, transport: Transport, transfer: TransferId) -> SendSession | None:
        ticket = self._writes.pop((transport.kind, transfer), None)
        return self._sessions.get(ticket) if ticket is not None else None

    def _of(self, peer: Peer) -> list[SendSession]:
        return [
            self._sessions[ticket]
            for ticket, granted in self._grants.items()
            if granted.peer is peer and ticket in self._sessions
        ]


def _epoch(peer: Peer) -> str | None:
    return peer.hello.epoch if peer.hello else None
