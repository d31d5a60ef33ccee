"""Workers whose identities an authority issued: names, roles, and what was revoked."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.ticket import Ticket, unseal, write_unsigned
from baton.errors import AuthenticationError
from baton.handoff.interface import KVFailed, KVLanded
from baton.handoff.messages import Failed, Keepalive
from baton.ids import new_epoch
from baton.net.tls import ClusterTls
from baton.testing.transport_pair import Side, TransportPair
from baton.transfer.interface import ReadGrant, RemoteLost, TransportContext, find_read_scopes
from baton.transfer.region import allocate_host_region
from baton.transfer.transports.tcp.sockets import TcpOptions
from baton.transfer.transports.tcp.transport import TcpTransport
from tests.integration.handoff_nodes import CLOCK, Node, make_handoff, node
from tests.integration.identities import Identities
from tests.integration.test_handoff_failover import wait_until
from tests.integration.test_handoff_untrusted_peers import peers_of, say

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from baton.handoff.interface import HandoffEvent
    from baton.handoff.messages import ToReceiver
    from baton.handoff.peers import Peer

TCP = ("tcp",)


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


def hand_over(prefill: Node, decode: Node, gateway: Credentials | None) -> HandoffEvent:
    """How it ends for the decode worker."""
    handoff = make_handoff(prefill, decode, num_ready=101, gateway=gateway)
    prefill.scribble(1)
    handoff.start_receive()
    handoff.start_send()
    handoff.prefill_done()
    return decode.wait_for()[0]


def test_what_was_revoked_is_cut_off(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = identities.of("gateway", "g")
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p")) as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "d"), timeout_s=3.0) as decode,
    ):
        assert isinstance(hand_over(prefill, decode, gateway), KVLanded)
        (transport,) = decode.agent.options.transports
        assert transport._listener._peers  # type: ignore[attr-defined]
        identities.revoke("p", known_to="d")
        wait_until(lambda: not transport._listener._peers)  # type: ignore[attr-defined]
        wait_until(lambda: not list(decode.agent.loop._peers))
        wait_until(lambda: "the certificate of worker p was revoked" in caplog.text)
        failed = hand_over(prefill, decode, gateway)
        assert isinstance(failed, KVFailed)
        assert "worker p was revoked" in str(failed.error)


def test_what_is_pulled_is_readable_until_the_handoff_ends(identities: Identities) -> None:
    gateway = identities.of("gateway", "g")
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p"), op="READ") as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "d"), op="READ") as decode,
    ):
        (transport,) = prefill.agent.options.transports
        (scope,) = find_read_scopes([transport])
        admitted: list[ReadGrant] = []
        admit = scope.admit_reads

        def note(grant: ReadGrant, arrays: range, pages: NDArray[np.int64]) -> None:
            admitted.append(grant)
            admit(grant, arrays, pages)

        scope.admit_reads = note  # type: ignore[method-assign]
        assert isinstance(hand_over(prefill, decode, gateway), KVLanded)
        assert {(grant.reader_name, grant.reader) for grant in admitted} == {
            ("d", decode.agent.options.epoch)
        }
        wait_until(lambda: not transport._read_grants._open)  # type: ignore[attr-defined]


def test_a_transports_connection_ends_by_itself(identities: Identities) -> None:
    """Also where no link's end makes the peer detach: a thief would not."""
    owner, thief = (
        Side.start(
            TcpTransport(
                TcpOptions(),
                TransportContext(identities.of("worker", name), new_epoch(), "127.0.0.1", CLOCK),
            ),
            new_epoch(),
            allocate_host_region([(4, 64)]),
        )
        for name in ("owner", "thief")
    )
    with closing(owner.transport), closing(thief.transport):
        pair = TransportPair.of(thief, owner)
        remote = pair.attach()
        identities.revoke("thief", known_to="owner")
        seen: list[object] = []

        def poll() -> bool:  # at least once a second, as every owner of a transport does
            owner.transport.poll()
            seen.extend(thief.transport.poll())
            return any(isinstance(event, RemoteLost) for event in seen)

        wait_until(poll)
        assert [event.remote for event in seen if isinstance(event, RemoteLost)] == [remote]


