"""Small entries, of 4 KiB, in each tier of this host: `python benchmarks/bench_store.py`.

Entries a second that are put, found (64 names at once) and read, by wall-clock time, for a disk is
waited for: medians of the rounds. Large entries: `bench_store_peers.py --entry-bytes`.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from run_record import write_record

from baton.clock import MachineClock
from baton.store.interface import TIERS, EntryName, Tier, TierContext

KEY = bytes(32)
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
    small = measure_all_small(given.disk, given.rounds)
    write_record(given.output, small_entries_per_s=small)


if __name__ == "__main__":
    main()
