"""How fast pages move on a GPU: Baton beside other ways, and beside what the hardware gives.

    python benchmarks/bench_gpu.py --json benchmarks/results/gpu.json
        [--parts kernel matmul cuda_ipc host] [--peers cuda_ipc nixl] [--rounds 5]
    python benchmarks/bench_gpu.py --table benchmarks/results/gpu.json

kernel    gather and scatter of 1,024 scattered pages within the GPU: by `KernelCopier` and by the
          kernel of `cuda_ipc` on several numbers of multiprocessors, by torch's indexed copies, and
          one contiguous copy of as many bytes. No page is in the L2 cache. Seconds are the GPU's,
          of copies that were queued before.
matmul    a bf16 product of 8192 x 8192 alone, and while pages are copied on another stream.
cuda_ipc  from one process to another on the same GPU: Baton's `cuda_ipc` and NIXL (UCX), and
          within one process the kernel and one contiguous copy. Seconds of a write are from the
          call until the peer, which polls all the time, has its notification.
host      to pinned memory of the host and back: `CopyStream` with neighbours and scattered
          pages, torch's indexed copies, and one copy of as many bytes. Seconds are from the call
          until the calling thread sees the end of it.

All ways of a part are measured in turns in one run; the bytes of each are compared first. A part
that fails is reported, and the others run; the exit code is 1 then. On the CPU (`--device cpu` and
TRITON_INTERPRET=1) sizes are small, `matmul` is not measured, and figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import socket
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from gpu_rows import BesideRow, Failure, Result, Row, encode_result, format_tables

from baton.engines.gpu.page_copier import LaunchShape

PARTS: dict[str, tuple[str, str]] = {
    "kernel": ("gpu_kernel", "measure_kernel"),
    "matmul": ("gpu_matmul", "measure_matmul"),
    "cuda_ipc": ("gpu_ipc", "measure_ipc"),
    "host": ("gpu_host", "measure_host"),
}
"""Module and function of each: only what is measured is imported."""
PEERS = (
    "cuda_ipc",
    "cuda_ipc_32_multiprocessors",
    "cuda_ipc_copy_engines",
    "nixl",
    "nixl_without_error_handling",
)
PACKAGES = ("torch", "triton", "nixl-cu13", "nixl-cu12")
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured, where. The defaults are for a GPU."""

    device: torch.device
    num_rounds: int
    began: float = field(default_factory=time.monotonic)
    num_host_rounds: int = 15
    pool_bytes: int = 8 * GIB
    staging_bytes: int = 2 * GIB
    num_pages: int = 1024
    page_sizes: tuple[int, ...] = (16 * KIB, 32 * KIB, MIB)
    shapes: tuple[LaunchShape, ...] = (
        *(LaunchShape(max_programs=each) for each in (4, 8, 16, 32, 132)),
        *(LaunchShape(8, words, warps) for words, warps in ((4096, 16), (4096, 8), (2048, 8))),
    )
    beside_shapes: tuple[LaunchShape, ...] = (LaunchShape(4), LaunchShape(8), LaunchShape(32))
    multiprocessors: tuple[int, ...] = (4, 8, 16, 32, 132)
    matmul_size: int = 8192
    num_matmuls: int = 4
    beside_bytes: int = 64 * MIB
    beside_pool_bytes: int = 4 * GIB
    host_requests: tuple[tuple[int, int], ...] = (
        (64, 32 * KIB), (256, 32 * KIB), (1024, 32 * KIB), (64, MIB),
    )  # fmt: skip
    ipc_peers: tuple[str, ...]
    num_ipc_pages: int = 32_768
    num_ipc_rounds: int = 15
    ipc_requests: tuple[tuple[int, bool], ...] = (
        (1, True), (64, True), (256, True), (1024, True), (1024, False),
    )  # fmt: skip
    """Pages of 32 KiB, and whether they are scattered."""

    @classmethod
    def small(cls, device: torch.device, num_rounds: int, ipc_peers: tuple[str, ...]) -> Setup:
        """So small that Triton's interpreter gets to the end."""
        return cls(
            device=device,
            num_rounds=num_rounds,
            ipc_peers=ipc_peers,
            num_host_rounds=num_rounds,
            pool_bytes=MIB,
            staging_bytes=256 * KIB,
            num_pages=8,
            page_sizes=(16 * KIB,),
            shapes=(LaunchShape(), LaunchShape(4, 2048, 8)),
            beside_shapes=(LaunchShape(),),
            multiprocessors=(),
            matmul_size=64,
            num_matmuls=2,
            beside_bytes=64 * KIB,
            beside_pool_bytes=256 * KIB,
            host_requests=((8, 32 * KIB),),
            num_ipc_pages=256,
            num_ipc_rounds=num_rounds,
            ipc_requests=((1, True), (64, True), (64, False)),
        )

    def progress(self, text: str) -> None:
        """What is done by now."""
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)


def measure(part: str, setup: Setup) -> list[Row | BesideRow | Failure]:
    """One part. One that fails does not end the others."""
    setup.progress(f"{part}: starting")
    module, function = PARTS[part]
    try:
        return getattr(importlib.import_module(module), function)(setup)
    except Exception as exc:  # noqa: BLE001 - the others still have something to show
        traceback.print_exc()
        return [Failure(part, f"{type(exc).__name__}: {exc}")]
    finally:
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def find_versions() -> dict[str, str]:
    """Of what is measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | {"CUDA": str(torch.version.cuda)}


def time_system_calls_us() -> float:
    """The median of one send and one recv between two sockets of this process."""
    times = []
    ends = socket.socketpair()
    for _ in range(2000):
        began = time.perf_counter()
        ends[0].send(b"x")
        ends[1].recv(1)
        times.append(time.perf_counter() - began)
    for end in ends:
        end.close()
    return statistics.median(times) * 1e6


def main() -> None:
    """Measure, print the tables, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="of cuda_ipc")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the tables of such a file")
    given = parser.parse_args()
    if given.table:
        print(format_tables(msgspec.json.decode(given.table.read_bytes(), type=Result)))
        return
    device = torch.device(given.device)
    is_gpu = device.type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU here; --device cpu tries the program")
    make = Setup if is_gpu else Setup.small
    setup = make(device=device, num_rounds=given.rounds, ipc_peers=tuple(given.peers))
    result = Result(
        command=" ".join(["python", "benchmarks/bench_gpu.py", *sys.argv[1:]]),
        gpu=torch.cuda.get_device_name(device) if is_gpu else f"no GPU ({os.cpu_count()} cores)",
        versions=find_versions(),
        system_calls_us=time_system_calls_us(),
    )
    for part in given.parts:
        result.add(measure(part, setup))
        if given.json:  # after each part: a driver's or a library's fault ends the process
            given.json.write_bytes(encode_result(result))
    print(format_tables(result))
    sys.exit(1 if result.failures else 0)


if __name__ == "__main__":
    main()
