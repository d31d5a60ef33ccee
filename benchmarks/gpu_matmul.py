"""Part `matmul` of `bench_gpu.py`: what copies of pages take from a model on the same GPU.

The model is a bf16 product of two matrices of 8192 x 8192, again and again on one stream; copies
are on another. Both streams wait for one event, so that all is queued before either begins.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_kernel import LIMIT, describe
from gpu_rows import BesideRow, Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench_gpu import Setup

GATE_CYCLES = 40_000_000
"""Some 20 ms, in which the calling thread queues what is measured."""
PAGE_BYTES = 32 << 10
MAX_COPIES = 400
"""Fewer than a stream takes before it lets the calling thread wait."""
ALONE = "no copies"
TO_HOST = "one copy to pinned host memory"


@dataclass(frozen=True)
class Sample:
    """One round: seconds of one product, bytes per second copied meanwhile."""

    matmul_s: float
    copied_per_s: float
    is_covered: bool


class Model:
    """The product, and the two streams. Owned by the thread that calls."""

    def __init__(self, setup: Setup) -> None:
        size, device = setup.matmul_size, setup.device
        self._factors = [
            torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2)
        ]
        self._product = torch.empty(size, size, dtype=torch.bfloat16, device=device)
        self._num, self._copying = setup.num_matmuls, torch.cuda.Stream()

    def run(self, copy: Callable[[], None] | None, num_copies: int, copy_bytes: int) -> Sample:
        """The products beside so many copies, which begin with them."""
        gate = torch.cuda.Event()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(GATE_CYCLES)  # noqa: SLF001 - as torch's own benchmarks do
        gate.record()
        copied = []
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(gate)
            for _ in range(num_copies):
                copy()
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

    def time_copy(self, copy: Callable[[], None]) -> float:
        """Seconds of one copy without the product."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._copying):
            copy()
            begin.record()
            copy()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def measure_matmul(setup: Setup) -> list[BesideRow]:
    """One row for each way to copy, in turns with the product alone."""
    model, copies = Model(setup), make_copies(setup)
    for _ in range(3):
        alone = model.run(None, 0, 0)
    nums = {
        name: min(
            MAX_COPIES,
            2 + math.ceil(1.6 * setup.num_matmuls * alone.matmul_s / model.time_copy(copy)),
        )
        for name, copy in copies.items()
    }
    samples: dict[str, list[Sample]] = {name: [] for name in (ALONE, *copies)}
    for number in range(setup.num_rounds + 1):
        for name, kept in samples.items():
            num = nums.get(name, 0)
            sample = model.run(copies.get(name), num, setup.beside_bytes)
            if not sample.is_covered:
                nums[name] = min(MAX_COPIES, 2 * num)
            if number:
                kept.append(sample)
        setup.progress(f"matmul: round {number} of {setup.num_rounds}")
    return [summarize(name, found, samples[ALONE]) for name, found in samples.items()]


def make_copies(setup: Setup) -> dict[str, Callable[[], None]]:
    """Copies of `beside_bytes` each: gathers of scattered pages by the kernel, and plain ones."""
    launch = importlib.import_module("baton.engines.gpu.kernels").launch_copy
    pool = torch.empty(setup.beside_pool_bytes, dtype=torch.uint8, device=setup.device)
    pages, num = pool.view(-1, PAGE_BYTES), setup.beside_bytes // PAGE_BYTES
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(pages))).to(setup.device)
    requests = cycle(order[at : at + num] for at in range(0, len(order) - num + 1, num))
    staging = torch.empty(num, PAGE_BYTES, dtype=torch.uint8, device=setup.device)
    host = torch.empty_like(staging, device="cpu")
    if setup.device.type == "cuda":
        host = host.pin_memory()

    def gather(shape: object) -> None:
        launch(pages, next(requests), staging, None, shape=shape)

    return {
        LIMIT: lambda: staging.copy_(pages[:num]),
        TO_HOST: lambda: host.copy_(staging, non_blocking=True),
        **{describe(each): partial(gather, each) for each in setup.shapes},
    }


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
