"""Grants that came before their requests are bounded, and end with their peer or their ticket."""

import numpy as np

from baton.clock import Instant
from baton.handoff.grants import MAX_EARLY_GRANTS, EarlyGrants, Granted
from baton.handoff.messages import Grant
from baton.kv.copies import BlockTable
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket

NO_BLOCKS = BlockTable(0, np.empty(0, np.int64))


def granted_by(peer):
    ticket = make_ticket()
    grant = Grant(ticket.id, "sealed", PROMPT_HASH, 0, 16, 0, b"", "READ")
    return Granted(peer, ticket, grant, NO_BLOCKS, Instant(60.0))


def test_the_oldest_of_too_many_are_forgotten():
    """A peer that grants and grants costs no more memory than this (sglang#39428)."""
    early, peer = EarlyGrants(), object()
    grants = [granted_by(peer) for _ in range(MAX_EARLY_GRANTS + 10)]
    for granted in grants:
        early.add(granted)
    assert [early.take(granted.ticket.id) for granted in grants[:10]] == [None] * 10
    assert all(early.take(granted.ticket.id) is granted for granted in grants[10:])


def test_they_end_with_their_peer_and_with_their_ticket():
    early, gone, here = EarlyGrants(), object(), object()
    of_gone, of_here = granted_by(gone), granted_by(here)
    early.add(of_gone)
    early.add(of_here)
    early.forget_peer(gone)
    assert early.take(of_gone.ticket.id) is None
    early.forget_expired(Instant(61.0))
    assert early.take(of_here.ticket.id) is None
