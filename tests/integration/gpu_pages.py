"""A worker whose KV is in a GPU's memory, in one of vLLM's layouts; the host's is in its place."""

from __future__ import annotations

import ctypes
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.engines.gpu.device_region import register_pages
from baton.handoff.kv_views import KVView
from baton.transfer.region import release_region, view_pages
from tests import host_device
from tests.gpu.vllm_layouts import view_layers
from tests.integration.handoff_nodes import NUM_BLOCKS, NUM_LAYERS, Pages, make_layout, node
from tests.unit.handoff.orders import send_order

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from baton.errors import TransferError
    from baton.kv.layout import KVLayout
    from tests.integration.handoff_nodes import Handoff, Node

BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 16, 2, 8


@dataclass
class HeldPosition:
    """A `StreamPosition` that a test reaches."""

    is_reached: bool = False
    error: TransferError | None = None
    num_looks: int = 0

    def is_done(self) -> bool:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return self.is_reached

    def wait(self) -> None:
        raise AssertionError("the agent waits for the GPU")


@contextmanager
def gpu_pages(order: str = "LBHNC") -> Iterator[Pages]:
    """Pages where an engine allocated them."""
    layout = opaque_layout(order)
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    memory = host_device.allocate_region([(1, math.prod(shape) * 4)])
    values = torch.frombuffer(memory.memory, dtype=torch.float32)
    region = register_pages(view_layers(order, shape, values))
    own = [view_pages(memory.memory, array) for array in region.arrays]
    try:
        yield Pages(layout, own, (KVView(layout, region),))
    finally:
        own.clear()
        release_region(memory)


def opaque_layout(order: str) -> KVLayout:
    """Of pages in one of vLLM's orders."""
    layout = make_layout(BLOCK_SIZE)
    arrangement = f"vllm-cuda/test/{order}"
    return msgspec.structs.replace(layout, order="opaque", arrangement=arrangement)


@contextmanager
def gpu_node(
    name: str, key: Credentials, *, order: str = "LBHNC", **options: Any
) -> Iterator[Node]:
    with (
        gpu_pages(order) as pages,
        node(
            name,
            kinds=("cuda_ipc",),
            key=key,
            pages=pages,
            build=host_device.build_transport,
            **options,
        ) as running,
    ):
        yield running


def sent_pages(handoff: Handoff) -> list[bytes]:
    """What the prefill worker has in the prompt's blocks, layer by layer."""
    blocks = handoff.sending.blocks.blocks
    return [pages[blocks].tobytes() for pages in handoff.prefill.pages.own]


def received_pages(handoff: Handoff) -> list[bytes]:
    """What the decode worker has in its blocks for it."""
    blocks = handoff.receiving.blocks.blocks
    return [pages[blocks].tobytes() for pages in handoff.decode.pages.own]


UNDER_WAY = "under way"


def run_prefill(secret: bytes, pipe: Connection) -> None:
    """A prefill worker that copies half of its first run, reports that, and stands still."""
    move, has_moved = ctypes.memmove, threading.Event()

    def move_half(destination: int, source: int, num_bytes: int) -> None:
        if not has_moved.is_set():
            move(destination, source, num_bytes // 2)
            has_moved.set()
            pipe.send(UNDER_WAY)
        threading.Event().wait()

    ctypes.memmove = move_half  # type: ignore[assignment]
    with gpu_node("p", Credentials.of(ClusterKey(secret))) as prefill:
        for pages in prefill.pages.own:
            pages[:] = np.uint8(0xA5)
        pipe.send(prefill.ref)
        ticket = pipe.recv()
        prefill.agent.start_send(send_order(ticket, num_tokens=101, num_ready_tokens=101))
        threading.Event().wait()
