"""Part `host` of `bench_gpu.py`: pages between a GPU and pinned memory of the host.

Beside Baton's copy stream: one copy of as many bytes (what PCIe gives), and what takes the fewest
lines of torch, which waits until the copy has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_kernel import LIMIT, format_bytes
from gpu_rows import Row, Spread

from baton.engines.gpu.copy_stream import CopyStream, pin_memory
from baton.transfer.region import allocate_shared_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench_gpu import Setup

    from baton.transfer.interface import PagedRegion

    Start = Callable[[np.ndarray], Callable[[], object] | None]
    """Begins a copy of these pages; what waits for its end, or None where it has ended."""


def measure_host(setup: Setup) -> list[Row]:
    """Requests of several sizes, to the host and back."""
    rows = []
    for num_pages, page_bytes in setup.host_requests:
        memory = HostMemory.make(setup, num_pages, page_bytes)
        for direction, starts in (("to host", memory.to_host()), ("back", memory.to_device())):
            what = f"{direction} {num_pages:,} x {format_bytes(page_bytes)}"
            rows += measure_starts(setup, memory, what, starts)
            setup.progress(f"host: {what}")
        memory.close()
    return rows


SIMPLE = "torch's index_select and index_copy_, scattered on the GPU"


@dataclass(frozen=True)
class HostMemory:
    """Pages on the device and on the host, four times as many as a request has."""

    num_pages: int
    pages: torch.Tensor
    host: torch.Tensor
    region: PagedRegion
    stream: CopyStream

    @classmethod
    def make(cls, setup: Setup, num_pages: int, page_bytes: int) -> HostMemory:
        """Random bytes on the device; the host's memory is pinned, as an engine's mirror is."""
        region = allocate_shared_region([(4 * num_pages, page_bytes)])
        pin_memory(region.memory, setup.device)
        host = torch.from_numpy(view_pages(region.memory, region.arrays[0]))
        pages = torch.randint(0, 256, host.shape, dtype=torch.uint8, device=setup.device)
        return cls(num_pages, pages, host, region, CopyStream(setup.device))

    def close(self) -> None:
        """Unpin it: addresses that are given back while they are pinned cannot be pinned again."""
        if self.pages.is_cuda:
            torch.cuda.synchronize()
            cudart = torch.cuda.cudart()
            error = cudart.cudaHostUnregister(self.host.data_ptr())
            if int(error):
                raise RuntimeError(f"cudaHostUnregister: {error}")

    def to_host(self) -> dict[str, Start]:
        """By name. What is not scattered is one run, from page 0 on."""
        run, pages, host = np.arange(self.num_pages), self.pages, self.host
        stream, num = self.stream, self.num_pages
        return {
            LIMIT: lambda _: self._end_of(host[:num].copy_(pages[:num], non_blocking=True)),
            "copy stream, neighbours": lambda _: stream.to_host(pages, run, host, run).wait,
            "copy stream, scattered on the GPU": lambda at: (
                stream.to_host(pages, at, host, run).wait
            ),
            "copy stream, scattered on both": lambda at: stream.to_host(pages, at, host, at).wait,
            SIMPLE: self._gather,
        }

    def to_device(self) -> dict[str, Start]:
        """The other way round."""
        run, pages, host = np.arange(self.num_pages), self.pages, self.host
        stream, num = self.stream, self.num_pages
        return {
            LIMIT: lambda _: self._end_of(pages[:num].copy_(host[:num], non_blocking=True)),
            "copy stream, neighbours": lambda _: stream.to_device(host, run, pages, run).wait,
            "copy stream, scattered on the GPU": lambda at: (
                stream.to_device(host, run, pages, at).wait
            ),
            "copy stream, scattered on both": lambda at: stream.to_device(host, at, pages, at).wait,
            SIMPLE: self._scatter,
        }

    def check(self, name: str, direction: str, index: np.ndarray) -> None:
        """Refuse a figure of a copy that moved other bytes."""
        run = np.arange(self.num_pages)
        on_device = index if "scattered" in name else run
        on_host = index if "on both" in name else run
        if not torch.equal(self.pages[on_device].cpu(), self.host[on_host]):
            raise RuntimeError(f"{name}, {direction}: other bytes")

    def spoil(self, direction: str) -> None:
        """Other bytes at the target, so that a check proves a copy."""
        source, target = (
            (self.pages, self.host) if direction.startswith("to host") else (self.host, self.pages)
        )
        target.fill_(1)
        if source is self.host:
            source.random_(0, 256)
        if self.pages.device.type == "cuda":
            torch.cuda.synchronize()

    def _gather(self, index: np.ndarray) -> None:
        self.host[: self.num_pages].copy_(self.pages.index_select(0, self._upload(index)))

    def _scatter(self, index: np.ndarray) -> Callable[[], object] | None:
        taken = self.host[: self.num_pages].to(self.pages.device)
        return self._end_of(self.pages.index_copy_(0, self._upload(index), taken))

    def _upload(self, index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(index).to(self.pages.device)

    def _end_of(self, target: torch.Tensor) -> Callable[[], object] | None:
        del target  # it is on the current stream by now
        return torch.cuda.current_stream().synchronize if self.pages.is_cuda else None


def measure_starts(
    setup: Setup, memory: HostMemory, what: str, starts: dict[str, Start]
) -> list[Row]:
    """One row for each, in turns; the first round checks, and does not count."""
    random = np.random.default_rng(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for number in range(setup.num_host_rounds + 1):
        for name, start in starts.items():
            index = random.permutation(len(memory.pages))[: memory.num_pages]
            if not number:
                memory.spoil(what)
            began = time.perf_counter()
            wait = start(index)
            called = time.perf_counter()
            if wait is not None:
                wait()
            ended = time.perf_counter()
            if number:
                times[name].append((ended - began, called - began))
            else:
                memory.check(name, what, index)
    num_bytes = memory.num_pages * memory.pages.shape[1]
    return [
        Row(
            part="host",
            what=what,
            by=name,
            num_bytes=num_bytes,
            seconds=Spread.of([each for each, _ in found]),
            calling_s=Spread.of([each for _, each in found]),
        )
        for name, found in times.items()
    ]
