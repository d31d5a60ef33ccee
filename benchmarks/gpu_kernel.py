"""Part `kernel` of `bench_gpu.py`: pages gathered and scattered within one GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_rows import Row, Spread

from baton.engines.gpu.page_copier import IndexedCopier, KernelCopier, LaunchShape
from baton.transfer.transports.cuda_ipc.copy_kernel import CopyKernel
from baton.transfer.transports.cuda_ipc.driver import load_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench_gpu import Setup

    from baton.engines.gpu.page_copier import PageCopier

LIMIT = "one contiguous copy (limit)"
MAX_LAUNCHES = 8
CYCLES_PER_S = 2_000_000_000
"""Of the GPU's clock, about: a kernel waits while the calling thread queues what is measured."""
MIN_QUEUED_S = 0.003


def describe(shape: LaunchShape) -> str:
    """For a table."""
    kib = shape.block_words * 8 // 1024
    return f"kernel, {shape.max_programs} programs, {kib} KiB by {shape.num_warps} warps"


def describe_runs(multiprocessors: int) -> str:
    """The same of `cuda_ipc`'s kernel."""
    return f"kernel of cuda_ipc, {multiprocessors} multiprocessors"


class RunCopier:
    """Gathers and scatters by the kernel of the transport `cuda_ipc`, on torch's current stream."""

    def __init__(self, multiprocessors: int) -> None:
        torch.zeros(1, device="cuda")  # torch's context is current from then on
        self._kernel = CopyKernel(load_driver(), multiprocessors)

    def gather(self, pages: torch.Tensor, index: np.ndarray, staging: torch.Tensor) -> None:
        """See `PageCopier`."""
        self._copy(locate(pages, index), locate(staging, np.arange(len(index))), pages.shape[1])

    def scatter(self, staging: torch.Tensor, index: np.ndarray, pages: torch.Tensor) -> None:
        """See `PageCopier`."""
        self._copy(locate(staging, np.arange(len(index))), locate(pages, index), pages.shape[1])

    def _copy(self, sources: np.ndarray, targets: np.ndarray, num_bytes: int) -> None:
        runs = np.stack((sources, targets, np.full_like(sources, num_bytes)), axis=1)
        self._kernel.enqueue(runs, torch.cuda.current_stream().cuda_stream)


def locate(pages: torch.Tensor, index: np.ndarray) -> np.ndarray:
    """Addresses of pages."""
    return (pages.data_ptr() + index * pages.stride(0)).astype(np.uint64)


def make_copiers(setup: Setup) -> dict[str, KernelCopier | RunCopier]:
    """The kernels, by what they take of the GPU."""
    copiers: dict[str, KernelCopier | RunCopier] = {
        describe(each): KernelCopier(each) for each in setup.shapes
    }
    for each in setup.multiprocessors:
        copiers[describe_runs(each)] = RunCopier(each)
    return copiers


def format_bytes(num_bytes: int) -> str:
    """`32 KiB`, `1 MiB`."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


@dataclass(frozen=True)
class Pages:
    """A pool of random bytes, staging for `num_launches` requests, and requests from all of it.

    Each request has other pages and another place in the staging than those before it, so that
    none of both is in the L2 cache.
    """

    pool: torch.Tensor
    staging: torch.Tensor
    requests: list[np.ndarray]

    @classmethod
    def make(
        cls, setup: Setup, page_bytes: int, memory: tuple[torch.Tensor, torch.Tensor]
    ) -> Pages:
        """Cut pool and staging into pages."""
        pool, staging = (each.view(-1, page_bytes) for each in memory)
        num = setup.num_pages
        order = np.random.default_rng(page_bytes).permutation(len(pool))
        requests = [order[at : at + num] for at in range(0, len(order) - num + 1, num)]
        return cls(pool, staging, requests)

    def places(self) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Without end: the pages of a request, and its staging."""
        num = len(self.requests[0])
        parts = [self.staging[at : at + num] for at in range(0, len(self.staging) - num + 1, num)]
        return zip(cycle(self.requests), cycle(parts), strict=False)


