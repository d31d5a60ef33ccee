"""Grants that came before their requests are bounded, and end with their peer or their ticket."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import WorkerRef, seal, unseal, write_unsigned
from baton.clock import Instant
from baton.errors import TicketError
from baton.handoff.grants import (
    MAX_EARLY_BLOCKS,
    MAX_EARLY_GRANTS,
    EarlyGrants,
    Granted,
    check_ticket,
    is_confirmed,
)
from baton.handoff.messages import Failed, Grant
from baton.handoff.prefill_sender import PrefillSender
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.copies import BlockTable
from baton.testing.clocks import ManualClock
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket

DECODE = WorkerRef(WorkerId("d"), Epoch("ed"), "127.0.0.1:2")
OTHER = WorkerRef(WorkerId("x"), Epoch("ex"), "127.0.0.1:3")
THIEF = WorkerRef(WorkerId("x"), DECODE.epoch, "127.0.0.1:3")
"""Under its own name, with another worker's epoch."""
NO_BLOCKS = BlockTable(0, np.empty(0, np.int64))


def granted_by(peer: object, decode: WorkerRef = DECODE, ticket_id: TicketId | None = None):
    ticket = make_ticket(decode=decode)
    if ticket_id is not None:
        ticket = msgspec.structs.replace(ticket, id=ticket_id)
    grant = Grant(ticket.id, "sealed", PROMPT_HASH, 0, 16, 0, b"", "READ")
    return Granted(peer, ticket, grant, NO_BLOCKS, Instant(60.0))


def forget(granted: Granted) -> None:
    """Nobody asks."""


def test_what_is_forgotten_is_reported_so_that_transports_expect_its_close():
    """But what a request took, and what a peer granted that is gone: its connections end."""
    forgotten: list[Granted] = []
    early, peer, gone = EarlyGrants(forgotten.append), SimpleNamespace(hello=DECODE), object()
    refused, expired, taken = (granted_by(peer) for _ in range(3))
    for granted in (refused, expired, taken, expired):
        early.add(granted)
    early.add(granted_by(gone, OTHER))
    assert early.take(taken.ticket) is taken
    early.forget_peer(gone)
    assert forgotten == []
    early.forget(refused.ticket.id, peer)
    early.forget(refused.ticket.id, peer)
    early.forget_expired(Instant(61.0))
    assert forgotten == [refused, expired]


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_grant_that_is_refused_is_known_to_the_transports(op, monkeypatch):
    """Else its close would be kept as long as the connection, which ends with too many."""
    admitted, sent, peer = [], [], SimpleNamespace(hello=DECODE)
    context = SimpleNamespace(
        transports=(), views=(), clock=ManualClock(),
        peers=SimpleNamespace(send=lambda _, message: sent.append(message)),
        peer_transports=SimpleNamespace(admit_writes=lambda *grant: admitted.append(grant[:2])),
    )  # fmt: skip
    sender = PrefillSender(context, None, None)
    granted = granted_by(peer)
    granted = msgspec.structs.replace(granted, grant=msgspec.structs.replace(granted.grant, op=op))
    monkeypatch.setattr("baton.handoff.prefill_sender.check_grant", lambda *_: granted)
    ticket = granted.ticket.id
    sender.handle_message(peer, Failed(ticket, "the client left"))
    sender.handle_message(peer, granted.grant)
    assert sent == [Failed(ticket, "the client left")]
    assert admitted == ([(peer, ticket)] if op == "WRITE" else [])


def test_the_oldest_of_too_many_are_forgotten():
    """A peer that grants and grants costs no more memory than this (sglang#39428)."""
    early, peer = EarlyGrants(forget), object()
    grants = [granted_by(peer) for _ in range(MAX_EARLY_GRANTS + 10)]
    for granted in grants:
        early.add(granted)
    assert [early.take(granted.ticket) for granted in grants[:10]] == [None] * 10
    assert all(early.take(granted.ticket) is granted for granted in grants[10:])


