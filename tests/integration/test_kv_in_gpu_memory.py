"""Agents whose KV stays where an engine allocated it in a GPU's memory, as vLLM does.

`tests.host_device` is in place of the GPU: bytes move late, in halves, by another thread.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import TransferError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent, SendFailed
from baton.telemetry.trace import Stamp
from tests import host_device
from tests.integration.gpu_pages import (
    UNDER_WAY,
    HeldPosition,
    gpu_node,
    received_pages,
    run_prefill,
    sent_pages,
)
from tests.integration.handoff_nodes import CLOCK, FIRST, NUM_LAYERS, make_handoff, node
from tests.unit.handoff.orders import make_ticket, receive_order

if TYPE_CHECKING:
    from baton.handoff.messages import TransferOp
    from tests.integration.handoff_nodes import Handoff


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def wait_for_looks(position: HeldPosition) -> None:
    """Until the agent has asked for it several times."""
    deadline = CLOCK.now() + 20.0
    before = position.num_looks
    while position.num_looks < before + 3:
        assert CLOCK.now() < deadline, "nobody asks whether the GPU is done"
        threading.Event().wait(0.005)


def report_layers(handoff: Handoff, position: HeldPosition | None) -> None:
    ticket, stop = handoff.sending.ticket.id, handoff.sending.num_tokens
    for layer in range(NUM_LAYERS):
        handoff.prefill.agent.layer_ready([(ticket, stop)], layer, position)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(
    ("op", "layer_batch_bytes"), [("WRITE", 0), ("WRITE", 1 << 20), ("READ", 0), ("READ", 1 << 20)]
)
def test_layers_leave_once_the_gpu_has_computed_them(
    op: TransferOp, layer_batch_bytes: int, order: str, key: Credentials
) -> None:
    """What is in the pages before that is neither digested nor sent."""
    with (
        gpu_node("p", key, order=order, layer_batch_bytes=layer_batch_bytes) as prefill,
        gpu_node("d", key, order=order, op=op) as decode,
    ):
        handoff, computed = make_handoff(prefill, decode), HeldPosition()
        prefill.scribble(1)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        report_layers(handoff, computed)
        handoff.prefill_done()
        wait_for_looks(computed)
        assert not handoff.sending.trace.num_bytes
        assert Stamp.PREFILL_DONE not in handoff.sending.trace.stamps
        prefill.scribble(2)
        computed.is_reached = True
        assert decode.wait_for() == [KVLanded(handoff.sending.ticket.id, FIRST)]
        assert prefill.wait_for() == [KVSent(handoff.sending.ticket.id)]
        assert received_pages(handoff) == sent_pages(handoff)
        assert any(map(any, received_pages(handoff)))
        assert handoff.receiving.trace.transport == "cuda_ipc"
        assert Stamp.PREFILL_DONE in handoff.receiving.trace.peer_stamps


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_no_peer_touches_blocks_that_the_gpu_still_uses(op: TransferOp, key: Credentials) -> None:
    with gpu_node("p", key) as prefill, gpu_node("d", key, op=op) as decode:
        handoff, left = make_handoff(prefill, decode), HeldPosition()
        prefill.scribble(1)
        decode.scribble(2)
        before = received_pages(handoff)
        handoff.receiving = replace(handoff.receiving, after=left)
        handoff.start_receive()
        handoff.start_send()
        report_layers(handoff, None)
        handoff.prefill_done()
        wait_for_looks(left)
        assert decode.stays_silent(0.1)
        assert Stamp.GRANTED not in handoff.receiving.trace.stamps
        assert received_pages(handoff) == before
        left.is_reached = True
        assert decode.wait_for() == [KVLanded(handoff.sending.ticket.id, FIRST)]
        assert received_pages(handoff) == sent_pages(handoff) != before


def test_an_abort_does_not_wait_for_the_gpu(key: Credentials) -> None:
    """Nothing was granted: the blocks are the engine's again at once, and others go on."""
    with gpu_node("p", key) as prefill, gpu_node("d", key) as decode:
        handoff, left = make_handoff(prefill, decode), HeldPosition()
        handoff.receiving = replace(handoff.receiving, after=left)
        handoff.start_receive()
        wait_for_looks(left)
        decode.agent.abort(handoff.sending.ticket.id, "the client left")
        assert decode.wait_for() == [BlocksQuiescent(handoff.sending.ticket.id)]
        left.is_reached = True
        again = make_handoff(prefill, decode, num_ready=101, seed=7)
        again.start_receive()
        again.start_send()
        again.prefill_done()
        assert decode.wait_for() == [KVLanded(again.sending.ticket.id, FIRST)]
        assert received_pages(again) == sent_pages(again)


def test_a_gpu_that_fails_ends_the_handoff(key: Credentials) -> None:
    with gpu_node("p", key) as prefill, gpu_node("d", key) as decode:
        handoff = make_handoff(prefill, decode)
        handoff.start_receive()
        handoff.start_send()
        report_layers(handoff, HeldPosition(error=TransferError("an illegal address")))
        (failed,) = prefill.wait_for()
        assert isinstance(failed, SendFailed)
        assert "an illegal address" in str(failed.error)
        assert isinstance(decode.wait_for(2)[0], KVFailed)
        handoff = make_handoff(prefill, decode, seed=7)
        broken = HeldPosition(error=TransferError("an illegal address"))
        handoff.receiving = replace(handoff.receiving, after=broken)
        handoff.start_receive()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "an illegal address" in str(failed.error)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_flipped_bit_is_found(
    op: TransferOp, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped, move = [], ctypes.memmove

    def flip(destination: int, source: int, num_bytes: int) -> None:
        move(destination, source, num_bytes)
        if not flipped:
            ctypes.c_ubyte.from_address(destination + num_bytes // 3).value ^= 1
            flipped.append(destination)

    monkeypatch.setattr(host_device.ctypes, "memmove", flip)
    with gpu_node("p", key) as prefill, gpu_node("d", key, op=op) as decode:
        handoff = make_handoff(prefill, decode, num_ready=101)
        prefill.scribble(1)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        failed, quiescent = decode.wait_for(2)
        assert flipped
        assert received_pages(handoff) != sent_pages(handoff)
        assert isinstance(failed, KVFailed)
        assert "digest mismatch" in str(failed.error)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)


def test_a_prefill_worker_that_is_killed_while_it_copies_gives_the_blocks_back() -> None:
    secret = bytes(range(32))
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=run_prefill, args=(secret, there), daemon=True)
    child.start()
    with gpu_node("d", Credentials.of(ClusterKey(secret)), op="WRITE") as decode:
        ticket = make_ticket(here.recv(), decode.ref)
        order = receive_order(ticket, start=0, num_tokens=101)
        decode.agent.start_receive(order)
        here.send(ticket)
        assert here.recv() == UNDER_WAY
        assert decode.stays_silent(0.1)
        child.kill()
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert quiescent == BlocksQuiescent(ticket.id)
        assert any((pages[order.blocks.blocks] == 0xA5).any() for pages in decode.pages.own)
    child.join()


def test_workers_in_memory_of_two_kinds_refuse_each_other(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key) as prefill,
        gpu_node("d", key) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        handoff.start_receive()
        failed, _ = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "give both workers the same transfer.transports" in str(failed.error)
