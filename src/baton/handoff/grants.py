"""Grants as they come in on the prefill worker: checked, and kept until their request is here."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from baton.auth.ticket import Ticket, unseal
from baton.errors import ProtocolError, TicketError
from baton.handoff.messages import FallbackToWrite, Grant, unpack_blocks
from baton.kv.copies import BlockTable

if TYPE_CHECKING:
    from baton.handoff.context import AgentContext
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, TicketId

MAX_EARLY_GRANTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant, checked, and who gave it. `target` are the pages to write into, if it names any."""

    peer: Peer
    ticket: Ticket
    grant: Grant
    target: BlockTable


def check_ticket(context: AgentContext, peer: Peer, sealed: str) -> Ticket:
    """The ticket, if it is one for this prefill worker and that decode worker.

    Raises:
        TicketError: forged, expired, or for somebody else.
    """
    ticket = unseal(sealed, context.key, context.clock.unix_now())
    if (ticket.prefill.worker, ticket.prefill.epoch) != (context.me.worker, context.me.epoch):
        raise TicketError(f"a ticket for another prefill worker, {ticket.prefill.worker}")
    if ticket.decode.epoch != epoch_of(peer):
        raise TicketError(f"{peer.name} used a ticket of {ticket.decode.worker}")
    return ticket


def check_grant(context: AgentContext, peer: Peer, grant: Grant) -> Granted:
    """The grant, if the peer may give it.

    Raises:
        TicketError: its ticket is not for the two.
        ProtocolError: it grants nothing, or pages that do not hold its tokens.
    """
    ticket = check_ticket(context, peer, grant.ticket)
    if ticket.id != grant.id:
        raise TicketError("a grant for another ticket than it carries")
    if peer.dialed is not None:
        raise ProtocolError("a grant over a link on which KV goes the other way")
    if grant.start >= grant.num_tokens:
        raise ProtocolError(f"a grant of tokens [{grant.start}, {grant.num_tokens})")
    target = BlockTable(grant.first_block, unpack_blocks(grant.blocks))
    if grant.op == "WRITE":
        _check_holds(target, peer.negotiated.theirs.layout.block_size, grant)
    elif len(target.blocks):
        raise ProtocolError("a grant of pages by a worker that reads by itself")
    return Granted(peer, ticket, grant, target)


def check_fallback(granted: Granted, message: FallbackToWrite) -> Granted:
    """The grant, as its peer has changed it: pages to write into.

    Raises:
        ProtocolError: the pages do not hold its tokens.
    """
    target = BlockTable(message.first_block, unpack_blocks(message.blocks))
    _check_holds(target, granted.peer.negotiated.theirs.layout.block_size, granted.grant)
    return replace(granted, target=target)


def epoch_of(peer: Peer) -> Epoch | None:
    """The epoch of a peer, once it sent its Hello."""
    return peer.hello.epoch if peer.hello else None


class EarlyGrants:
    """Grants for requests that have not come yet. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._grants: OrderedDict[TicketId, Granted] = OrderedDict()

    def add(self, granted: Granted) -> None:
        """Keep a grant until its request comes, its ticket expires or its peer leaves."""
        self._grants[granted.ticket.id] = granted
        while len(self._grants) > MAX_EARLY_GRANTS:
            self._grants.popitem(last=False)

    def take(self, ticket: TicketId) -> Granted | None:
        """The grant for a request that came, or is known never to come."""
        return self._grants.pop(ticket, None)

    def is_of(self, ticket: TicketId, peer: Peer) -> bool:
        """Whether this peer's grant waits for its request."""
        granted = self._grants.get(ticket)
        return granted is not None and epoch_of(granted.peer) == epoch_of(peer)

    def forget(self, ticket: TicketId, peer: Peer) -> None:
        """Drop the grant of a ticket, if it is this peer's."""
        if self.is_of(ticket, peer):
            del self._grants[ticket]

    def forget_peer(self, peer: Peer) -> None:
        """Drop what a peer granted that is gone."""
        for ticket, granted in tuple(self._grants.items()):
            if granted.peer is peer:
                del self._grants[ticket]

    def forget_expired(self, unix_now: float) -> None:
        """Drop grants for requests that never came."""
        for ticket, granted in tuple(self._grants.items()):
            if unix_now > granted.ticket.expires_at:
                del self._grants[ticket]


def _check_holds(target: BlockTable, block_size: int, grant: Grant) -> None:
    first, stop = target.first, target.first + len(target.blocks)
    if first * block_size > grant.start or stop * block_size < grant.num_tokens:
        raise ProtocolError(
            f"blocks [{first}, {stop}) of {block_size} tokens do not hold tokens "
            f"[{grant.start}, {grant.num_tokens})"
        )
