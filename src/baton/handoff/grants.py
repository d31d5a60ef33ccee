"""Grants and leases between agents: checked as they come in, renewed, remembered once ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.auth.ticket import Ticket, WorkerRef, is_signed, text_of, unseal
from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.errors import ProtocolError, TicketError
from baton.handoff.messages import (
    MAX_BATCH,
    FallbackToWrite,
    Grant,
    Hello,
    RenewLease,
    unpack_blocks,
)
from baton.kv.copies import BlockTable
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from baton.handoff.kv_views import AgentContext
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, TicketId, WorkerId

Incarnation: TypeAlias = "tuple[WorkerId, Epoch]"
"""Compared as a whole: a certificate proves the name of a peer, and nothing proves its epoch."""

MAX_EARLY_GRANTS: Final = 4096
MAX_EARLY_BLOCKS: Final = 1 << 23
"""That they name, of all together: 128 MiB, packed and unpacked."""


class Granted(Record, frozen=True):
    """A grant, checked, and who gave it. `target` are the pages to write into, if it names any.

    `forget_at`: when its request has ended, wherever it was sent.
    """

    peer: Peer
    ticket: Ticket
    grant: Grant
    target: BlockTable
    forget_at: Instant


def check_ticket(
    context: AgentContext, peer: Peer, sealed: str, known: Ticket | None = None
) -> Ticket:
    """The ticket, if it is one for this prefill worker and that decode worker.

    `known` came with the request, and was checked: where the text is the same, that is the ticket.
    Until then one without a signature is only what this peer calls a ticket: see `is_confirmed`.

    Raises:
        TicketError: forged, another than the gateway's, or for somebody else.
    """
    if known is not None and text_of(known) == sealed:
        ticket = known
    elif is_signed(sealed):
        ticket = unseal(sealed, context.credentials)
    elif known is None:
        ticket = unseal(sealed, context.credentials, is_from_gateway=True)
    else:
        raise TicketError(f"{peer.name} shows another ticket than the gateway has given")
    if (ticket.prefill.worker, ticket.prefill.epoch) != (context.me.worker, context.me.epoch):
        raise TicketError(f"a ticket for another prefill worker, {ticket.prefill.worker}")
    decode, hello = ticket.decode, peer.hello
    if hello is None or (decode.worker, decode.epoch) != (hello.worker, hello.epoch):
        raise TicketError(f"{peer.name} used a ticket of {ticket.decode.worker}")
    return ticket


def check_grant(
    context: AgentContext, peer: Peer, grant: Grant, known: Ticket | None = None
) -> Granted:
    """The grant, if the peer may give it; `known` as in `check_ticket`.

    Raises:
        TicketError: its ticket is not for the two.
        ProtocolError: it grants nothing, or pages that do not hold its tokens; or it asks for an
            encoding that the two do not have in common.
    """
    ticket = check_ticket(context, peer, grant.ticket, known)
    if ticket.id != grant.id:
        raise TicketError("a grant for another ticket than it carries")
    if peer.dialed is not None:
        raise ProtocolError("a grant over a link on which KV goes the other way")
    if grant.start >= grant.num_tokens:
        raise ProtocolError(f"a grant of tokens [{grant.start}, {grant.num_tokens})")
    target = BlockTable(grant.first_block, unpack_blocks(grant.blocks))
    theirs = peer.views_for(grant.encoding).theirs
    if grant.op == "NONE" and grant.encoding != RAW:
        raise ProtocolError("blocks cannot be exported in an encoding")
    if grant.op == "WRITE":
        _check_holds(target, theirs.layout.block_size, grant)
    elif len(target.blocks):
        raise ProtocolError("a grant of pages by a worker that reads by itself")
    forget_at = Instant(context.clock.now() + ticket.issue.lifetime_s)
    return Granted(peer, ticket, grant, target, forget_at)


def is_confirmed(granted: Granted, ticket: Ticket) -> bool:
    """Whether an early grant is under the ticket with which its request has come now."""
    shown = granted.grant.ticket
    return is_signed(shown) or shown == text_of(ticket)


def check_fallback(granted: Granted, message: FallbackToWrite) -> Granted:
    """The grant, as its peer has changed it: pages to write into.

    Raises:
        ProtocolError: the pages do not hold its tokens.
    """
    target = BlockTable(message.first_block, unpack_blocks(message.blocks))
    theirs = granted.peer.views_for(granted.grant.encoding).theirs
    _check_holds(target, theirs.layout.block_size, granted.grant)
    return msgspec.structs.replace(granted, target=target)


def incarnation_of(worker: WorkerRef | Hello) -> Incarnation:
    """The worker and its epoch, as a key."""
    return worker.worker, worker.epoch


def incarnation_of_peer(peer: Peer) -> Incarnation | None:
    """That of a peer, once it sent its Hello."""
    return incarnation_of(peer.hello) if peer.hello else None


class EarlyGrants:
    """Grants for requests that have not come yet, each by its ticket and the peer's incarnation.

    Where there are too many, the peer with the most loses its oldest: what one peer sends does not
    take the places of others. `on_forgotten` is called with each for which no request will come,
    unless its peer has left.
    """

    def __init__(self, on_forgotten: Callable[[Granted], None]) -> None:
        self._on_forgotten = on_forgotten
        self._grants: dict[Incarnation, OrderedDict[TicketId, Granted]] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return sum(map(len, self._grants.values()))

    def add(self, granted: Granted) -> None:
        """Keep a grant until its request comes, its ticket expires or its peer leaves."""
        decode, ticket = granted.ticket.decode, granted.ticket.id
        incarnation = decode.worker, decode.epoch
        if ticket in self._grants.get(incarnation, ()):
            self._drop(incarnation, ticket)
        self._grants.setdefault(incarnation, OrderedDict())[ticket] = granted
        self._num_blocks += len(granted.target.blocks)
        while len(self) > MAX_EARLY_GRANTS:
            self._drop_oldest_of_most(len)
        while self._num_blocks > MAX_EARLY_BLOCKS:
            self._drop_oldest_of_most(_count_blocks)

    def find(self, ticket: TicketId, decode: WorkerRef | Hello) -> Granted | None:
        """The grant of this decode worker, whose request has not come."""
        of_peer = self._grants.get(incarnation_of(decode))
        return None if of_peer is None else of_peer.get(ticket)

    def take(self, ticket: Ticket) -> Granted | None:
        """The grant for a request that came: its decode worker's."""
        return self._drop((ticket.decode.worker, ticket.decode.epoch), ticket.id)

    def forget(self, ticket: TicketId, peer: Peer) -> None:
        """Drop the grant of a ticket, if it is this peer's."""
        incarnation = incarnation_of_peer(peer)
        if incarnation is not None:
            self._forget(incarnation, ticket)

    def forget_peer(self, peer: Peer) -> None:
        """Drop what a peer granted that is gone."""
        for incarnation, ticket in self._find_where(lambda granted: granted.peer is peer):
            self._drop(incarnation, ticket)

    def forget_expired(self, now: Instant) -> None:
        """Drop grants for requests that never came."""
        for incarnation, ticket in self._find_where(lambda granted: now > granted.forget_at):
            self._forget(incarnation, ticket)

    def _drop_oldest_of_most(self, count: Callable[[Mapping[TicketId, Granted]], int]) -> None:
        incarnation, of_peer = max(self._grants.items(), key=lambda item: count(item[1]))
        self._forget(incarnation, next(iter(of_peer)))

    def _forget(self, incarnation: Incarnation, ticket: TicketId) -> None:
        granted = self._drop(incarnation, ticket)
        if granted is not None:
            self._on_forgotten(granted)

    def _drop(self, incarnation: Incarnation, ticket: TicketId) -> Granted | None:
        of_peer = self._grants.get(incarnation)
        if of_peer is None:
            return None
        granted = of_peer.pop(ticket, None)
        if granted is not None:
            self._num_blocks -= len(granted.target.blocks)
        if not of_peer:
            del self._grants[incarnation]
        return granted

    def _find_where(self, is_over: Callable[[Granted], bool]) -> list[tuple[Incarnation, TicketId]]:
        return [
            (incarnation, ticket)
            for incarnation, of_peer in self._grants.items()
            for ticket, granted in of_peer.items()
            if is_over(granted)
        ]


