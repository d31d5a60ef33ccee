"""How fast a GPU digests pages, on how many multiprocessors, and what it costs the model.

    python benchmarks/bench_page_digests.py [--json benchmarks/results/page_digests.json]

1. The kernel alone: GB/s for page sizes and launches (programs, runs and words at once, warps).
2. `PageDigester.digest` as a handoff calls it: one layer's pages, from call to digests on the host.
3. A stream of matrix products with and without a digest running beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.engines.gpu import digest_kernel
from baton.engines.gpu.page_digester import PageDigester, digest_by_kernel, digest_by_torch
from baton.kv.device_digest import PieceParts
from baton.transfer.interface import PageArray

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("cuda", 0)
TOTAL_BYTES = 1 << 30
REPETITIONS = 7


def main() -> None:
    """Run the parts; a part that fails is reported, and the next one runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory = torch.randint(0, 256, (TOTAL_BYTES,), dtype=torch.uint8, device=DEVICE)
    record: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
    }
    for part in (measure_launches, measure_calls, measure_interference):
        began_at = time.perf_counter()
        try:
            rows: object = part(memory)
        except Exception as exc:  # noqa: BLE001 - a run on a lent machine shows all that it can
            rows = f"failed: {type(exc).__name__}: {exc}"
            print(part.__name__, rows)
        record[part.__name__] = rows
        print(f"{part.__name__}: {time.perf_counter() - began_at:.1f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure_launches(memory: torch.Tensor) -> list[dict[str, float]]:
    """GB/s of the kernel by page size and launch; torch's own operations once."""
    rows = []
    default = (
        digest_kernel.MAX_PROGRAMS, digest_kernel.TILE_RUNS,
        digest_kernel.BLOCK_WORDS, digest_kernel.NUM_WARPS,
    )  # fmt: skip
    launches = [
        *((programs, *default[1:]) for programs in (8, 16, 32, 64, 128, 264, 528)),
        *itertools.product((128,), (1, 2, 4, 8), (512, 1024, 2048), (4, 8)),
    ]
    for page_bytes, launch in itertools.product((16_384, 131_072), dict.fromkeys(launches)):
        _set_launch(*launch)
        runs = _make_runs(page_bytes, 256 << 20)
        seconds = _time_kernel(memory, runs)
        gb_per_s = round(float(runs[:, 1].sum()) / seconds / 1e9, 1)
        rows.append({"page_bytes": page_bytes, "gb_per_s": gb_per_s} | dict(zip(
            ("programs", "runs", "words", "warps"), launch, strict=True)))  # fmt: skip
        print(rows[-1], flush=True)
    _set_launch(*default)
    runs = _make_runs(131_072, 64 << 20)
    seconds = _time(lambda: digest_by_torch(memory, runs, len(runs)))
    rows.append({"torch": 1, "gb_per_s": round(float(runs[:, 1].sum()) / seconds / 1e9, 1)})
    print(rows[-1], flush=True)
    return rows


def measure_calls(memory: torch.Tensor) -> list[dict[str, float]]:
    """Microseconds of `PageDigester.digest` for one layer of some pages."""
    rows = []
    for page_bytes, num_pages in (
        (16_384, 1),
        (16_384, 64),
        (16_384, 512),
        (131_072, 256),
        (131_072, 1024),
    ):
        array = PageArray(0, page_bytes, TOTAL_BYTES // page_bytes)
        digester = PageDigester(memory, (array,))
        pages = np.random.default_rng(0).permutation(array.num_pages)[:num_pages]
        parts = PieceParts(
            np.array([(i, page, 0, page_bytes, 0) for i, page in enumerate(pages)]), num_pages
        )
        digester.digest(range(1), parts)
        times = []
        for _ in range(5 * REPETITIONS):
            began_at = time.perf_counter()
            digester.digest(range(1), parts)
            times.append(time.perf_counter() - began_at)
        seconds = statistics.median(times)
        rows.append({
            "page_bytes": page_bytes, "pages": num_pages, "us": round(1e6 * seconds, 1),
            "gb_per_s": round(num_pages * page_bytes / seconds / 1e9, 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def measure_interference(memory: torch.Tensor) -> dict[str, float]:
    """Milliseconds of 50 matrix products, alone and with digests beside them."""
    one, other = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    runs = _make_runs(131_072, 512 << 20)
    beside = torch.cuda.Stream(priority=-1)

    def multiply() -> None:
        for _ in range(50):
            torch.mm(one, other)

    alone = _time(multiply)

    def multiply_beside() -> None:
        with torch.cuda.stream(beside):
            for _ in range(8):
                digest_by_kernel(memory, runs, len(runs))
        multiply()

    together = [_time_on_current(multiply_beside) for _ in range(REPETITIONS)]
    row = {
        "alone_ms": round(1e3 * alone, 2),
        "with_digests_ms": round(1e3 * statistics.median(together), 2),
    }
    print(row, flush=True)
    return row


def _set_launch(programs: int, runs: int, words: int, warps: int) -> None:
    digest_kernel.MAX_PROGRAMS, digest_kernel.TILE_RUNS = programs, runs
    digest_kernel.BLOCK_WORDS, digest_kernel.NUM_WARPS = words, warps


def _make_runs(page_bytes: int, num_bytes: int) -> np.ndarray:
    """Pages all over the memory, in no order; each is a piece."""
    pages = np.random.default_rng(0).permutation(TOTAL_BYTES // page_bytes)
    pages = pages[: num_bytes // page_bytes]
    runs = np.zeros((len(pages), 4), np.int64)
    runs[:, 0], runs[:, 1], runs[:, 3] = pages * page_bytes, page_bytes, np.arange(len(pages))
    return runs


def _time_kernel(memory: torch.Tensor, runs: np.ndarray) -> float:
    """Seconds of the kernel: no upload, no call."""
    on_device = torch.from_numpy(digest_kernel.make_tiles(runs)).to(DEVICE)
    sums = torch.zeros(len(runs), 2, dtype=torch.int64, device=DEVICE)
    return _time(lambda: digest_kernel.launch_digests(memory, on_device, sums, 8))


def _time(do: Callable[[], object]) -> float:
    """Seconds on the device, the median of some runs."""
    do()
    return statistics.median(_time_on_current(do) for _ in range(REPETITIONS))


def _time_on_current(do: Callable[[], object]) -> float:
    """Seconds of the current stream, which begins idle."""
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    do()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3


if __name__ == "__main__":
    main()
