"""The store reads and fills vLLM's pages on a real GPU, beside streams that are kept busy."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.engines.gpu.copy_stream import make_recorder
from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.layouts import view_canonical
from baton.handoff.dispatcher import HandoffDispatcher, open_handoffs
from baton.handoff.interface import KeepOrder, KVLanded, KVSent, LoadOrder, PrefixFound
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.handoff.pool_mode.store_access import open_store_access
from baton.handoff.read_prefixes import ReadOrder
from baton.ids import TicketId, WorkerId, new_epoch
from baton.kv.copies import BlockTable
from baton.kv.layout import KVLayout
from baton.transfer.region import allocate_host_region, view_pages
from tests.e2e_vllm.client import wait_until
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers
from tests.integration.test_handoff_pool import CLOCK, KEY, PATIENCE_S, section

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 400_000_000
"""A fifth of a second of a GPU's time."""
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM, NUM_STAGED = 3, 64, 4, 16, 128, 24
IN_STORE = 2 * BLOCK_SIZE
IDS = np.arange(16 * BLOCK_SIZE, dtype=np.int32)
LAYOUT = KVLayout.gqa(NUM_LAYERS, NUM_HEADS, HEAD_DIM, block_size=BLOCK_SIZE, dtype="bfloat16")
ID = TicketId(b"r" * 16)
KEPT, LOADED = (
    BlockTable(0, np.random.default_rng(seed).permutation(NUM_BLOCKS)[:16].astype(np.int64))
    for seed in (1, 2)
)
record = make_recorder(DEVICE)


@dataclass
class Worker:
    """One rank without vLLM: its layers on the GPU, and its store's thread."""

    layers: list
    handoffs: HandoffDispatcher

    @property
    def prefixes(self):
        return self.handoffs.prefixes

    def wait_for(self, kind):
        events = []

        def has_come():
            events.extend(self.handoffs.poll())
            return events

        wait_until(has_come, PATIENCE_S, lambda: events)
        (event,) = events
        assert isinstance(event, kind)
        return event

    def bits(self, table):
        index = torch.from_numpy(table.blocks).to(DEVICE)
        return [layer[index].contiguous().view(torch.int16) for layer in self.layers]

    def start_keep(self, after):
        self.prefixes.start_keep(KeepOrder(ID, "", IDS, KEPT, after=after))

    def keep(self):
        self.start_keep(record())
        self.wait_for(KVSent)

    def start_load(self, after):
        order = LoadOrder(ID, "", IDS, 0, 0.0, LOADED, after=after)
        self.prefixes.start_load(order)
        return order

    def load(self):
        self.start_load(record())
        assert self.wait_for(KVLanded).num_tokens == len(IDS)

    def read(self):
        self.prefixes.start_lookup(ReadOrder(ID, "", IDS, 0, 0.0))
        found = self.wait_for(PrefixFound)
        assert (found.num_tokens, found.is_read) == (len(IDS), True)


@contextmanager
def worker(folder, order="LBHNC"):
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    layers = allocate_layers(order, shape, torch.bfloat16, DEVICE)
    region = allocate_host_region([(NUM_STAGED, LAYOUT.page_bytes(0))] * NUM_LAYERS)
    staging = DevicePages([view_canonical(layer, 2) for layer in layers], region)
    view = KVView(LAYOUT, region, staging)
    options = {"shared": {"directory": str(folder), "capacity_bytes": 64 << 20}}
    store = section(folder, block_size=IN_STORE, options=options)
    access = open_store_access(store, view, key=KEY.key, clock=CLOCK, keeps_prefixes=True)
    handoffs = open_handoffs(
        AgentOptions(
            worker=WorkerId("w"),
            epoch=new_epoch(),
            fingerprint="model",
            views=(view,),
            transports=(),
            credentials=KEY,
            clock=CLOCK,
        ),
        access,
    )
    handoffs.start(lambda: None)
    try:
        yield Worker(layers, handoffs)
    finally:
        handoffs.stop()
        staging.close()
        torch.cuda.cudart().cudaHostUnregister(
            torch.frombuffer(region.memory, dtype=torch.uint8).data_ptr()
        )


@pytest.fixture(name="pair")
def pair_fixture(tmp_path):
    with worker(tmp_path) as one, worker(tmp_path) as two:
        yield one, two


def assert_same(ours, theirs):
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", LAYOUTS)
def test_kv_is_kept_and_loaded_bit_for_bit(tmp_path, order):
    others = BlockTable(0, np.setdiff1d(np.arange(NUM_BLOCKS), LOADED.blocks))
    with worker(tmp_path, order) as one, worker(tmp_path) as two:
        one.keep()
        before = two.bits(others)
        two.load()
        assert_same(two.bits(LOADED), one.bits(KEPT))
        assert_same(two.bits(others), before)


