"""Two real agents over `shared`, where the decode worker moves the bytes."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant
from baton.handoff.interface import (
    BlocksQuiescent,
    KVFailed,
    KVLanded,
    KVSent,
    SendFailed,
)
from baton.kv.copies import BlockTable
from baton.telemetry.trace import Stamp
from baton.transfer.transports.shared.transport import SharedTransport
from baton.transfer.transports.tcp.transport import TcpTransport
from tests.integration.handoff_nodes import (
    CLOCK,
    NUM_LAYERS,
    WRITES_ONLY,
    Node,
    make_handoff,
    node,
)
from tests.integration.held_reads import HeldReadsFactory
from tests.integration.killed_prefill import run_prefill
from tests.unit.handoff.orders import make_ticket, receive_order

if TYPE_CHECKING:
    from baton.handoff.messages import TransferOp
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        RegionDescriptor,
        TransferId,
    )

SHARED = ("shared",)


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


@pytest.mark.parametrize(("src_block", "dst_block"), [(16, 16), (16, 24), (24, 16), (8, 32)])
@pytest.mark.parametrize(("start_blocks", "num_ready"), [(0, 0), (2, 40)])
def test_layers_are_read_as_they_become_available(
    src_block: int, dst_block: int, start_blocks: int, num_ready: int, key: Credentials
) -> None:
    with (
        node("p", kinds=SHARED, key=key, block_size=src_block) as prefill,
        node("d", kinds=SHARED, key=key, block_size=dst_block, op="READ") as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, start_blocks=start_blocks, num_ready=num_ready)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        handoff.compute(57, 100, 101)
        handoff.prefill_done(None)
        handoff.check_landed(None)
        trace = handoff.receiving.trace
        assert trace.transport == trace.expected_transport == "shared"
        assert (
            trace.num_bytes
            == (101 - handoff.receiving.start) * decode.layout.bytes_per_token
            == handoff.sending.trace.num_bytes
        )
        assert {Stamp.GRANTED, Stamp.FIRST_LAYER_LANDED, Stamp.LAST_LAYER_LANDED} <= set(
            trace.stamps
        )


def test_one_route_serves_every_handoff_with_a_peer(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        holder.made[0].let_go()
        for seed in range(3):
            prefill.scribble(seed)
            handoff = make_handoff(prefill, decode, num_ready=101, seed=seed)
            handoff.start_send()
            handoff.start_receive()
            handoff.prefill_done()
            handoff.check_landed()
        assert holder.made[0].num_attached == 1


def test_a_transport_that_cannot_read_is_written_by_the_peer(
    key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TcpTransport, "capabilities", WRITES_ONLY)
    with (
        node("p", kinds=("tcp",), key=key) as prefill,
        node("d", kinds=("tcp",), key=key, op="READ") as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        handoff.check_landed()
        assert handoff.receiving.trace.transport == "tcp"


@pytest.mark.parametrize("tcp_reads", [True, False])
def test_a_peer_that_cannot_be_attached_by_one_transport_is_reached_by_another(
    *,
    tcp_reads: bool,
    key: Credentials,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not tcp_reads:
        monkeypatch.setattr(TcpTransport, "capabilities", WRITES_ONLY)
    expose = SharedTransport.expose

    def expose_elsewhere(self: SharedTransport, region: PagedRegion) -> RegionDescriptor:
        """As from another host: a socket's name that nobody has here."""
        return msgspec.structs.replace(expose(self, region), endpoint="baton-" + "0" * 32)

    monkeypatch.setattr(SharedTransport, "expose", expose_elsewhere)
    with (
        node("p", kinds=("shared", "tcp"), key=key) as prefill,
        node("d", kinds=("shared", "tcp"), key=key, op="READ") as decode,
    ):
        for seed in (1, 2):
            prefill.scribble(seed)
            handoff = make_handoff(prefill, decode, num_ready=101, seed=seed)
            handoff.start_receive()
            handoff.start_send()
            handoff.prefill_done()
            handoff.check_landed()
            assert handoff.receiving.trace.expected_transport == "shared"
            assert handoff.receiving.trace.transport == "tcp"
    said = "p is reached by tcp, not shared" if tcp_reads else "p cannot be read and writes instead"
    assert caplog.text.count(said) == 1


def test_bytes_that_change_under_a_read_are_not_used(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_send()
        handoff.start_receive()
        holder.made[0].wait_until_held(1)
        prefill.scribble(4)
        holder.made[0].let_go()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert failed.error.stage == "verify"
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)
        assert isinstance(prefill.wait_for()[0], SendFailed)