def _count_blocks(grants: Mapping[TicketId, Granted]) -> int:
    return sum(len(granted.target.blocks) for granted in grants.values())


def _check_holds(target: BlockTable, block_size: int, grant: Grant) -> None:
    first, stop = target.first, target.first + len(target.blocks)
    if first * block_size > grant.start or stop * block_size < grant.num_tokens:
        raise ProtocolError(
            f"blocks [{first}, {stop}) of {block_size} tokens do not hold tokens "
            f"[{grant.start}, {grant.num_tokens})"
        )


RENEWALS_PER_LEASE: Final = 3
"""Two of them may be lost, or late, without harm."""

DIAL_AGAIN_S: Final = 1.0
"""To a peer whose link is not up: it may be gone."""

MAX_QUEUED: Final = 65_536
"""Of requests that wait in the engine; it bounds its queue itself, far below."""


class LeaseRenewer:
    """Decode's side: which tickets are queued in the engine, and when their leases are renewed.

    Owner: the agent's thread.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._queued: dict[TicketId, Ticket] = {}
        self._next_at: dict[Incarnation, Instant] = {}

    def add(self, ticket: Ticket) -> None:
        """See `HandoffPort.renew_lease`. Dials the peer now, so that the grant need not wait."""
        if len(self._queued) < MAX_QUEUED:
            self._queued[ticket.id] = ticket
            self._context.peers.dial(ticket.prefill)

    def drop(self, ticket: TicketId) -> None:
        """It is queued no more."""
        self._queued.pop(ticket, None)

    def peer_connected(self, peer: Peer) -> None:
        """A link is up: what waits for its peer is renewed at the next tick."""
        if peer.hello is not None:
            self._next_at.pop(incarnation_of(peer.hello), None)

    def is_queued_from(self, ticket: TicketId, peer: Peer) -> bool:
        """Whether a ticket waits here for what this peer holds."""
        queued = self._queued.get(ticket)
        return queued is not None and incarnation_of(queued.prefill) == incarnation_of_peer(peer)

    def tick(self, reading: Iterable[Ticket]) -> None:
        """Renew what is queued, and what is being read or written, where it is time to."""
        now, groups = self._context.clock.now(), _by_prefill((*self._queued.values(), *reading))
        for holder in self._next_at.keys() - groups.keys():
            del self._next_at[holder]
        for holder, (ref, tickets) in groups.items():
            if now >= self._next_at.get(holder, now):
                self._renew(ref, tickets, now)

    def _renew(self, ref: WorkerRef, tickets: list[TicketId], now: Instant) -> None:
        peer = self._context.peers.dial(ref)
        if peer is None or peer.hello is None:
            self._next_at[incarnation_of(ref)] = Instant(now + DIAL_AGAIN_S)
            return
        self._next_at[incarnation_of(ref)] = Instant(now + peer.hello.lease_s / RENEWALS_PER_LEASE)
        for first in range(0, len(tickets), MAX_BATCH):
            some = tuple(tickets[first : first + MAX_BATCH])
            self._context.peers.send(peer, RenewLease(now, some))


def _by_prefill(
    tickets: Iterable[Ticket],
) -> dict[Incarnation, tuple[WorkerRef, list[TicketId]]]:
    groups: dict[Incarnation, tuple[WorkerRef, list[TicketId]]] = {}
    for ticket in tickets:
        ref = ticket.prefill
        groups.setdefault(incarnation_of(ref), (ref, []))[1].append(ticket.id)
    return groups


MAX_TOMBSTONES: Final = 4096


class Tombstone(Record, frozen=True):
    """Why a ticket is dead, and at which stage it died."""

    reason: str
    stage: str


class Tombstones:
    """Tickets that are dead. The oldest are forgotten first: a deadline still ends those.

    `by` is the peer that ended it, or that must be notified; None where unknown: a message of a
    peer that the ticket does not name changes nothing.
    """

    def __init__(self) -> None:
        self._tombstones: OrderedDict[tuple[TicketId, Incarnation | None], Tombstone] = (
            OrderedDict()
        )

    def add(
        self, ticket: TicketId, tombstone: Tombstone, by: WorkerRef | Hello | None = None
    ) -> None:
        """Remember that a ticket is dead."""
        self._tombstones[ticket, None if by is None else (by.worker, by.epoch)] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def take(self, ticket: TicketId, peer: WorkerRef | Hello | None = None) -> Tombstone | None:
        """The tombstone, if this ticket, whose other half is `peer`, ended; it is removed then."""
        by = None if peer is None else (peer.worker, peer.epoch)
        own, peers = (
            self._tombstones.pop((ticket, None), None),
            self._tombstones.pop((ticket, by), None),
        )
        return own or peers
