"""What the first write to a page of a fresh mapping costs, next to a warm one; and huge pages.

    python benchmarks/bench_page_faults.py [--json benchmarks/results/page-faults.json]

Why `transfer.region` and the `shared` transport enter pages into page tables before they are
written. A memfd of 256 MiB, written in pages of 32 KiB in random order: through a fresh mapping,
through one that was entered with MADV_POPULATE_WRITE, and again through the first.
Microseconds for each page of 32 KiB; median of the repetitions.

`small` is a memfd of the kernel's usual pages, `region` what `allocate_shared_region` gives: huge
pages, where the kernel has them. `allocate` and `enter` (a peer's mapping into its page table) are
milliseconds for all of it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton.transfer.huge_pages import map_shared
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BYTES = 256 * 1024 * 1024
PAGE_BYTES = 32 * 1024
MADV_POPULATE_WRITE = 23


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [measure(seed) for seed in range(options.repetitions)]
    result = {
        name: {
            "median": statistics.median(run[name] for run in runs),
            "min": min(run[name] for run in runs),
            "max": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    for name, row in result.items():
        print(f"{name:16} {row['median']:7.2f} ({row['min']:.2f} to {row['max']:.2f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(seed: int) -> dict[str, float]:
    """One repetition of either kind."""
    return {
        f"{kind} {name}": value
        for kind, allocate in (("small", allocate_small), ("region", allocate_region))
        for name, value in measure_memory(allocate, seed).items()
    }


def allocate_small() -> tuple[int, mmap.mmap]:
    """A committed memfd of small pages, and its owner's mapping."""
    fd = os.memfd_create("page-faults")
    os.posix_fallocate(fd, 0, NUM_BYTES)
    return fd, mmap.mmap(fd, NUM_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def allocate_region() -> tuple[int, mmap.mmap]:
    """A region's memfd, and its owner's mapping."""
    region = allocate_shared_region([(NUM_BYTES // PAGE_BYTES, PAGE_BYTES)])
    return region.fd, region.memory.obj


def measure_memory(allocate: Callable[[], tuple[int, mmap.mmap]], seed: int) -> dict[str, float]:
    """Milliseconds for all of it, and microseconds for each page of 32 KiB."""
    order = np.random.default_rng(seed).permutation(NUM_BYTES // PAGE_BYTES)
    begin = time.perf_counter()
    fd, own = allocate()
    allocate_s = time.perf_counter() - begin
    fresh, entered = map_shared(fd, NUM_BYTES), map_shared(fd, NUM_BYTES)
    begin = time.perf_counter()
    entered.madvise(MADV_POPULATE_WRITE)
    enter_s = time.perf_counter() - begin
    found = {
        "allocate_ms": allocate_s * 1e3,
        "enter_ms": enter_s * 1e3,
        "fresh_us": write(fresh, order),
        "entered_us": write(entered, order),
        "warm_us": write(fresh, order),
    }
    os.close(fd)
    del own
    return found


def write(mapping: mmap.mmap, order: np.ndarray) -> float:
    """Write every page once, in `order`."""
    pages = np.frombuffer(mapping, np.uint8).reshape(-1, PAGE_BYTES)
    source = np.ones(PAGE_BYTES, np.uint8)
    begin = time.perf_counter()
    for page in order:
        pages[page] = source
    return 1e6 * (time.perf_counter() - begin) / len(order)


if __name__ == "__main__":
    main()