def test_the_source_is_held_until_it_is_taken(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_send()
        handoff.start_receive()
        handoff.prefill_done()
        holder.made[0].wait_until_held(3)
        assert prefill.stays_silent()
        assert decode.stays_silent(0.0)
        holder.made[0].let_go()
        handoff.check_landed()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_deadline_under_a_read_ends_both_sides(side: str, key: Credentials) -> None:
    """`BlocksQuiescent` waits for the read, and nothing else does."""
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        handoff = make_handoff(prefill, decode, num_ready=101)
        soon = Instant(CLOCK.now() + 1.5)  # attaching and three reads, on a busy machine
        if side == "prefill":
            handoff.sending = replace(handoff.sending, deadline=soon)
        else:
            handoff.receiving = replace(handoff.receiving, deadline=soon)
        handoff.start_send()
        handoff.start_receive()
        handoff.prefill_done()
        holder.made[0].wait_until_held(3)
        (failed,) = decode.wait_for()
        assert isinstance(failed, KVFailed)
        assert "deadline" in str(failed.error)
        assert isinstance(prefill.wait_for()[0], SendFailed)
        assert decode.stays_silent()
        holder.made[0].let_go()
        assert decode.wait_for() == [BlocksQuiescent(handoff.sending.ticket.id)]


def test_a_link_that_is_cut_under_a_read_ends_both_sides(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_send()
        handoff.start_receive()
        holder.made[0].wait_until_held(3)
        cut_links(decode)
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)
        assert isinstance(prefill.wait_for()[0], SendFailed)
        holder.made[0].let_go()
        prefill.scribble(5)
        again = make_handoff(prefill, decode, num_ready=101, seed=7)
        again.start_send()
        again.start_receive()
        again.prefill_done()
        again.check_landed()


@pytest.mark.parametrize("reads_are_held", [True, False])
def test_a_peer_that_is_killed_ends_the_handoff_at_once(reads_are_held: bool) -> None:
    secret = bytes(range(32))
    holder = HeldReadsFactory()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=run_prefill, args=(secret, there), daemon=True)
    child.start()
    with node(
        "d", kinds=SHARED, key=Credentials.of(ClusterKey(secret)), op="READ", wrap=holder
    ) as decode:
        if not reads_are_held:
            holder.made[0].let_go()
        ticket = make_ticket(here.recv(), decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=101))
        here.send(ticket)
        holder.made[0].wait_until_held(3)
        before = CLOCK.now()
        child.kill()
        failed, quiescent = decode.wait_for(2)
        assert CLOCK.now() - before < 2.5, "not after the liveness timeout: the link broke"
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(ticket.id)
    child.join()


def test_an_abort_while_reading_ends_both_sides(key: Credentials) -> None:
    holder = HeldReadsFactory()
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ", wrap=holder) as decode,
    ):
        handoff = make_handoff(prefill, decode, num_ready=50)
        ticket = handoff.sending.ticket.id
        handoff.start_send()
        handoff.start_receive()
        holder.made[0].wait_until_held(1)
        decode.agent.abort(ticket, "the client left")
        assert isinstance(prefill.wait_for()[0], SendFailed)
        assert decode.stays_silent()
        holder.made[0].let_go()
        assert decode.wait_for() == [BlocksQuiescent(ticket)]


def test_many_handoffs_at_once(key: Credentials) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, block_size=24, op="READ") as decode,
    ):
        prefill.scribble(9)
        handoffs = [
            make_handoff(prefill, decode, num_tokens=20 + seed, num_ready=7, seed=seed)
            for seed in range(12)
        ]
        for number, handoff in enumerate(handoffs):
            own = np.array([2 * number, 2 * number + 1], dtype=np.int64)
            handoff.receiving = replace(handoff.receiving, blocks=BlockTable(0, own))
            handoff.start_receive()
            handoff.start_send()
        for handoff in handoffs:
            handoff.compute(handoff.sending.num_tokens)
            handoff.prefill_done()
        assert {type(event) for event in decode.wait_for(12)} == {KVLanded}
        assert {type(event) for event in prefill.wait_for(12)} == {KVSent}
        for handoff in handoffs:
            handoff.check_bytes()


def cut_links(worker: Node) -> None:
    for peer in worker.agent.loop._peers:
        peer.link.sock.shutdown(2)


def test_a_peer_that_does_not_know_a_handoff_is_waited_for_no_longer_than_its_deadline(
    key: Credentials,
) -> None:
    with (
        node("p", kinds=SHARED, key=key) as prefill,
        node("d", kinds=SHARED, key=key, op="READ") as decode,
    ):
        handoff = make_handoff(prefill, decode)
        handoff.receiving = replace(handoff.receiving, deadline=Instant(CLOCK.now() + 0.3))
        handoff.start_receive()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)
        threading.Event().wait(0.1)
        handoff.start_send()
        assert isinstance(prefill.wait_for()[0], SendFailed)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_layers_with_the_same_pages_are_moved_by_one_prepared_list(
    op: TransferOp, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PageCopies] = []
    name = "submit" if op == "WRITE" else "read"
    original = getattr(SharedTransport, name)

    def note(self: SharedTransport, order: PageWrite | PageRead) -> TransferId:
        seen.append(order.copies)
        return original(self, order)  # type: ignore[no-any-return]

    with (
        node("p", kinds=SHARED, key=key, block_size=16) as prefill,
        node("d", kinds=SHARED, key=key, block_size=16, op=op) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        monkeypatch.setattr(SharedTransport, name, note)
        handoff.compute(57, 101)
        handoff.prefill_done(None)
        handoff.check_landed(None)
    by_layer = [[copies for copies in seen if copies.layer == layer] for layer in range(NUM_LAYERS)]
    assert min(map(len, by_layer)) >= 1
    assert len({id(copies.groups) for copies in seen}) < len(seen)
    for layers in zip(*by_layer, strict=True):
        assert all(copies.groups is layers[0].groups for copies in layers)
