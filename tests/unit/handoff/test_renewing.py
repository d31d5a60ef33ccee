"""Who may hear, by renewing a ticket, that it is dead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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


def renew(desk: Told, by: Epoch, message: Renew, dead: Graves) -> None:
    peer = SimpleNamespace(hello=SimpleNamespace(epoch=by))
    answer_renewal(desk, peer, message, outgoing={}, dead=dead)  # type: ignore[arg-type]


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
