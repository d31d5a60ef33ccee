"""KV in a device's memory goes from engine to engine by `cuda_ipc`.

Memory of this host is in place of the device's (`tests.host_device`): bytes are copied late
and in halves, by another thread.
"""

import ctypes
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import torch

from baton.auth.credentials import Credentials
from baton.engines.gpu.device_region import TensorAccess
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.handoff.probing import LinkProber
from tests import host_device
from tests.e2e.test_engine_handoff_agents import PROMPTS, make_ticket, node
from tests.host_device import HostDevice


def allocate_region(shapes):
    region = host_device.allocate_region(shapes)
    memory = torch.frombuffer(region.memory, dtype=torch.uint8)
    access = TensorAccess(memory, region.arrays, allocate_region)
    return replace(region, device=replace(region.device, access=access))


def make_transport(kind, context):
    return host_device.build_transport(kind, {})(context)


def device_node(name, key, **options):
    return node(name, "cuda_ipc", key, make=make_transport, allocate=allocate_region, **options)


@pytest.fixture(scope="module", name="expected")
def expected_fixture():
    with node("alone", "tcp", Credentials.generate()) as alone:
        for name in PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


def hand_over(prefill, decode):
    for name in PROMPTS:
        ticket = make_ticket(prefill, decode)
        decode.submit(name, DecodeRequest(ticket))
        prefill.submit(name, PrefillRequest(ticket))
    decode.wait_for_ends()
    prefill.wait_for_ends()


@pytest.mark.parametrize(
    ("op", "layer_batch_bytes"), [("WRITE", 0), ("WRITE", 1 << 20), ("READ", 1 << 20)]
)
def test_pages_go_from_device_to_device_and_give_the_same_tokens(op, layer_batch_bytes, expected):
    """Pages of two sizes, prompts that end within one, layers one by one and together."""
    key = Credentials.generate()
    with (
        device_node(
            "p", key, block_size=16, max_batch_tokens=40, layer_batch_bytes=layer_batch_bytes
        ) as prefill,
        device_node("d", key, op=op, block_size=8) as decode,
    ):
        assert prefill.engine.region.kind == decode.engine.region.kind == "cuda"
        hand_over(prefill, decode)
        assert decode.answers() == expected
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * len(PROMPTS)
        assert {trace.transport for trace in decode.traces.values()} == {"cuda_ipc"}
        assert decode.engine.stats().received_prompt_tokens > 0


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_flipped_bit_is_found_and_the_prompt_computed_instead(op, expected, monkeypatch):
    flipped, move = [], ctypes.memmove

    def flip(destination, source, num_bytes):
        move(destination, source, num_bytes)
        byte = ctypes.c_ubyte.from_address(destination + num_bytes // 2)
        byte.value ^= 1
        flipped.append(destination)

    monkeypatch.setattr(LinkProber, "ask", lambda *_: None)  # probes would be changed, too
    monkeypatch.setattr(host_device.ctypes, "memmove", flip)
    key = Credentials.generate()
    with device_node("p", key) as prefill, device_node("d", key, op=op) as decode:
        hand_over(prefill, decode)
        assert flipped
        assert decode.answers() == expected
        reasons = [reason for trace in decode.traces.values() for reason in trace.fallbacks]
        assert reasons
        assert all("digest mismatch" in reason for reason in reasons)
        assert decode.engine.stats().received_prompt_tokens == 0


def test_links_are_measured_in_memory_of_the_device():
    """Probe buffers are on the device, or `cuda_ipc` could not move them."""
    key = Credentials.generate()
    with device_node("p", key) as prefill, device_node("d", key) as decode:
        ticket = make_ticket(prefill, decode)
        decode.submit("r3", DecodeRequest(ticket))
        prefill.submit("r3", PrefillRequest(ticket))
        decode.wait_for_ends()
        (report,) = prefill.agent.describe_links().result(5)
        assert report.transport == "cuda_ipc"
        buffer = prefill.agent.loop._probe_target.region
        assert buffer.kind == "cuda"
        assert HostDevice(0).export(buffer.device.address)
