"""Ranks of vLLM servers on GPUs and a store: memory of this host in a GPU's place, real entries.

Positions of the GPU's stream are reached when the test wants it. `tests/gpu/test_vllm_store.py` is
on a GPU.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from baton.clock import MachineClock
from baton.config.sections import StoreSection
from baton.engines.gpu.copy_stream import CopyEvent
from baton.engines.vllm import kv_views, rank
from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.layouts import Arrangement
from baton.engines.vllm.step_orders import (
    Keep,
    LookUp,
    PrefixOrders,
    Progress,
    Prompt,
    StartLoad,
    StartReceive,
    StartSend,
    StepOrders,
    StepReport,
    Withdraw,
)
from baton.transfer.interface import TRANSPORTS
from tests import host_device
from tests.integration.test_vllm_rank import OpenRank
from tests.unit.engines_vllm.caches import BLOCK_SIZE
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_TOKENS = 4 * BLOCK_SIZE
KEPT, LOADED = (2, 3, 9, 4), (7, 1, 5, 6)
PATIENCE_S = 20.0


@dataclass
class Stream:
    """In place of a GPU's stream: what is recorded is reached once it is not `busy`."""

    idle: threading.Event = field(default_factory=threading.Event)
    num_recorded: int = 0
    num_looks: int = 0
    num_waiting: int = 0

    def record(self) -> CopyEvent:
        self.num_recorded += 1
        return CopyEvent(self)  # type: ignore[arg-type]

    # As `torch.Event`.

    def query(self) -> bool:
        self.num_looks += 1
        return self.idle.is_set()

    def synchronize(self) -> None:
        self.num_waiting += not self.idle.is_set()
        assert self.idle.wait(PATIENCE_S)


