"""What is answered to a renewal of a ticket that prefill does not hold (yet, or any more)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.handoff.grants import EarlyGrants, Tombstone, Tombstones
from baton.handoff.messages import Failed, LeaseRenewed, RenewLease
from baton.handoff.prefill_sender import answer_renewal
from baton.ids import Epoch, new_ticket_id

DECODE, STRANGER = Epoch("d" * 32), Epoch("e" * 32)


class Told:
    """Stands where a context does: a clock that stands still, and what is said to peers."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.clock = SimpleNamespace(now=lambda: 0.0)
        self.peers = self

    def send(self, peer: object, message: object) -> None:
        self.said.append(message)


def peer_of(epoch: Epoch) -> SimpleNamespace:
    return SimpleNamespace(hello=SimpleNamespace(epoch=epoch))


def renew(
    context: Told,
    by: Epoch,
    message: RenewLease,
    dead: Tombstones,
    early: EarlyGrants | None = None,
) -> None:
    peer, early = peer_of(by), EarlyGrants() if early is None else early
    answer_renewal(context, peer, message, outgoing={}, dead=dead, early=early)  # type: ignore[arg-type]


@pytest.mark.parametrize("strangers", [0, 3])
def test_only_the_life_that_a_ticket_names_takes_its_grave(strangers: int) -> None:
    context, dead, ticket = Told(), Tombstones(), new_ticket_id()
    dead.add(ticket, Tombstone("the lease ran out", "prefill"), by=DECODE)
    message = RenewLease(1.0, (ticket,))
    for _ in range(strangers):
        renew(context, STRANGER, message, dead)
    assert context.said == [LeaseRenewed(1.0, ())] * strangers
    renew(context, DECODE, message, dead)
    assert context.said[strangers:] == [Failed(ticket, "the lease ran out"), LeaseRenewed(1.0, ())]


@pytest.mark.parametrize(("by", "is_held"), [(DECODE, True), (STRANGER, False)])
def test_what_was_granted_before_its_prompt_came_counts_as_held(by: Epoch, is_held: bool) -> None:
    """Its lease begins later: else a read of what waited long in prefill's queue is thrown away."""
    context, early, ticket = Told(), EarlyGrants(), new_ticket_id()
    named = SimpleNamespace(id=ticket, decode=SimpleNamespace(epoch=DECODE))
    target = SimpleNamespace(blocks=())
    granted = SimpleNamespace(ticket=named, peer=peer_of(DECODE), target=target)
    early.add(granted)  # type: ignore[arg-type]
    renew(context, by, RenewLease(1.0, (ticket,)), Tombstones(), early)
    assert context.said == [LeaseRenewed(1.0, (ticket,) if is_held else ())]
