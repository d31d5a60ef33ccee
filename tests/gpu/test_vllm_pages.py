"""vLLM's pages on a real GPU: copies beside streams that are kept busy, in each of its layouts.

Layouts are vLLM 0.32's: each layer is a view `[block][head][token][K, V]` of one allocation whose
dimensions lie in another order. MLA has one head.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from baton.auth.credentials import Credentials
from baton.engines.gpu.copy_stream import make_recorder
from baton.engines.vllm.device_pages import DevicePages
from baton.handoff.interface import KVLanded, KVSent
from baton.handoff.kv_views import KVView
from baton.kv.layout import KVLayout
from baton.transfer.interface import PagedRegion
from baton.transfer.region import allocate_shared_region, view_pages
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers
from tests.integration.handoff_nodes import Pages, make_handoff, node

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 400_000_000
"""A fifth of a second of a GPU's time."""
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CONTENTS, NUM_STAGED = 3, 64, 4, 16, 256, 24
record = make_recorder(DEVICE)


@dataclass
class Staged:
    """vLLM's layers, and what they are staged in; `host` are the staged pages of each layer."""

    layers: list
    pages: DevicePages
    region: PagedRegion
    host: list


@contextmanager
def staging(layout, dtype=torch.bfloat16, num_heads=NUM_HEADS):
    shape = (NUM_LAYERS, NUM_BLOCKS, num_heads, BLOCK_SIZE, CONTENTS)
    layers = allocate_layers(layout, shape, dtype, DEVICE)
    page_bytes = layers[0][0].numel() * layers[0].element_size()
    region = allocate_shared_region([(NUM_STAGED, page_bytes)] * NUM_LAYERS)
    pages = DevicePages(layers, region)
    host = [torch.from_numpy(view_pages(region.memory, array)) for array in region.arrays]
    staged = Staged(layers, pages, region, host)
    yield staged
    pages.close()
    torch.cuda.cudart().cudaHostUnregister(
        torch.frombuffer(region.memory, dtype=torch.uint8).data_ptr()
    )


def bytes_of(layer, blocks):
    """Blocks of a layer as staged pages have them, uint8 `[n, page_bytes]` on the host."""
    return (
        layer[torch.from_numpy(blocks).to(DEVICE)].contiguous().view(torch.uint8).flatten(1).cpu()
    )


