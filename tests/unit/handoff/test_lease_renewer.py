"""What is answered to a renewal of a ticket that prefill does not hold (yet, or any more)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.auth.ticket import WorkerRef
from baton.clock import Instant
from baton.handoff.grants import EarlyGrants, LeaseRenewer, Tombstone, Tombstones
from baton.handoff.messages import Failed, LeaseRenewed, RenewLease
from baton.handoff.prefill_sender import answer_renewal
from baton.handoff.session.send import SendSession
from baton.handoff.write_batches import OutgoingHandoff
from baton.ids import Epoch, TicketId, WorkerId, new_ticket_id
from tests.unit.handoff.orders import make_ticket, send_order

DECODE = WorkerRef(WorkerId("d"), Epoch("d" * 32), "127.0.0.1:2")
STRANGER = WorkerRef(WorkerId("x"), Epoch("e" * 32), "127.0.0.1:3")
THIEF = WorkerRef(STRANGER.worker, DECODE.epoch, STRANGER.address)
"""Under its own name, with another worker's epoch."""


class Told:
    """Stands where a context does: a clock that stands still, and what is said to peers."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.clock = SimpleNamespace(now=lambda: 0.0)
        self.peers = self

    def send(self, peer: object, message: object) -> None:
        self.said.append(message)

    def dial(self, ref: WorkerRef) -> None:
        """No link comes up."""


def peer_of(worker: WorkerRef) -> SimpleNamespace:
    return SimpleNamespace(hello=worker)


def renew(
    context: Told,
    by: WorkerRef,
    message: RenewLease,
    dead: Tombstones,
    early: EarlyGrants | None = None,
    outgoing: dict[TicketId, OutgoingHandoff] | None = None,
) -> None:
    peer, early = peer_of(by), EarlyGrants(lambda _: None) if early is None else early
    answer_renewal(context, peer, message, outgoing=outgoing or {}, dead=dead, early=early)  # type: ignore[arg-type]


@pytest.mark.parametrize("strangers", [[], [STRANGER] * 3, [THIEF]])
def test_only_the_life_that_a_ticket_names_takes_its_grave(strangers: list[WorkerRef]) -> None:
    context, dead, ticket = Told(), Tombstones(), new_ticket_id()
    dead.add(ticket, Tombstone("the lease ran out", "prefill"), by=DECODE)
    message = RenewLease(1.0, (ticket,))
    for stranger in strangers:
        renew(context, stranger, message, dead)
    assert context.said == [LeaseRenewed(1.0, ())] * len(strangers)
    renew(context, DECODE, message, dead)
    assert context.said[len(strangers) :] == [
        Failed(ticket, "the lease ran out"),
        LeaseRenewed(1.0, ()),
    ]


@pytest.mark.parametrize(("by", "is_held"), [(DECODE, True), (STRANGER, False), (THIEF, False)])
def test_what_was_granted_before_its_prompt_came_counts_as_held(
    by: WorkerRef, is_held: bool
) -> None:
    """Its lease begins later: else a read of what waited long in prefill's queue is thrown away."""
    context, early, ticket = Told(), EarlyGrants(lambda _: None), new_ticket_id()
    named = SimpleNamespace(id=ticket, decode=DECODE)
    target = SimpleNamespace(blocks=())
    granted = SimpleNamespace(ticket=named, peer=peer_of(DECODE), target=target)
    early.add(granted)  # type: ignore[arg-type]
    renew(context, by, RenewLease(1.0, (ticket,)), Tombstones(), early)
    assert context.said == [LeaseRenewed(1.0, (ticket,) if is_held else ())]


@pytest.mark.parametrize(("by", "is_held"), [(DECODE, True), (THIEF, False)])
def test_only_the_worker_that_a_ticket_names_renews_its_lease(by: WorkerRef, is_held: bool) -> None:
    context, ticket = Told(), make_ticket(decode=DECODE)
    order = send_order(ticket, num_tokens=16)
    session = SendSession(order, num_layers=1, deadline=Instant(60.0), lease_s=10.0)
    outgoing = {ticket.id: OutgoingHandoff(session, Instant(0.0))}
    renew(context, by, RenewLease(1.0, (ticket.id,)), Tombstones(), outgoing=outgoing)
    assert context.said == [LeaseRenewed(1.0, (ticket.id,) if is_held else ())]


def test_a_queued_ticket_fails_by_the_word_of_its_prefill_worker_alone() -> None:
    renewer, ticket = LeaseRenewer(Told()), make_ticket()  # type: ignore[arg-type]
    renewer.add(ticket)
    thief = WorkerRef(WorkerId("x"), ticket.prefill.epoch, "127.0.0.1:3")
    for worker, is_from_it in ((ticket.prefill, True), (thief, False)):
        assert renewer.is_queued_from(ticket.id, peer_of(worker)) is is_from_it  # type: ignore[arg-type]