def time_on_device(
    setup: Setup, actions: Sequence[Callable[[], None]], queued_s: float
) -> tuple[float, float]:
    """Seconds of the device, and of the calling thread, for each action.

    The device begins after `queued_s`, in which all are queued.
    """
    if setup.device.type == "cpu":
        began = time.perf_counter()
        for action in actions:
            action()
        each_s = (time.perf_counter() - began) / len(actions)
        return each_s, each_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(queued_s * CYCLES_PER_S))  # noqa: SLF001 - as torch's own benchmarks do
    begin.record()
    began = time.perf_counter()
    for action in actions:
        action()
    calling_s = time.perf_counter() - began
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / len(actions), calling_s / len(actions)


def measure_kernel(setup: Setup) -> list[Row]:
    """Gather and scatter of scattered pages, by each of the copiers, and a contiguous copy."""
    memory = (
        torch.randint(0, 256, (setup.pool_bytes,), dtype=torch.uint8, device=setup.device),
        torch.empty(setup.staging_bytes, dtype=torch.uint8, device=setup.device),
    )
    copiers = make_copiers(setup) | {"torch's indexed copies": IndexedCopier()}
    rows = []
    for page_bytes in setup.page_sizes:
        pages = Pages.make(setup, page_bytes, memory)
        check_copiers(copiers, pages)
        for direction in ("gather", "scatter"):
            what = f"{direction} {setup.num_pages:,} x {format_bytes(page_bytes)}"
            ways = make_ways(copiers, pages, direction)
            rows += measure_ways(setup, what, setup.num_pages * page_bytes, ways)
            setup.progress(f"kernel: {what}")
    return rows


def check_copiers(copiers: dict[str, PageCopier], pages: Pages) -> None:
    """Each moves the right bytes, both ways."""
    index, staging = next(pages.places())
    expected = pages.pool[torch.from_numpy(index).to(pages.pool.device)]
    for name, copier in copiers.items():
        staging.zero_()
        copier.gather(pages.pool, index, staging)
        if not torch.equal(staging, expected):
            raise RuntimeError(f"{name}: other bytes were gathered")
        other = np.roll(index, 1)
        copier.scatter(expected, other, pages.pool)
        copier.gather(pages.pool, other, staging)
        if not torch.equal(staging, expected):
            raise RuntimeError(f"{name}: other bytes were scattered")
        copier.scatter(expected, index, pages.pool)


def make_ways(
    copiers: dict[str, PageCopier], pages: Pages, direction: str
) -> dict[str, Iterator[Callable[[], None]]]:
    """For each way, moves without end."""

    def copies(copier: PageCopier) -> Iterator[Callable[[], None]]:
        for index, staging in pages.places():
            if direction == "gather":
                yield partial(copier.gather, pages.pool, index, staging)
            else:
                yield partial(copier.scatter, staging, index, pages.pool)

    def contiguous() -> Iterator[Callable[[], None]]:
        num, at = len(pages.requests[0]), 0
        for _, staging in pages.places():
            neighbours = pages.pool[at : at + num]
            at = (at + num) % (len(pages.pool) - num + 1)
            ends = (staging, neighbours) if direction == "gather" else (neighbours, staging)
            yield partial(ends[0].copy_, ends[1])

    return {LIMIT: contiguous(), **{name: copies(each) for name, each in copiers.items()}}


def measure_ways(
    setup: Setup, what: str, num_bytes: int, ways: dict[str, Iterator[Callable[[], None]]]
) -> list[Row]:
    """One row for each way, in turns, after two rounds that do not count."""
    num_launches = max(1, min(MAX_LAUNCHES, setup.staging_bytes // num_bytes))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(setup.num_rounds + 2):
        for name, moves in ways.items():
            called_s = max((each for _, each in times[name][-1:]), default=0.0)
            queued_s = max(MIN_QUEUED_S, 2 * num_launches * called_s)
            actions = [next(moves) for _ in range(num_launches)]
            times[name].append(time_on_device(setup, actions, queued_s))
    return [
        Row(
            part="kernel",
            what=what,
            by=name,
            num_bytes=num_bytes,
            seconds=Spread.of([each for each, _ in found[2:]]),
            calling_s=Spread.of([each for _, each in found[2:]]),
        )
        for name, found in times.items()
    ]