@pytest.fixture(name="stream")
def stream_fixture(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    stream.idle.set()
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    build = TRANSPORTS.build
    on_host = {"cuda_ipc": host_device.build_transport}
    monkeypatch.setattr(
        TRANSPORTS, "build", lambda kind, options: on_host.get(kind, build)(kind, options)
    )
    monkeypatch.setattr(rank, "make_recorder", lambda _: stream.record)
    found = Arrangement("cuda", ("flash_attn",), "LBHNC")
    monkeypatch.setattr(kv_views, "find_arrangement", lambda *_: found)
    return stream


@contextmanager
def gpu_rank(tmp_path: Path, name: str, **options: Any) -> Iterator[OpenRank]:
    """Its layers have numbers of their own; it shares a store with others of its folder."""
    store = StoreSection(
        tiers=("file",), block_size=BLOCK_SIZE, options={"file": {"directory": str(tmp_path / "s")}}
    )
    given = {"transports": ("cuda_ipc",), "store": store, **options}
    opened = OpenRank(tmp_path / "model", name, "both", "cuda", **given)
    try:
        for tensor in opened.tensors.values():
            tensor.copy_(torch.randn_like(tensor))
        yield opened
    finally:
        opened.rank.close()


def packed_ids(num_tokens: int) -> bytes:
    return np.arange(num_tokens, dtype=np.int32).tobytes()


def step(opened: OpenRank, orders: PrefixOrders | None = None) -> tuple[set[str], StepReport]:
    """Requests whose loads are over, and the report."""
    handoffs = opened.handoffs
    handoffs.begin_step(StepOrders(prefixes=orders))
    handoffs.end_step()
    _, received = handoffs.get_finished(set(), 0.005)
    return received, handoffs.take_report() or StepReport()


def keep(opened: OpenRank, num_tokens: int = NUM_TOKENS) -> None:
    _, report = step(opened, PrefixOrders(keeps=(Keep("k", "", packed_ids(num_tokens), KEPT),)))
    wait_for_kept(opened, report)


def wait_for_kept(opened: OpenRank, report: StepReport) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while report.kept != ("k",):
        assert time.monotonic() < deadline
        _, report = step(opened)


def start_load(num_tokens: int = NUM_TOKENS) -> StartLoad:
    return StartLoad("r", "", packed_ids(num_tokens), 0, 0.0, None, 0, LOADED)


def blocks_of(opened: OpenRank, blocks: tuple[int, ...]) -> list[torch.Tensor]:
    return [tensor[list(blocks)].clone() for tensor in opened.tensors.values()]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_what_one_gpu_keeps_another_loads_between_steps(
    tmp_path: Path, stream: Stream, transport: str
) -> None:
    with (
        gpu_rank(tmp_path, "pp", transports=(transport,)) as one,
        gpu_rank(tmp_path, "dd", transports=(transport,)) as two,
    ):
        assert isinstance(one.rank._store_view.staging, DevicePages)
        keep(one)
        received, _ = step(two, PrefixOrders(loads=(start_load(),)))
        deadline = time.monotonic() + PATIENCE_S
        while received != {"r"}:
            assert time.monotonic() < deadline
            received, _ = step(two)
        assert not two.handoffs.take_invalid_blocks()
        assert are_equal(blocks_of(two, LOADED), blocks_of(one, KEPT))
        assert stream.num_recorded == 2, "one for each order with blocks"


def test_what_was_read_is_in_a_gpus_blocks_when_the_step_begins(
    tmp_path: Path, stream: Stream
) -> None:
    """Steps that the GPU has yet to compute may use them: the copy comes after these."""
    with gpu_rank(tmp_path, "pp") as one, gpu_rank(tmp_path, "dd") as two:
        keep(one)
        ids = packed_ids(NUM_TOKENS + 5)
        _, report = step(two, PrefixOrders(lookups=(LookUp("r", "", ids, 0, 0.0, None),)))
        deadline = time.monotonic() + PATIENCE_S
        while report.read != ("r",):
            assert time.monotonic() < deadline
            _, report = step(two)
        assert report.found == (("r", NUM_TOKENS),)
        before = stream.num_recorded
        two.handoffs.begin_step(StepOrders(prefixes=PrefixOrders(read_loads=(start_load(),))))
        assert are_equal(blocks_of(two, LOADED), blocks_of(one, KEPT))
        assert stream.num_recorded == before + 1
        two.handoffs.end_step()


def test_blocks_are_kept_as_the_gpu_leaves_them(tmp_path: Path, stream: Stream) -> None:
    with gpu_rank(tmp_path, "pp") as one, gpu_rank(tmp_path, "dd") as two:
        stream.idle.clear()
        step(one, PrefixOrders(keeps=(Keep("k", "", packed_ids(NUM_TOKENS), KEPT),)))
        wait_until_waiting(one, stream)
        for tensor in one.tensors.values():
            tensor.copy_(torch.randn_like(tensor))  # what the GPU had been given to compute
        stream.idle.set()
        wait_for_kept(one, StepReport())
        received, _ = step(two, PrefixOrders(loads=(start_load(),)))
        deadline = time.monotonic() + PATIENCE_S
        while received != {"r"}:
            assert time.monotonic() < deadline
            received, _ = step(two)
        assert are_equal(blocks_of(two, LOADED), blocks_of(one, KEPT))


def test_mode_pool_sends_layers_as_the_gpu_leaves_them(tmp_path: Path, stream: Stream) -> None:
    num_tokens, sent, landed = NUM_TOKENS + 5, (*KEPT, 0), (*LOADED, 8)
    with gpu_rank(tmp_path, "pp") as one, gpu_rank(tmp_path, "dd") as two:
        ticket = make_ticket(one.ref, two.ref, "pool")
        now = MachineClock().now()
        prompt = Prompt(ticket, PROMPT_HASH, num_tokens, now, packed_ids(num_tokens))
        expected = StartReceive("r", prompt, 0, 0, landed)
        two.handoffs.begin_step(StepOrders(expected=(expected,)))
        two.handoffs.end_step()
        stream.idle.clear()
        offers, progress = (
            StartSend("r", prompt, 0),
            Progress("r", 0, sent, num_tokens, is_last=True),
        )
        one.handoffs.begin_step(StepOrders(offers=(offers,), progress=(progress,)))
        one.handoffs.forward_launched()
        one.handoffs.end_step()
        deadline = time.monotonic() + PATIENCE_S
        while not stream.num_looks:
            assert time.monotonic() < deadline
            step(one)
        for tensor in one.tensors.values():
            tensor.copy_(torch.randn_like(tensor))  # what the GPU had been given to compute
        stream.idle.set()
        received: set[str] = set()
        while received != {"r"}:
            assert time.monotonic() < deadline
            step(one)
            received, _ = step(two)
        assert not two.handoffs.take_invalid_blocks()
        assert are_equal(blocks_of(two, LOADED), blocks_of(one, KEPT))
        tails = [
            [each[0, :, :5] for each in blocks_of(opened, (block,))]
            for opened, block in ((one, 0), (two, 8))
        ]
        assert are_equal(*tails)


@pytest.mark.usefixtures("stream")
def test_mode_pool_reports_why_a_prompt_was_withdrawn(tmp_path: Path) -> None:
    """Its KV is never offered; the note that it leaves for decode has the reason."""
    with gpu_rank(tmp_path, "pp") as one, gpu_rank(tmp_path, "dd") as two:
        ticket = make_ticket(one.ref, two.ref, "pool")
        now = MachineClock().now()
        prompt = Prompt(ticket, PROMPT_HASH, NUM_TOKENS, now, packed_ids(NUM_TOKENS))
        two.handoffs.begin_step(StepOrders(expected=(StartReceive("r", prompt, 0, 0, LOADED),)))
        two.handoffs.end_step()
        one.handoffs.begin_step(StepOrders(withdrawn=(Withdraw(prompt, "its client has left"),)))
        one.handoffs.end_step()
        deadline = time.monotonic() + PATIENCE_S
        received: set[str] = set()
        while received != {"r"}:
            assert time.monotonic() < deadline
            received, _ = step(two)
        trace = two.handoffs._observer._traces.find(ticket.request_id)
        assert trace is not None
        assert trace.fallbacks == ["computed locally: its client has left"]


def test_a_late_load_writes_nothing_into_blocks_that_were_taken_back(
    tmp_path: Path, stream: Stream
) -> None:
    with gpu_rank(tmp_path, "pp") as one, gpu_rank(tmp_path, "dd") as two:
        keep(one)
        before = blocks_of(two, LOADED)
        stream.idle.clear()
        step(two, PrefixOrders(loads=(start_load(),)))
        wait_until_waiting(two, stream)
        prefixes = two.handoffs._prefixes
        (order,) = prefixes._open
        prefixes._open[order].deadline = prefixes._open[order].began_at
        received, _ = step(two)
        assert received == {"r"}, "it is not waited for"
        assert two.handoffs.take_invalid_blocks() == set(LOADED)
        stream.idle.set()
        deadline = time.monotonic() + PATIENCE_S
        while order in prefixes:
            assert time.monotonic() < deadline
            step(two)
        assert are_equal(blocks_of(two, LOADED), before)


def wait_until_waiting(opened: OpenRank, stream: Stream) -> None:
    """Until the store's thread waits for the GPU; no step waits with it."""
    deadline = time.monotonic() + PATIENCE_S
    while not stream.num_waiting:
        assert time.monotonic() < deadline
        step(opened)
