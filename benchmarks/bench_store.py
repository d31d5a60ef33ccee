"""The tiers in memory against a copy of the same bytes: `python benchmarks/bench_store.py`.

Each round does each thing once, in an order that changes from round to round, on bytes that the
processor's cache cannot hold; what is reported is the median over the rounds, with the quartiles.
Time is the thread's own (CPU seconds, the kernel's for it included): what others do on a busy
machine does not count, and on an idle one it is the clock's, for nothing here waits.

- `memcpy`: the entries' bytes from one array to another
- `put_many`: the same bytes into the tier, with digest, count and name, as a worker puts what a
  request leaves: 8 MiB at once
- `put`: each entry by itself
- `read`: out of it, verified, into an array
- `host_put`, `host_read`: into and out of the tier `host`, which is full, so that it has its memory

The first round, in which the pool gets its memory, is not counted.

Small entries, of 4 KiB, in each of `host`, `shared` and `file` (by wall-clock time, for a disk is
waited for): entries a second that are put, found (64 names at once) and read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from run_record import write_record
from baton.clock import MachineClock
from baton.handoff.pool_mode.block_copier import BATCH_BYTES
from baton.store.interface import TIERS, EntryName, NamedBody, PutResult, Tier, TierContext
from baton.store.tiers.host import HostTier, HostTierOptions
from baton.store.tiers.shared import SharedTier, SharedTierOptions

if TYPE_CHECKING:
    from collections.abc import Callable


TOTAL_BYTES = 256 << 20
KEY = bytes(32)
BODY_BYTES = (64 << 10, 1 << 20, 8 << 20)


class Bench:
    """One size of bodies: `TOTAL_BYTES` of them."""

    def __init__(self, tier: SharedTier, body_bytes: int) -> None:
        self.tier = tier
        context = TierContext("bench", KEY, MachineClock())
        self.host = HostTier(HostTierOptions(capacity_bytes=TOTAL_BYTES), context)
        self.epoch = 0
        num_bodies = TOTAL_BYTES // body_bytes
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, (num_bodies, body_bytes), dtype=np.uint8)
        self.target = np.ones_like(self.source)
        self.names = [
            EntryName(hashlib.sha256(f"{body_bytes} {i}".encode()).digest())
            for i in range(num_bodies)
        ]

    def memcpy(self) -> None:
        """Array to array."""
        for source, target in zip(self.source, self.target, strict=True):
            np.copyto(target, source)

    def put(self) -> None:
        """Array to tier."""
        for name, row in zip(self.names, self.source, strict=True):
            self.tier.put(name, memoryview(row))

    def put_many(self) -> None:
        """Array to tier, a batch of a worker's at once."""
        num_at_once = max(1, BATCH_BYTES // len(self.source[0]))
        for at in range(0, len(self.names), num_at_once):
            rows = map(memoryview, self.source[at : at + num_at_once])
            batch = [*map(NamedBody, self.names[at : at + num_at_once], rows)]
            outcomes = self.tier.put_many(batch)
            assert outcomes == [PutResult.STORED] * len(batch)

    def read(self) -> None:
        """Tier to array."""
        for name, row in zip(self.names, self.target, strict=True):
            lease = self.tier.try_lease(name)
            assert lease is not None
            with lease:
                assert lease.try_read(memoryview(row))

    def host_put(self) -> None:
        """Array to this process's own memory, under new names: the old entries make room."""
        self.epoch += 1
        for name, row in zip(self.host_names(), self.source, strict=True):
            self.host.put(name, memoryview(row))

    def host_read(self) -> None:
        """That memory to an array."""
        for name, row in zip(self.host_names(), self.target, strict=True):
            lease = self.host.try_lease(name)
            assert lease is not None
            with lease:
                assert lease.try_read(memoryview(row))

    def host_names(self) -> list[EntryName]:
        """Those of this round."""
        return [EntryName(name[:-4] + self.epoch.to_bytes(4)) for name in self.names]

    def remove(self) -> None:
        """Back to an empty tier."""
        for name in self.names:
            self.tier.discard(name)


def measure(bench: Bench, num_rounds: int) -> dict[str, dict[str, float]]:
    """GB for each CPU second, of each thing: median and quartiles."""
    kinds = ("memcpy", "put_many", "put", "read", "host_put", "host_read")
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    chance = random.Random(2)
    for _ in range(num_rounds + 1):
        bench.remove()
        bench.host_put()
        order: list[Callable[[], None]] = [bench.memcpy, bench.read, bench.host_read]
        chance.shuffle(order)
        first, last = chance.sample([bench.put, bench.put_many], 2)
        order.insert(chance.choice([0, 0, 1]) if order[0] == bench.memcpy else 0, first)
        for work in (*order, bench.host_put, last):
            if work == last:
                bench.remove()
            began = time.thread_time()
            work()
            rates[work.__name__].append(TOTAL_BYTES / (time.thread_time() - began) / 1e9)
        assert (bench.source == bench.target).all()
    return {
        name: dict(
            zip(("low", "median", "high"), statistics.quantiles(values[1:], n=4), strict=True)
        )
        for name, values in rates.items()
    }


SMALL_BYTES = 4 << 10
NUM_SMALL = 2048
NUM_SMALL_FLUSHED = 256
NAMES_AT_ONCE = 64


def measure_small(tier: Tier, num_entries: int, num_rounds: int) -> dict[str, float]:
    """Entries a second, medians of the rounds; each has new names."""
    body, into = bytes(range(256)) * (SMALL_BYTES // 256), memoryview(bytearray(SMALL_BYTES))
    rates: dict[str, list[float]] = {"put": [], "find": [], "read": []}
    for epoch in range(num_rounds):
        names = [
            EntryName(hashlib.sha256(f"small {epoch} {i}".encode()).digest())
            for i in range(num_entries)
        ]

        def put(names: list[EntryName] = names) -> None:
            for name in names:
                tier.put(name, body)

        def find(names: list[EntryName] = names) -> None:
            for at in range(0, num_entries, NAMES_AT_ONCE):
                assert tier.find(names[at : at + NAMES_AT_ONCE]) == NAMES_AT_ONCE

        def read(names: list[EntryName] = names) -> None:
            for name in names:
                lease = tier.try_lease(name)
                assert lease is not None
                with lease:
                    assert lease.try_read(into)

        for work in (put, find, read):
            began_at = time.perf_counter()
            work()
            rates[work.__name__].append(num_entries / (time.perf_counter() - began_at))
        assert into == body
        for name in names:
            tier.discard(name)
    return {kind: round(statistics.median(each)) for kind, each in rates.items()}


def measure_all_small(disk: Path, num_rounds: int) -> dict[str, dict[str, float]]:
    """Each tier of this host; `file` once more with each entry on the disk before it is found."""
    found = {}
    context = TierContext("bench", KEY, MachineClock())
    with (
        tempfile.TemporaryDirectory(dir=disk) as place,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        options: dict[str, tuple[str, dict[str, object]]] = {
            "host": ("host", {}),
            "shared": ("shared", {"directory": memory}),
            "file": ("file", {"directory": f"{place}/large"}),
            "file, durable = all": ("file", {"directory": f"{place}/all", "durable": "all"}),
        }
        for name, (kind, settings) in options.items():
            with closing(TIERS.build(kind, settings)(context)) as tier:
                num_entries = NUM_SMALL_FLUSHED if "durable" in settings else NUM_SMALL
                found[name] = rates = measure_small(tier, num_entries, num_rounds)
            cells = "  ".join(f"{work} {rate:,}/s" for work, rate in rates.items())
            print(f"4 KiB  {name:20} {cells}", flush=True)
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="for tier file")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, object] = {}
    small = measure_all_small(given.disk, given.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        options = SharedTierOptions(directory=place, capacity_bytes=2 * TOTAL_BYTES)
        tier = SharedTier(options, TierContext("bench", KEY, MachineClock()))
        for body_bytes in BODY_BYTES:
            bench = Bench(tier, body_bytes)
            found[str(body_bytes)] = rates = measure(bench, given.rounds)
            for name, rate in rates.items():
                print(
                    f"{body_bytes >> 10:6} KiB  {name:9} {rate['median']:6.2f} GB/s "
                    f"({rate['low']:.2f} to {rate['high']:.2f}), "
                    f"{rate['median'] / rates['memcpy']['median']:.2f} of memcpy"
                )
            bench.remove()
        tier.close()
    write_record(
        given.output, total_bytes=TOTAL_BYTES, rates_gb_per_s=found, small_entries_per_s=small
    )


if __name__ == "__main__":
    main()
