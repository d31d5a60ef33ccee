"""What peers may not do, and what those of another version are told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.ticket import seal
from baton.errors import BatonError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent
from baton.handoff.link import Link, LinkPhase
from baton.handoff.messages import (
    PROTOCOL_VERSION,
    EncodingCosts,
    FallbackToWrite,
    Grant,
    HelloRefused,
    Message,
    ProbeRequest,
    RetransmitRequest,
    TransferAck,
)
from baton.handoff.peer_transports import LinkOptions
from baton.ids import new_ticket_id
from tests.integration.handoff_nodes import CLOCK, FIRST, Node, make_handoff, node
from tests.integration.held_reads import HeldReadsFactory
from tests.integration.test_handoff_failover import wait_until
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket

if TYPE_CHECKING:
    from baton.auth.ticket import HandoffMode
    from baton.handoff.peers import Peer

SHARED = ("shared",)


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def peers_of(worker: Node, name: str) -> list[Peer]:
    return [p for p in worker.agent.loop._peers if p.hello is not None and p.name == name]


def meet(dialer: Node, listener: Node) -> Peer:
    """Link the two; the listener's end."""
    dialer.agent.decline(make_ticket(listener.ref, dialer.ref), "only to meet")
    wait_until(lambda: bool(peers_of(listener, dialer.name) and peers_of(dialer, listener.name)))
    (peer,) = peers_of(listener, dialer.name)
    return peer


def say(worker: Node, peer: Peer, message: Message) -> None:
    worker.agent.loop.call(lambda: worker.agent.loop._peers.send(peer, message))


def test_a_grant_over_a_link_that_this_side_dialed_is_refused(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key) as decode,
    ):
        peer = meet(dialer=prefill, listener=decode)
        ticket = make_ticket(prefill.ref, decode.ref)
        grant = Grant(ticket.id, seal(ticket, key), PROMPT_HASH, 0, 20, 0, b"", "READ")
        say(decode, peer, grant)
        wait_until(lambda: "KV goes the other way" in caplog.text)


def test_a_grant_of_pages_for_an_encoding_that_this_worker_lacks_is_refused(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key) as decode,
    ):
        meet(dialer=decode, listener=prefill)
        (peer,) = peers_of(decode, "p")
        ticket = make_ticket(prefill.ref, decode.ref)
        sealed = seal(ticket, key)
        grant = Grant(ticket.id, sealed, PROMPT_HASH, 0, 20, 0, b"", "READ", encoding="int8/1")
        say(decode, peer, grant)
        wait_until(lambda: "no views for KV encoded as int8/1" in caplog.text)
        assert peers_of(prefill, "d"), "the link lives"
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        handoff.check_landed(FIRST)


def test_costs_of_an_encoding_that_the_two_do_not_share_are_ignored(key: Credentials) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key) as decode,
    ):
        peer = meet(dialer=decode, listener=prefill)
        say(prefill, peer, EncodingCosts("int8/1", 1e-9, 1e-9))
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        handoff.check_landed(FIRST)
        assert handoff.receiving.trace.encodings == []


@pytest.mark.parametrize("word", ["taken", "missing", "reversed"])
def test_what_another_peer_says_of_a_handoff_changes_nothing(word: str, key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
        node("x", kinds=SHARED, key=key) as stranger,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, num_ready=101)
        ticket = handoff.sending.ticket.id
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        holder.made[0].wait_until_held(3)
        meet(dialer=stranger, listener=prefill)
        (peer,) = peers_of(stranger, "p")
        message = {
            "taken": TransferAck(ticket, "shared", "shared"),
            "missing": RetransmitRequest(ticket, "shared", b""),
            "reversed": FallbackToWrite(ticket, (), 0, b"", b""),
        }[word]
        say(stranger, peer, message)
        assert prefill.stays_silent()
        holder.made[0].let_go()
        handoff.check_landed(FIRST)


def test_both_traces_of_a_read_handoff_say_what_carried_it(key: Credentials) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ") as decode,
    ):
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        assert prefill.wait_for() == [KVSent(handoff.sending.ticket.id)]
        trace = handoff.sending.trace
        assert (trace.expected_transport, trace.transport) == ("shared", "shared")


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_probe_that_is_named_like_a_ticket_takes_nothing_of_that_ticket(
    mode: HandoffMode, key: Credentials
) -> None:
    """What is written would be taken for a probe, and its pages never be free again."""
    measured = LinkOptions()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, links=measured) as decode,
        node("x", kinds=SHARED, key=key) as other,
    ):
        prefill.scribble(1)
        peer = meet(dialer=decode, listener=other)
        handoff = make_handoff(prefill, decode, num_ready=101, mode=mode)
        say(other, peer, ProbeRequest(handoff.sending.ticket.id, "shared"))
        wait_until(lambda: decode.agent.loop._probe_target.held is not None)
        handoff.start_send()
        handoff.prefill_done()
        handoff.start_receive()
        handoff.check_landed(FIRST)


def test_a_probe_where_links_are_not_measured_is_refused_and_its_link_lives(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key) as decode,
    ):
        peer = meet(dialer=prefill, listener=decode)
        say(decode, peer, ProbeRequest(new_ticket_id(), "shared"))
        wait_until(lambda: "which cannot be made here" in caplog.text)
        assert peers_of(prefill, "d")


@pytest.mark.parametrize("version", [1, 3, PROTOCOL_VERSION + 1])
def test_a_worker_of_another_version_is_told_so(
    version: int, key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot read our Hello, but `refused` is the same in all versions."""
    with node("p", kinds=SHARED, key=key) as prefill:
        link = Link.dial(prefill.agent.address, key, CLOCK.now())
        hello = msgspec.msgpack.encode({"t": "hello", "version": version, "worker": "old"})
        link._held_back.append(hello)
        heard: list[Message] = []

        def has_heard() -> bool:
            try:
                link.flush()
                if link.phase is not LinkPhase.CONNECTING:
                    heard.extend(link.receive(CLOCK.now()))
            except BatonError:
                threading.Event().wait(0.01)
            return bool(heard)

        wait_until(has_heard)
        link.close()
    assert heard[0] == HelloRefused((
        f"handoff protocol: version {version} on old, {PROTOCOL_VERSION} on p",
    ))
    assert f"handoff protocol: version {version} on old, {PROTOCOL_VERSION} on p" in caplog.text


def test_a_message_that_cannot_be_handled_ends_its_own_link(
    key: Credentials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it was: the handoffs of other peers go on."""
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key) as broken,
        node("e", kinds=SHARED, key=key) as well,
    ):
        sending = prefill.agent.loop.sending
        handle = sending.handle_message

        def fail_for_d(peer: Peer, message: Message) -> None:
            if peer.name == "d":
                raise KeyError("a defect")
            handle(peer, message)

        monkeypatch.setattr(sending, "handle_message", fail_for_d)
        ended = hand_over(prefill, broken)
        assert isinstance(ended, KVFailed)
        assert "an event of d could not be handled" in caplog.text
        assert isinstance(hand_over(prefill, well), KVLanded)


def hand_over(prefill: Node, decode: Node) -> object:
    """How a handoff ends for the decode worker."""
    prefill.scribble(1)
    handoff = make_handoff(prefill, decode, num_tokens=101)
    handoff.start_receive()
    handoff.start_send()
    handoff.compute(101)
    handoff.prefill_done()
    while True:
        for event in decode.wait_for():
            if not isinstance(event, BlocksQuiescent):
                return event