def test_a_worker_goes_by_its_own_name(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = identities.of("gateway", "g")
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p")) as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "other"), timeout_s=2.0) as decode,
    ):
        assert isinstance(hand_over(prefill, decode, gateway), KVFailed)
        wait_until(lambda: "worker other calls itself d" in caplog.text)


def test_another_workers_epoch_shows_and_ends_none_of_its_handoffs(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate proves a worker's name; its epoch is whatever its Hello contains."""
    gateway = identities.of("gateway", "g")
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p")) as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "d")) as decode,
        node("x", kinds=TCP, key=identities.of("worker", "x")) as thief,
    ):
        table = thief.agent.loop._peers
        table._hello = msgspec.structs.replace(table._hello, epoch=decode.epoch)
        thief.agent.loop.call(table.dial, prefill.ref)
        wait_until(lambda: bool(peers_of(prefill, "x") and peers_of(thief, "p")))
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, gateway=gateway)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        seen = {each.name: record_messages(each, monkeypatch) for each in (decode, thief)}
        prefill.agent.report_progress([handoff.sending.ticket])
        wait_until(lambda: any(isinstance(each, Keepalive) for each in seen["d"]))
        say(thief, peers_of(thief, "p")[0], Failed(handoff.sending.ticket.id, "by x"))
        assert prefill.stays_silent()
        assert seen["x"] == []
        handoff.compute(handoff.sending.num_tokens)
        handoff.prefill_done()
        handoff.check_landed()


def record_messages(worker: Node, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What comes to its receiving side from now on."""
    receiving, seen = worker.agent.loop.receiving, list[object]()
    handle = receiving.handle_message

    def record(peer: Peer, message: ToReceiver) -> None:
        seen.append(message)
        handle(peer, message)

    monkeypatch.setattr(receiving, "handle_message", record)
    return seen


def test_a_worker_signs_no_tickets(
    identities: Identities, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p")) as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "d"), timeout_s=2.0) as decode,
    ):
        assert isinstance(hand_over(prefill, decode, None), KVFailed)
        wait_until(lambda: "the peer is worker d, and this takes a gateway" in caplog.text)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("is_made_up", [True, False])
def test_a_worker_makes_up_no_ticket_without_a_signature(
    identities: Identities, caplog: pytest.LogCaptureFixture, is_early: bool, is_made_up: bool
) -> None:
    """Not even of the id of one that the gateway gave to both; that one itself is good."""
    with (
        node("p", kinds=TCP, key=identities.of("worker", "p")) as prefill,
        node("d", kinds=TCP, key=identities.of("worker", "d"), timeout_s=2.0) as decode,
    ):
        handoff = make_handoff(prefill, decode, num_ready=101)
        given = handoff.sending.ticket
        shown = msgspec.structs.replace(given, request_id="another") if is_made_up else given
        handoff.sending = replace(handoff.sending, ticket=without_signature(given))
        handoff.receiving = replace(handoff.receiving, ticket=without_signature(shown))
        prefill.scribble(1)
        if is_early:
            handoff.start_receive()
            wait_until(lambda: len(prefill.agent.loop.sending._early) == 1)
            handoff.start_send()
        else:
            handoff.start_send()
            handoff.start_receive()
        handoff.prefill_done()
        if is_made_up:
            assert isinstance(decode.wait_for()[0], KVFailed)
            wait_until(lambda: "refused a grant of d" in caplog.text)
        else:
            handoff.check_landed()


def without_signature(ticket: Ticket) -> Ticket:
    """As a worker reads it from a gateway's connection."""
    return unseal(write_unsigned(ticket), Credentials.generate(), is_from_gateway=True)


def test_only_a_gateways_connection_needs_no_signature(identities: Identities) -> None:
    """A worker may ask itself, and nothing that it says there counts as a gateway's."""
    own, other, gateway = (
        identities.of(*who) for who in (("worker", "p"), ("worker", "d"), ("gateway", "g"))
    )
    server = ClusterTls(own)

    def check(client: Credentials) -> bool:
        return server.check_request(client.signer.certificate, "POST", "/v1/completions")

    assert check(gateway)
    assert not check(own)
    with pytest.raises(AuthenticationError):
        check(other)
