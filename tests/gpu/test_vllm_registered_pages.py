"""vLLM's pages that stay where it allocated them on a GPU: agents over `cuda_ipc`, busy streams.

Layouts are those in which the bytes of a page are adjacent.
"""

from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch

from baton.auth.credentials import Credentials
from baton.engines.gpu.copy_stream import make_recorder
from baton.engines.gpu.device_region import register_pages
from baton.errors import TransferError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, KVSent
from baton.handoff.kv_views import KVView
from baton.handoff.peer_transports import LinkOptions
from baton.kv.layout import KVLayout
from baton.telemetry.trace import Stamp
from tests.gpu.vllm_layouts import allocate_layers
from tests.integration.handoff_nodes import Pages, make_handoff, node

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 400_000_000
"""A fifth of a second of a GPU's time."""
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 64, 4, 16, 128
NUM_TOKENS = 16 * BLOCK_SIZE - 5
ORDERS = ["LBHNC", "LBNHC"]
record = make_recorder(DEVICE)


@contextmanager
def gpu_node(name, key, order, **options):
    """A worker, and the layers of its cache."""
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    layers = allocate_layers(order, shape, torch.bfloat16, DEVICE)
    layout = msgspec.structs.replace(
        KVLayout.gqa(NUM_LAYERS, NUM_HEADS, HEAD_DIM, block_size=BLOCK_SIZE, dtype="bfloat16"),
        order="opaque",
        arrangement=f"vllm-cuda/test/{order}",
    )
    pages = Pages(layout, [], (KVView(layout, register_pages(layers)),))
    with node(name, kinds=("cuda_ipc",), key=key, pages=pages, **options) as running:
        yield running, layers


def on_gpu(table):
    return torch.from_numpy(table.blocks).to(DEVICE)


def bits(layer, table):
    return layer[on_gpu(table)].contiguous().view(torch.int16)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(
    "links", [LinkOptions("listed"), LinkOptions()], ids=["listed", "measured"]
)
def test_pages_leave_once_a_busy_stream_has_computed_them(order, op, links):
    key = Credentials.generate()
    with (
        gpu_node("p", key, order, links=links) as (prefill, sent),
        gpu_node("d", key, order, op=op, links=links) as (decode, received),
    ):
        handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS)
        handoff.receiving = replace(handoff.receiving, after=record())
        others = torch.ones(NUM_BLOCKS, dtype=torch.bool, device=DEVICE)
        others[on_gpu(handoff.receiving.blocks)] = False
        before = [layer[others].clone() for layer in received]
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        model, computed = torch.cuda.Stream(DEVICE), []
        values = [torch.randn_like(layer, memory_format=torch.preserve_format) for layer in sent]
        torch.cuda.synchronize()
        ticket = handoff.sending.ticket.id
        with torch.cuda.stream(model):
            for number, layer in enumerate(sent):
                torch.cuda._sleep(BUSY_CYCLES // 4)
                layer.copy_(values[number])
                computed.append(record())
                prefill.agent.layer_ready([(ticket, NUM_TOKENS)], number, computed[-1])
        handoff.prefill_done()
        assert not computed[0].is_done()
        assert decode.stays_silent(0.02)
        (landed,) = decode.wait_for()
        assert all(each.is_done() for each in computed)
        assert isinstance(landed, KVLanded)
        assert prefill.wait_for() == [KVSent(ticket)]
        assert handoff.receiving.trace.transport == "cuda_ipc"
        for layer, found, kept in zip(values, received, before, strict=True):
            expected = bits(layer, handoff.sending.blocks)
            assert torch.equal(bits(found, handoff.receiving.blocks), expected)
            assert torch.equal(found[others].view(torch.int16), kept.view(torch.int16))


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_blocks_are_not_written_before_the_steps_that_used_them(op):
    key = Credentials.generate()
    with (
        gpu_node("p", key, "LBHNC") as (prefill, sent),
        gpu_node("d", key, "LBHNC", op=op) as (decode, received),
    ):
        handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS, num_ready=NUM_TOKENS)
        for layer in sent:
            layer.fill_(5)
        for layer in received:
            layer.fill_(3)
        seen = torch.empty_like(received[0])
        model = torch.cuda.Stream(DEVICE)
        torch.cuda.synchronize()
        with torch.cuda.stream(model):
            torch.cuda._sleep(BUSY_CYCLES)
            seen.copy_(received[0])  # a step for the request that had these blocks before
            left = record()
        handoff.receiving = replace(handoff.receiving, after=left)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        assert decode.stays_silent(0.05)
        assert not left.is_done()
        assert Stamp.GRANTED not in handoff.receiving.trace.stamps
        (landed,) = decode.wait_for()
        assert isinstance(landed, KVLanded)
        with torch.cuda.stream(model):  # the step that reads what has landed
            now = received[0][on_gpu(handoff.receiving.blocks)].clone()
        model.synchronize()
        assert (now == 5).all()
        assert (seen == 3).all()


def test_bytes_that_change_in_the_receivers_memory_are_found(monkeypatch):
    """A bit of what has landed is flipped before it is digested."""
    key = Credentials.generate()
    with (
        gpu_node("p", key, "LBHNC") as (prefill, _),
        gpu_node("d", key, "LBHNC") as (decode, received),
    ):
        handoff = make_handoff(prefill, decode, num_tokens=NUM_TOKENS, num_ready=NUM_TOKENS)
        access, changed = decode.pages.views[0].device_access, []
        digest = access.digest

        def change_first(layers, parts):
            page = received[layers.start][int(parts.runs[0, 1])]
            page.view(torch.int16)[0, 0, 7] ^= 1
            torch.cuda.synchronize()
            changed.append(page)
            return digest(layers, parts)

        monkeypatch.setattr(access, "digest", change_first)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        failed, quiescent = decode.wait_for(2)
        assert changed
        assert isinstance(failed, KVFailed)
        assert "digest mismatch" in str(failed.error)
        assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)


def test_pages_that_are_several_runs_are_refused():
    layers = allocate_layers("LHBNC", (2, 8, 4, 16, 64), torch.bfloat16, DEVICE)
    with pytest.raises(TransferError, match="not adjacent"):
        register_pages(layers)