def test_they_end_with_their_peer_and_with_their_ticket():
    early, gone, here = EarlyGrants(forget), object(), object()
    of_gone, of_here = granted_by(gone), granted_by(here)
    early.add(of_gone)
    early.add(of_here)
    early.forget_peer(gone)
    assert early.take(of_gone.ticket) is None
    early.forget_expired(Instant(61.0))
    assert early.take(of_here.ticket) is None


def test_a_peer_that_grants_much_takes_no_place_of_another():
    early, honest, greedy = EarlyGrants(forget), object(), object()
    first = granted_by(honest)
    early.add(first)
    for _ in range(MAX_EARLY_GRANTS + 10):
        early.add(granted_by(greedy, OTHER))
    assert len(early) == MAX_EARLY_GRANTS
    assert early.take(first.ticket) is first


def test_few_grants_of_many_pages_are_bounded_too():
    early, honest, greedy = EarlyGrants(forget), object(), object()
    first, blocks = granted_by(honest), BlockTable(0, np.empty(MAX_EARLY_BLOCKS // 4, np.int64))
    early.add(first)
    large = [msgspec.structs.replace(granted_by(greedy, OTHER), target=blocks) for _ in range(10)]
    for granted in large:
        early.add(granted)
        early.add(granted)  # once more, which counts once
    assert len(early) == 1 + 4
    assert early.take(first.ticket) is first
    assert [early.take(granted.ticket) for granted in large[-4:]] == large[-4:]
    for granted in large[:4]:
        early.add(granted)
    assert len(early) == 4


@pytest.mark.parametrize("other", [OTHER, THIEF])
def test_a_peer_replaces_no_grant_of_another_by_its_id(other: WorkerRef):
    early = EarlyGrants(forget)
    honest = granted_by(object())
    early.add(honest)
    early.add(granted_by(object(), other, honest.ticket.id))
    early.forget(honest.ticket.id, SimpleNamespace(hello=other))  # type: ignore[arg-type]
    assert early.take(honest.ticket) is honest


class Asked:
    """What `check_ticket` uses of an agent and of its peer."""

    me = WorkerRef(WorkerId("p"), Epoch("ep"), "127.0.0.1:1")
    credentials = Credentials.of(ClusterKey(b"k" * 32))
    name, hello = "d", DECODE


def check(text: str, known=None):
    return check_ticket(Asked(), Asked(), text, known)  # type: ignore[arg-type]


def test_a_ticket_without_a_signature_counts_as_the_text_that_the_gateway_gave():
    ticket = make_ticket()
    text = write_unsigned(ticket)
    known = unseal(text, Asked.credentials, is_from_gateway=True)
    assert check(text, known) is known
    made_up = write_unsigned(msgspec.structs.replace(ticket, request_id="another"))
    with pytest.raises(TicketError, match="another ticket than the gateway"):
        check(made_up, known)


def test_a_ticket_is_of_a_name_and_an_epoch(monkeypatch: pytest.MonkeyPatch):
    sealed = seal(make_ticket(), Asked.credentials)
    assert check(sealed).decode == DECODE
    monkeypatch.setattr(Asked, "hello", THIEF)
    with pytest.raises(TicketError, match="used a ticket of d"):
        check(sealed)


def test_a_grant_under_a_ticket_that_a_peer_made_up_is_not_confirmed_by_its_request():
    ticket = make_ticket()
    text = write_unsigned(ticket)
    given = unseal(text, Asked.credentials, is_from_gateway=True)
    made_up = write_unsigned(msgspec.structs.replace(ticket, request_id="another"))
    for shown, is_good in ((text, True), (made_up, False), (seal(ticket, Asked.credentials), True)):
        grant = Grant(ticket.id, shown, PROMPT_HASH, 0, 16, 0, b"", "READ")
        granted = Granted(object(), check(shown), grant, NO_BLOCKS, Instant(60.0))  # type: ignore[arg-type]
        assert is_confirmed(granted, given) is is_good
