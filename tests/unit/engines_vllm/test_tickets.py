from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.engines.vllm.identity import Identity
from baton.engines.vllm.tickets import NO_HANDOFF, Probe, Receive, Refusal, Send, TicketReader
from baton.ids import Epoch, WorkerId, new_ticket_id
from tests.tickets import issue

if TYPE_CHECKING:
    from baton.protocol.worker_http import Role

KEY = Credentials.of(ClusterKey(b"k" * 32))
ME = WorkerRef(WorkerId("v0"), Epoch("0" * 32), "127.0.0.1:1")
PEER = WorkerRef(WorkerId("v1"), Epoch("a" * 32), "127.0.0.1:2")
OLD_ME = WorkerRef(WorkerId("v0"), Epoch("1" * 32), "127.0.0.1:1")


def reader(role: Role = "both", *, clients_are_gateways: bool = False) -> TicketReader:
    identity = Identity(ME.worker, ME.epoch, role, 1)
    return TicketReader(identity, KEY, clients_are_gateways=clients_are_gateways)


def ticket(prefill: WorkerRef, decode: WorkerRef, lives_s: float = 60.0) -> Ticket:
    return Ticket(new_ticket_id(), "req-1", prefill, decode, "push", issue(lives_s))


def sending(text: str) -> dict[str, object]:
    return {"baton_ticket": text, "do_remote_decode": True}


def receiving(text: str) -> dict[str, object]:
    return {"baton_ticket": text, "do_remote_prefill": True}


def code_of(part: object) -> str:
    assert isinstance(part, Refusal)
    assert part.reason
    return part.code


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"remote_block_ids": [[1]], "other": 1}]
)
def test_what_carries_no_ticket_is_not_ours(params: dict[str, object] | None) -> None:
    assert reader().read(params) is NO_HANDOFF


def test_a_ticket_and_the_leg_it_comes_with_say_which_part() -> None:
    ours, theirs = ticket(ME, PEER), ticket(PEER, ME)
    assert reader().read(sending(seal(ours, KEY))) == Send(ours)
    assert reader().read(receiving(seal(theirs, KEY))) == Receive(theirs)
    assert reader().read({"baton_info": True}) == Probe()


@pytest.mark.parametrize(("prefill", "decode"), [(PEER, PEER), (OLD_ME, PEER), (PEER, ME)])
def test_a_ticket_to_send_for_others_or_an_earlier_life_is_stale(
    prefill: WorkerRef, decode: WorkerRef
) -> None:
    text = seal(ticket(prefill, decode), KEY)
    assert code_of(reader().read(sending(text))) == "stale_ticket"


def test_forged_and_broken_tickets_are_invalid() -> None:
    good = ticket(ME, PEER)
    for text in (
        seal(good, Credentials.of(ClusterKey(b"x" * 32))),
        "",
        "not a ticket",
        "x" * 5000,
    ):
        assert code_of(reader().read(sending(text))) == "invalid_ticket"
    assert code_of(reader().read({"baton_ticket": 7})) == "invalid_ticket"
    assert code_of(reader().read({"baton_ticket": seal(good, KEY)})) == "invalid_ticket"
    both = {**sending(seal(good, KEY)), "do_remote_prefill": True}
    assert code_of(reader().read(both)) == "invalid_ticket"


def test_where_all_clients_are_gateways_the_signature_alone_is_not_checked() -> None:
    another = Credentials.of(ClusterKey(b"x" * 32))
    same = reader(clients_are_gateways=True)
    unsigned, stale = ticket(ME, PEER), ticket(OLD_ME, PEER)
    assert same.read(sending(seal(unsigned, another))) == Send(unsigned)
    assert code_of(same.read(sending(seal(unsigned, another)))) == "replayed_ticket"
    assert code_of(same.read(sending(seal(stale, another)))) == "stale_ticket"
    assert code_of(same.read(sending("not a ticket"))) == "invalid_ticket"


def test_a_ticket_serves_once() -> None:
    text = seal(ticket(ME, PEER), KEY)
    same = reader()
    assert isinstance(same.read(sending(text)), Send)
    assert code_of(same.read(sending(text))) == "replayed_ticket"


def test_decode_servers_send_what_moves_and_prefill_servers_do_not_receive() -> None:
    ours, theirs = ticket(ME, PEER), ticket(PEER, ME)
    assert isinstance(reader("decode").read(sending(seal(ours, KEY))), Send)
    assert code_of(reader("prefill").read(receiving(seal(theirs, KEY)))) == "not_a_consumer"


def test_a_refused_ticket_is_not_used_up() -> None:
    text = seal(ticket(ME, PEER), KEY)
    same = reader()
    assert code_of(same.read(receiving(text))) == "stale_ticket"
    assert isinstance(same.read(sending(text)), Send)
