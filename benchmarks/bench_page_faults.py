"""What the first write to a page of a fresh mapping costs, next to a warm one.

    python benchmarks/bench_page_faults.py [--json benchmarks/results/page-faults.json]

Why `transfer.region` and the `shared` transport enter pages into page tables before they are
written. One memfd of 256 MiB, written in pages of 32 KiB in random order: through a fresh mapping,
through one that was entered with MADV_POPULATE_WRITE, and again through the first.
Microseconds for each page of 32 KiB; median of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from pathlib import Path

import numpy as np

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
            "median_us": statistics.median(run[name] for run in runs),
            "min_us": min(run[name] for run in runs),
            "max_us": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    for name, row in result.items():
        print(f"{name:12} {row['median_us']:7.2f} us ({row['min_us']:.2f} to {row['max_us']:.2f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(seed: int) -> dict[str, float]:
    """One repetition, microseconds for each page of 32 KiB."""
    order = np.random.default_rng(seed).permutation(NUM_BYTES // PAGE_BYTES)
    fd = os.memfd_create("page-faults")
    os.posix_fallocate(fd, 0, NUM_BYTES)
    fresh, entered = mmap.mmap(fd, NUM_BYTES), mmap.mmap(fd, NUM_BYTES)
    entered.madvise(MADV_POPULATE_WRITE)
    os.close(fd)
    return {
        "fresh": write(fresh, order),
        "entered": write(entered, order),
        "warm": write(fresh, order),
    }


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
