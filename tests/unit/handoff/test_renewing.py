"""What is answered to a renewal of a ticket that prefill does not hold (yet, or any more)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.handoff.grants import EarlyGrants
from baton.handoff.graves import Grave, Graves
from baton.handoff.messages import Failed, Renew, Renewed
from baton.handoff.renewing import answer_renewal
from baton.ids import Epoch, new_ticket_id

DECODE, STRANGER = Epoch("d" * 32), Epoch("e" * 32)


class Told:
    """Stands where a desk does: a clock that stands still, and what is said to peers."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.clock = SimpleNamespace(now=lambda: 0.0)
        self.peers = self

    def say(self, peer: object, message: object) -> None:
        self.said.append(message)


def peer_of(epoch: Epoch) -> SimpleNamespace:
    return SimpleNamespace(hello=SimpleNamespace(epoch=epoch))


def renew(
    desk: Told, by: Epoch, message: Renew, dead: Graves, early: EarlyGrants | None = None
) -> None:
    peer, early = peer_of(by), early or EarlyGrants()
    answer_renewal(desk, peer, message, outgoing={}, dead=dead, early=early)  # type: ignore[arg-type]


@pytest.mark.parametrize("strangers", [0, 3])
def test_only_the_life_that_a_ticket_names_takes_its_grave(strangers: int) -> None:
    desk, dead, ticket = Told(), Graves(), new_ticket_id()
    dead.bury(ticket, Grave("the lease ran out", "prefill"), by=DECODE)
    message = Renew(1.0, (ticket,))
    for _ in range(strangers):
        renew(desk, STRANGER, message, dead)
    assert desk.said == [Renewed(1.0, ())] * strangers
    renew(desk, DECODE, message, dead)
    assert desk.said[strangers:] == [Failed(ticket, "the lease ran out"), Renewed(1.0, ())]


@pytest.mark.parametrize(("by", "is_held"), [(DECODE, True), (STRANGER, False)])
def test_what_was_granted_before_its_prompt_came_counts_as_held(by: Epoch, is_held: bool) -> None:
    """Its lease begins later: else a read of what waited long in prefill's queue is thrown away."""
    desk, early, ticket = Told(), EarlyGrants(), new_ticket_id()
    granted = SimpleNamespace(ticket=SimpleNamespace(id=ticket), peer=peer_of(DECODE))
    early.keep(granted)  # type: ignore[arg-type]
    renew(desk, by, Renew(1.0, (ticket,)), Graves(), early)
    assert desk.said == [Renewed(1.0, (ticket,) if is_held else ())]
