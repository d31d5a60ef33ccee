"""KV that stays in a GPU's memory: digests made there, engines that hand it off by `cuda_ipc`."""

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(f"needs a CUDA GPU (torch {torch.__version__} sees none)", allow_module_level=True)

from baton.auth.credentials import Credentials
from baton.engines.gpu.device_region import allocate_device_region, view_memory
from baton.engines.gpu.page_digester import digest_by_kernel, digest_by_torch
from baton.engines.interface import Colocated
from baton.engines.transformers.pages import DevicePages
from baton.handoff.probing import LinkProber
from baton.kv.device_digest import PieceParts
from baton.transfer.links.probes import PLAN, ProbeBuffer, compute_probe_digest, make_probe_copies
from tests.e2e.test_engine_handoff_agents import PROMPTS, node
from tests.e2e.test_engine_handoff_device import hand_over
from tests.unit.engines.harness import tiny_llama

DEVICE = torch.device("cuda", 0)
BUSY_CYCLES = 200_000_000
"""A tenth of a second of a GPU's time."""


def test_the_kernel_digests_as_numpy_does():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.property.page_digesting", "cuda"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page_bytes", [131_072, 16_392, 100])
def test_both_ways_agree_on_a_request(page_bytes):
    pytest.importorskip("triton")
    rng, num_pages = np.random.default_rng(0), 512
    memory = torch.randint(0, 256, (num_pages * page_bytes,), dtype=torch.uint8, device=DEVICE)
    runs = np.zeros((num_pages, 4), np.int64)
    runs[:, 0], runs[:, 1] = rng.permutation(num_pages) * page_bytes, page_bytes
    runs[:, 3] = np.arange(num_pages)
    found = [way(memory, runs, num_pages) for way in (digest_by_kernel, digest_by_torch)]
    assert torch.equal(*found)
    assert len({tuple(each) for each in found[0].tolist()}) == num_pages


@pytest.fixture(name="region")
def region_fixture():
    return allocate_device_region(DEVICE, [(64, 65_536), (64, 65_536)])


WHOLE_PAGES = PieceParts(np.array([(i, 63 - i, 0, 65_536, 0) for i in range(64)]), 64)


def test_a_digest_does_not_wait_for_the_model(region):
    access = region.device.access
    before = access.digest(range(2), WHOLE_PAGES)  # kernels are compiled
    view_memory(region)[63 * 65_536 + 5] ^= 1  # of the first piece of layer 0
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    after = access.digest(range(2), WHOLE_PAGES)
    assert not computed.query()  # the digest was not behind the model's stream
    assert before[:16] != after[:16]
    assert before[16:] == after[16:]
    torch.cuda.synchronize()


def test_a_layer_is_visible_once_the_gpu_has_written_it():
    loaded = tiny_llama()
    layout = loaded.shape.to_layout(16, loaded.dtype)
    shapes = [(8, layout.page_bytes(layer)) for layer in range(layout.num_layers)]
    pages = DevicePages(loaded.shape, layout, allocate_device_region(DEVICE, shapes))
    pages.planes[0][0][0] = 1  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    pages.publish_layer(0, np.array([0]))
    pages.publish_layer(1, np.array([0]))
    assert not list(pages.poll_published())
    assert list(pages.wait_published()) == [0, 1]


def test_a_probe_buffer_is_on_the_gpu(region):
    buffer = ProbeBuffer.allocate(region.device.access)
    assert buffer.region.kind == "cuda"
    probe = max(PLAN.probes, key=lambda each: each.num_pages)
    (copied,) = make_probe_copies(probe).groups
    array = buffer.region.arrays[0]
    pages = view_memory(buffer.region).view(array.num_pages, array.page_bytes)
    for flip in (0, 1):
        sources = torch.from_numpy(copied.src_pages).to(DEVICE)
        pages[torch.from_numpy(copied.dst_pages).to(DEVICE), : probe.page_bytes] = pages[
            sources, : probe.page_bytes
        ]
        pages[int(copied.dst_pages[0]), 0] ^= flip
        torch.cuda.synchronize()
        is_intact = buffer.try_take(probe.num_pages, compute_probe_digest(probe))
        assert is_intact == (not flip)


def gpu_node(name, key, **options):
    loaded = tiny_llama()
    on_gpu = replace(loaded, model=copy.deepcopy(loaded.model).to(DEVICE))
    return node(
        name, "cuda_ipc", key, loaded=on_gpu, allocate=partial(allocate_device_region, DEVICE),
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module", name="expected")
def expected_fixture():
    with gpu_node("alone", Credentials.generate()) as alone:
        for name in PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_engines_hand_off_in_the_gpus_memory_with_the_same_tokens(op, expected):
    key = Credentials.generate()
    with (
        gpu_node("p", key, block_size=16, max_batch_tokens=40) as prefill,
        gpu_node("d", key, op=op, block_size=8) as decode,
    ):
        hand_over(prefill, decode)
        assert decode.answers() == expected
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * len(PROMPTS)
        assert {trace.transport for trace in decode.traces.values()} == {"cuda_ipc"}
        assert decode.engine.stats().received_prompt_tokens > 0


def test_bytes_that_change_in_the_receivers_memory_are_found(expected, monkeypatch):
    """A bit of what has landed is flipped before it is digested."""
    monkeypatch.setattr(LinkProber, "ask", lambda *_: None)
    key = Credentials.generate()
    with gpu_node("p", key) as prefill, gpu_node("d", key) as decode:
        region, changed = decode.engine.region, []
        memory, digest = view_memory(region), region.device.access.digest

        def change_first(layers, parts):
            piece = parts.runs[0]
            array = region.arrays[layers.start]
            memory[array.offset_bytes + piece[1] * array.page_bytes + piece[2]] ^= 1
            torch.cuda.synchronize()
            changed.append(piece)
            return digest(layers, parts)

        monkeypatch.setattr(region.device.access, "digest", change_first)
        hand_over(prefill, decode)
        assert changed
        assert decode.answers() == expected
        reasons = [reason for trace in decode.traces.values() for reason in trace.fallbacks]
        assert reasons
        assert all("digest mismatch" in reason for reason in reasons)
