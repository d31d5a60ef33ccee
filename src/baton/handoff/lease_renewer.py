"""Leases are renewed by decode, all of one prefill worker's at once, and answered there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.handoff.grants import epoch_of
from baton.handoff.messages import MAX_BATCH, Failed, LeaseRenewed, RenewLease

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from baton.auth.ticket import Ticket, WorkerRef
    from baton.handoff.context import AgentContext
    from baton.handoff.grants import EarlyGrants
    from baton.handoff.outgoing import OutgoingHandoff
    from baton.handoff.peers import Peer
    from baton.handoff.tombstones import Tombstones
    from baton.ids import Epoch, TicketId, WorkerId

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
        self._next_at: dict[tuple[WorkerId, Epoch], Instant] = {}

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
            self._next_at.pop((peer.hello.worker, peer.hello.epoch), None)

    def is_queued_from(self, ticket: TicketId, peer: Peer) -> bool:
        """Whether a ticket waits here for what this peer holds."""
        queued = self._queued.get(ticket)
        return queued is not None and queued.prefill.epoch == epoch_of(peer)

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
            self._next_at[ref.worker, ref.epoch] = Instant(now + DIAL_AGAIN_S)
            return
        self._next_at[ref.worker, ref.epoch] = Instant(
            now + peer.hello.lease_s / RENEWALS_PER_LEASE
        )
        for first in range(0, len(tickets), MAX_BATCH):
            some = tuple(tickets[first : first + MAX_BATCH])
            self._context.peers.send(peer, RenewLease(now, some))


def answer_renewal(
    context: AgentContext,
    peer: Peer,
    message: RenewLease,
    *,
    outgoing: Mapping[TicketId, OutgoingHandoff],
    dead: Tombstones,
    early: EarlyGrants,
) -> None:
    """Prefill's side: extend the leases that are held here, and report those that are gone.

    A ticket that is neither may be one whose prompt has not come yet: if it was granted, its
    lease has yet to begin, so a renewal counts for that one, too.
    """
    now = context.clock.now()
    held: list[TicketId] = []
    for ticket in message.tickets:
        known = outgoing.get(ticket)
        if known is not None:
            is_its_own = known.session.order.ticket.decode.epoch == epoch_of(peer)
            if is_its_own and known.session.renew(now):
                held.append(ticket)
            continue
        if early.is_of(ticket, peer):
            held.append(ticket)
            continue
        tombstone = dead.take(ticket, epoch_of(peer))
        if tombstone is not None:
            context.peers.send(peer, Failed(ticket, tombstone.reason))
    context.peers.send(peer, LeaseRenewed(message.at, tuple(held)))


def _by_prefill(
    tickets: Iterable[Ticket],
) -> dict[tuple[WorkerId, Epoch], tuple[WorkerRef, list[TicketId]]]:
    groups: dict[tuple[WorkerId, Epoch], tuple[WorkerRef, list[TicketId]]] = {}
    for ticket in tickets:
        ref = ticket.prefill
        groups.setdefault((ref.worker, ref.epoch), (ref, []))[1].append(ticket.id)
    return groups
