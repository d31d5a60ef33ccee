"""Part `matmul` of `bench_gpu.py`: what copies of pages take from a model on the same GPU.

The model is a bf16 product of two matrices of 8192 x 8192, again and again on one stream; copies
are on another, of normal or of high priority. Both streams wait for one event, so that all is
queued before either begins.
"""

from __future__ import annotations

import importlib
import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_kernel import CYCLES_PER_S, LIMIT, RunCopier, describe, describe_runs
from gpu_rows import BesideRow, Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench_gpu import Setup

    from baton.engines.gpu.page_copier import LaunchShape

MIN_GATE_S = 0.01
PAGE_BYTES = 32 << 10
MAX_COPIES = 300
"""Fewer than a stream takes before the calling thread has to wait."""
ALONE = "no copies"
HIGH = ", high priority"
TO_HOST = "one copy to pinned host memory"


@dataclass(frozen=True)
class Plan:
    """How many copies, and for how long they are queued before they begin."""

    num_copies: int
    gate_s: float


@dataclass(frozen=True)
class Sample:
    """One round: seconds of one product, bytes per second copied meanwhile."""

    matmul_s: float
    copied_per_s: float
    is_covered: bool


@dataclass(frozen=True)
class Way:
    """A copy, and the stream that it is given to."""

    copy: Callable[[], None]
    stream: torch.cuda.Stream


class Model:
    """The product, on the current stream. Owned by the thread that calls."""

    def __init__(self, setup: Setup) -> None:
        size, device = setup.matmul_size, setup.device
        self._factors = [
            torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2)
        ]
        self._product = torch.empty(size, size, dtype=torch.bfloat16, device=device)
        self._num = setup.num_matmuls

    def run(self, way: Way | None, plan: Plan, copy_bytes: int) -> Sample:
        """The products beside so many copies, which begin with them."""
        gate = torch.cuda.Event()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = int(plan.gate_s * CYCLES_PER_S)
        torch.cuda._sleep(cycles)  # noqa: SLF001 - as torch's own benchmarks do
        gate.record()
        copied = []
        if way is not None:
            with torch.cuda.stream(way.stream):
                way.stream.wait_event(gate)
                for _ in range(plan.num_copies):
                    way.copy()
                    copied.append(torch.cuda.Event(enable_timing=True))
                    copied[-1].record()
        begin.record()
        for _ in range(self._num):
            torch.mm(*self._factors, out=self._product)
        end.record()
        torch.cuda.synchronize()
        total_ms = begin.elapsed_time(end)
        ended_ms = [begin.elapsed_time(each) for each in copied]
        within = [each for each in ended_ms if 0 < each <= total_ms]
        rate = len(within) * copy_bytes / max(within) * 1e3 if within else 0.0
        is_covered = not copied or ended_ms[-1] >= total_ms
        return Sample(total_ms / 1e3 / self._num, rate, is_covered)

    def plan(self, way: Way, matmul_s: float) -> Plan:
        """Copies for longer than the products take, by the times of one without them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(way.stream):
            way.copy()
            torch.cuda.synchronize()
            begin.record()
            began = time.perf_counter()
            way.copy()
            calling_s = time.perf_counter() - began
            end.record()
        torch.cuda.synchronize()
        each_s = begin.elapsed_time(end) / 1e3
        num = min(MAX_COPIES, 2 + math.ceil(1.6 * self._num * matmul_s / each_s))
        return Plan(num, max(MIN_GATE_S, 1.5 * num * calling_s))


def measure_matmul(setup: Setup) -> list[BesideRow]:
    """One row for each way to copy, in turns with the product alone."""
    model, ways = Model(setup), make_ways(setup)
    nothing = Plan(0, MIN_GATE_S)
    for _ in range(3):
        alone = model.run(None, nothing, 0)
    plans = {name: model.plan(way, alone.matmul_s) for name, way in ways.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in (ALONE, *ways)}
    for number in range(setup.num_rounds + 1):
        for name, kept in samples.items():
            plan = plans.get(name, nothing)
            sample = model.run(ways.get(name), plan, setup.beside_bytes)
            if number:
                kept.append(sample)
        setup.progress(f"matmul: round {number} of {setup.num_rounds}")
    return [summarize(name, found, samples[ALONE]) for name, found in samples.items()]


def make_ways(setup: Setup) -> dict[str, Way]:
    """Copies of `beside_bytes` each: gathers of scattered pages by the kernels, and plain ones."""
    pool = torch.empty(setup.beside_pool_bytes, dtype=torch.uint8, device=setup.device)
    pages, num = pool.view(-1, PAGE_BYTES), setup.beside_bytes // PAGE_BYTES
    order = np.random.default_rng(0).permutation(len(pages))
    requests = [order[at : at + num] for at in range(0, len(order) - num + 1, num)]
    by_number = cycle(requests)
    by_tensor = cycle([torch.from_numpy(each).to(setup.device) for each in requests])
    launch = importlib.import_module("baton.engines.gpu.kernels").launch_copy
    staging = torch.empty(num, PAGE_BYTES, dtype=torch.uint8, device=setup.device)
    host = torch.empty_like(staging, device="cpu")
    if setup.device.type == "cuda":
        host = host.pin_memory()

    def gather(shape: LaunchShape) -> None:
        launch(pages, next(by_tensor), staging, None, shape=shape)

    def gather_runs(copier: RunCopier) -> None:
        copier.gather(pages, next(by_number), staging)

    normal, high = (torch.cuda.Stream(priority=each) for each in (0, -1))
    ways = {
        LIMIT: Way(lambda: staging.copy_(pages[:num]), normal),
        TO_HOST: Way(lambda: host.copy_(staging, non_blocking=True), normal),
    }
    for shape in setup.beside_shapes:
        ways[describe(shape)] = Way(partial(gather, shape), normal)
        ways[describe(shape) + HIGH] = Way(partial(gather, shape), high)
    for each in setup.multiprocessors:
        ways[describe_runs(each) + HIGH] = Way(partial(gather_runs, RunCopier(each)), high)
    return ways


def summarize(name: str, samples: list[Sample], alone: list[Sample]) -> BesideRow:
    """Medians and ranges of the rounds."""
    pairs = zip(samples, alone, strict=True)
    return BesideRow(
        by=name,
        matmul_s=Spread.of([each.matmul_s for each in samples]),
        slowdown=Spread.of([each.matmul_s / other.matmul_s for each, other in pairs]),
        copied_gb_per_s=Spread.of([each.copied_per_s / 1e9 for each in samples]),
        is_covered=all(each.is_covered for each in samples),
    )