@pytest.mark.parametrize("order", LAYOUTS)
def test_staged_pages_are_canonical(order):
    shape = (1, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    (layer,) = allocate_layers(order, shape, torch.bfloat16, DEVICE)
    region = allocate_host_region([(NUM_STAGED, LAYOUT.page_bytes(0))])
    pages = DevicePages([view_canonical(layer, 2)], region)
    staged = np.arange(16)
    pages.gather(0, KEPT.blocks, staged, record()).wait()
    found = torch.from_numpy(view_pages(region.memory, region.arrays[0]))[:16]
    planes = layer.cpu()[torch.from_numpy(KEPT.blocks)].transpose(1, 2).split(HEAD_DIM, dim=-1)
    expected = [plane.contiguous().view(torch.uint8).reshape(16, -1) for plane in planes]
    assert torch.equal(found, torch.cat(expected, dim=1))
    pages.close()


def test_blocks_are_kept_as_a_busy_stream_leaves_them(pair):
    one, two = pair
    one.keep()
    two.load()  # kernels are loaded, and wait for the device as they are
    model, ids = torch.cuda.Stream(DEVICE), IDS + 1
    torch.cuda.synchronize()
    with torch.cuda.stream(model):
        torch.cuda._sleep(BUSY_CYCLES)
        for number, layer in enumerate(one.layers):
            layer.fill_(number + 1)
        after = record()
    one.prefixes.start_keep(KeepOrder(ID, "", ids, KEPT, after=after))
    assert not after.is_done(), "the stream was not behind"
    one.wait_for(KVSent)
    two.prefixes.start_load(LoadOrder(ID, "", ids, 0, 0.0, LOADED, after=record()))
    assert two.wait_for(KVLanded).num_tokens == len(ids)
    for number, layer in enumerate(two.layers):
        assert (layer[torch.from_numpy(LOADED.blocks).to(DEVICE)] == number + 1).all()


def test_what_was_read_comes_after_steps_in_flight_and_before_the_next(pair):
    one, two = pair
    one.keep()
    two.load()
    two.read()
    index = torch.from_numpy(LOADED.blocks).to(DEVICE)
    for layer in two.layers:
        layer.fill_(3)
    model, others = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(others):  # nothing of it concerns the blocks
        for _ in range(10):
            torch.cuda._sleep(BUSY_CYCLES)
        busy = record()
    with torch.cuda.stream(model):
        torch.cuda._sleep(BUSY_CYCLES // 4)
        seen = [layer[index] for layer in two.layers]  # a step of who had the blocks before
        order = LoadOrder(ID, "", IDS, 0, 0.0, LOADED, after=record())
        assert two.prefixes.put_in_blocks(order) == len(IDS)
        now = [layer[index].contiguous().view(torch.int16) for layer in two.layers]
    model.synchronize()
    assert not busy.is_done(), "it waited for another stream"
    assert all((each == 3).all() for each in seen)
    assert_same(now, one.bits(KEPT))


def test_a_late_load_writes_nothing_into_blocks_that_were_taken_back(pair):
    one, two = pair
    one.keep()
    two.load()
    for layer in two.layers:
        layer.fill_(3)
    model = torch.cuda.Stream(DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(model):
        torch.cuda._sleep(BUSY_CYCLES)
        after = record()
    order = two.start_load(after)
    order.guard.revoke()
    assert not after.is_done(), "taking blocks back waited for the GPU"
    assert two.wait_for(KVLanded).num_tokens == 0
    torch.cuda.synchronize()
    assert all((layer == 3).all() for layer in two.layers)


def test_passes_over_other_blocks_go_on_meanwhile(pair):
    """Neither they nor the loaded and kept blocks change."""
    one, two = pair
    one.keep()
    model = torch.cuda.Stream(DEVICE)
    others = np.setdiff1d(np.arange(NUM_BLOCKS), LOADED.blocks)
    index = torch.from_numpy(others).to(DEVICE)
    for layer in two.layers:
        layer.zero_()
    torch.cuda.synchronize()
    num_passes = 0
    for _ in range(5):
        two.start_load(record())
        events = []
        while not events:
            assert num_passes < 100_000
            with torch.cuda.stream(model):
                for layer in two.layers:
                    layer.index_add_(0, index, torch.ones_like(layer[index]))
            num_passes += 1
            if num_passes % 50 == 0:
                model.synchronize()
                for layer in two.layers:
                    assert (layer[index] == 50).all()
                    layer[index] = 0
                torch.cuda.synchronize()
            events = list(two.handoffs.poll())
        assert events == [KVLanded(ID, None, len(IDS))]
        assert_same(two.bits(LOADED), one.bits(KEPT))