def choose(num_pages, of, seed):
    return np.random.default_rng(seed).permutation(of)[:num_pages].astype(np.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
@pytest.mark.parametrize("num_heads", [NUM_HEADS, 1])
def test_pages_cross_and_come_back(layout, dtype, num_heads):
    with staging(layout, dtype, num_heads) as kv:
        blocks, staged, others = (
            choose(20, NUM_BLOCKS, 1),
            choose(20, NUM_STAGED, 2),
            choose(20, 64, 3),
        )
        for layer in range(NUM_LAYERS):
            expected = bytes_of(kv.layers[layer], blocks)
            kv.pages.gather(layer, blocks, staged, record()).wait()
            assert torch.equal(kv.host[layer][torch.from_numpy(staged)], expected)
            untouched = np.setdiff1d(np.arange(NUM_BLOCKS), others)
            before = bytes_of(kv.layers[layer], untouched)
            kv.pages.scatter(layer, staged, others, record()).wait()
            assert torch.equal(bytes_of(kv.layers[layer], others), expected)
            assert torch.equal(bytes_of(kv.layers[layer], untouched), before)


def on_a_thread(act):
    """What an agent's thread, whose current stream is not vLLM's, returns; and how long it took."""
    found = []

    def run():
        began_at = time.perf_counter()
        result = act()
        found.extend([result, time.perf_counter() - began_at])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_leaves_behind_a_busy_stream_and_no_thread_waits(layout):
    with staging(layout) as kv:
        blocks, staged = choose(20, NUM_BLOCKS, 1), choose(20, NUM_STAGED, 2)
        model = torch.cuda.Stream(DEVICE)
        on_a_thread(lambda: kv.pages.gather(0, blocks, staged, record()).wait())
        kv.layers[0].fill_(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(model):
            torch.cuda._sleep(BUSY_CYCLES)
            kv.layers[0].fill_(7)
            after = record()
        copy, took_s = on_a_thread(lambda: kv.pages.gather(0, blocks, staged, after))
        assert not copy.is_done()
        assert took_s < 0.05, "the thread waited for the GPU"
        copy.wait()
        expected = bytes_of(kv.layers[0], blocks)
        assert torch.equal(kv.host[0][torch.from_numpy(staged)], expected)
        assert expected.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_wait_for_no_other_stream(layout):
    """Neither direction waits for a stream that is busy with something else."""
    with staging(layout) as kv:
        blocks, staged = choose(20, NUM_BLOCKS, 1), choose(20, NUM_STAGED, 2)
        others = torch.cuda.Stream(DEVICE)
        for copy in (
            kv.pages.gather(0, blocks, staged, record()),
            kv.pages.scatter(0, staged, blocks, record()),
        ):
            copy.wait()
        torch.cuda.synchronize()
        after = record()
        with torch.cuda.stream(others):
            torch.cuda._sleep(BUSY_CYCLES)
            busy = record()
        gathered, _ = on_a_thread(lambda: kv.pages.gather(1, blocks, staged, after))
        gathered.wait()
        scattered, _ = on_a_thread(lambda: kv.pages.scatter(1, staged, blocks, after))
        scattered.wait()
        assert not busy.is_done(), "a copy waited for the whole device"
        torch.cuda.synchronize()


def test_layers_of_a_graphs_replay_leave_behind_it():
    """As `forward_launched` reports them: one position, after a replay that runs no Python."""
    with staging("LBHNC") as kv:
        blocks, staged = choose(20, NUM_BLOCKS, 1), choose(20, NUM_STAGED, 2)
        model, value = (
            torch.cuda.Stream(DEVICE),
            torch.zeros(1, dtype=torch.bfloat16, device=DEVICE),
        )
        on_a_thread(lambda: kv.pages.gather(0, blocks, staged, record()).wait())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=model):
            for layer in kv.layers:
                layer.copy_(value.expand_as(layer))
        torch.cuda.synchronize()
        with torch.cuda.stream(model):
            torch.cuda._sleep(BUSY_CYCLES)
            value.fill_(7)
            graph.replay()
            after = record()
        copies, _ = on_a_thread(
            lambda: [kv.pages.gather(n, blocks, staged, after) for n in range(NUM_LAYERS)]
        )
        assert not after.is_done(), "the stream was not behind"
        for number, copy in enumerate(copies):
            copy.wait()
            pages = kv.host[number][torch.from_numpy(staged)].view(torch.bfloat16)
            assert (pages == 7).all()
        assert after.is_done()


def test_blocks_are_not_overwritten_before_the_steps_that_used_them():
    with staging("LBHNC") as kv:
        blocks, staged = choose(20, NUM_BLOCKS, 1), np.arange(20)
        on_a_thread(lambda: kv.pages.scatter(0, staged, blocks, record()).wait())
        kv.layers[0].fill_(3)
        kv.host[0].fill_(5)
        model = torch.cuda.Stream(DEVICE)
        seen = torch.empty_like(kv.layers[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(model):
            torch.cuda._sleep(BUSY_CYCLES)
            seen.copy_(kv.layers[0])  # a step for the request that had these blocks before
            after = record()
        copy, _ = on_a_thread(lambda: kv.pages.scatter(0, staged, blocks, after))
        copy.wait()
        with torch.cuda.stream(model):  # the step that reads what has landed
            now = kv.layers[0][torch.from_numpy(blocks).to(DEVICE)].contiguous().view(torch.uint8)
        model.synchronize()
        assert (now == 5).all()
        assert (seen == 3).all()


def test_agents_hand_over_what_a_busy_stream_computes():
    """Two real agents over `shared`; each layer is written by a stream that is far behind."""
    layout = KVLayout.gqa(NUM_LAYERS, NUM_HEADS, 128, block_size=BLOCK_SIZE, dtype="bfloat16")
    layout = KVLayout(
        layout.layers,
        layout.block_size,
        layout.dtype,
        "opaque",
        layout.shard,
        "vllm-cuda/test/LBNHC",
    )
    key = Credentials.generate()
    with staging("LBNHC") as sent, staging("LBNHC") as received:
        ends = [
            Pages(layout, [], (KVView(layout, kv.region, kv.pages),)) for kv in (sent, received)
        ]
        with (
            node("p", kinds=("shared",), key=key, pages=ends[0]) as prefill,
            node("d", kinds=("shared",), key=key, pages=ends[1]) as decode,
        ):
            handoff = make_handoff(prefill, decode, num_tokens=BLOCK_SIZE * 16)
            handoff.receiving = replace(handoff.receiving, after=record())
            handoff.start_receive()
            handoff.start_send()
            handoff.wait_until_granted()
            model = torch.cuda.Stream(DEVICE)
            torch.cuda.synchronize()
            ticket = handoff.sending.ticket.id
            with torch.cuda.stream(model):
                for number, layer in enumerate(sent.layers):
                    torch.cuda._sleep(BUSY_CYCLES // 4)
                    layer.fill_(number + 1)
                    prefill.agent.layer_ready([(ticket, BLOCK_SIZE * 16)], number, record())
            handoff.prefill_done()
            assert decode.stays_silent(0.02)
            (landed,) = decode.wait_for()
            assert isinstance(landed, KVLanded)
            assert prefill.wait_for() == [KVSent(ticket)]
            for number, layer in enumerate(received.layers):
                found = layer[torch.from_numpy(handoff.receiving.blocks.blocks).to(DEVICE)]
                assert (found == number + 1).all()
