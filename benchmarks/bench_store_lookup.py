"""What it takes to look for a prompt in the store, and the memory of what is known of its entries.

    python benchmarks/bench_store_lookup.py --output benchmarks/results/store-lookup.json

`find` of 1,000 names that are there, among 20,000 entries; CPU time of the thread (of `redis`: the
clock's, its server is another process). In turns; median and 90th percentile.

- `first`: this process looks for them for the first time
- `again`: it has found them before
- `changed`: the same after another process has removed 16 other entries
- `names`: not a look, but what comes before it: 1,000 block hashes of 64 tokens, and their names

Memory: resident bytes of a fresh process for each entry of each index, with its name.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from run_record import write_record

from baton.clock import Instant, MachineClock
from baton.events.journal import CacheJournal
from baton.handoff.pool_mode.block_copier import TokenSegment
from baton.handoff.pool_mode.store_journal import MAX_REPORTED, StoreJournal
from baton.handoff.pool_mode.store_places import StorePlace
from baton.ids import StoreId, WorkerId
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes
from baton.kv.layout import KVLayout
from baton.router.prefix_index import PrefixIndex
from baton.router.stored_entries import StoredEntries
from baton.store.entry_format import EntryFormat
from baton.store.folder.known_names import MAX_KNOWN, KnownNames
from baton.store.interface import TIERS, EntryName, TierContext
from baton.store.tiers.host import HostTier, HostTierOptions

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store_servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from baton.store.interface import Tier

KEY: Final = bytes(32)
NUM_ENTRIES: Final = 20_000
NUM_NAMES: Final = 1000
NUM_REMOVED: Final = 16
BLOCK_SIZE: Final = 64
RNG: Final = np.random.default_rng(7)


def make_names(num: int) -> Iterator[EntryName]:
    """Names as a digest gives them."""
    return (EntryName(hashlib.sha256(i.to_bytes(8, "little")).digest()) for i in range(num))


def open_tier(kind: str, options: Mapping[str, object]) -> Tier:
    """One process's view of a tier."""
    return TIERS.build(kind, options)(TierContext("bench", KEY, MachineClock()))


def measure_tier(kind: str, options: Mapping[str, object], rounds: int) -> dict[str, list[float]]:
    """Seconds of each look."""
    read_clock = time.perf_counter if kind == "redis" else time.thread_time
    seconds: dict[str, list[float]] = {"first": [], "again": [], "changed": []}
    with ExitStack() as stack:
        other = stack.enter_context(closing(open_tier(kind, options)))
        names = list(make_names(NUM_ENTRIES))
        for name in names:
            other.put(name, name)
        wanted, rest = names[-NUM_NAMES:], names[:-NUM_NAMES]

        def look(tier: Tier, row: str) -> None:
            began = read_clock()
            found = tier.find(wanted)
            seconds[row].append(read_clock() - began)
            assert found == NUM_NAMES

        for at in range(rounds):
            # A process's own memory is its own: there is no other one that could look.
            tier = other if kind == "host" else open_tier(kind, options)
            look(tier, "first")
            look(tier, "again")
            for name in rest[at * NUM_REMOVED : (at + 1) * NUM_REMOVED]:
                other.discard(name)
            look(tier, "changed")
            if tier is not other:
                tier.close()
    return seconds


def measure_names(rounds: int) -> dict[str, list[float]]:
    """Of a prompt's tokens."""
    layout = KVLayout.gqa(32, 8, 128, block_size=BLOCK_SIZE, dtype="bfloat16")
    form = EntryFormat.of(layout, block_size=BLOCK_SIZE, num_parts=1)
    ids = np.arange(NUM_NAMES * BLOCK_SIZE, dtype=np.int32)
    seconds = []
    for _ in range(rounds):
        began = time.thread_time()
        hashes = compute_block_hashes(HashDomain("model", "", BLOCK_SIZE), ids)
        names = [form.name(each, 0) for each in hashes]
        seconds.append(time.thread_time() - began)
        assert len(names) == NUM_NAMES
    return {"names": seconds}


def fill_known(num: int) -> object:
    """A process's known names of a folder."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = os.open(place, os.O_RDONLY)
        known = KnownNames(folder)
        assert known.count_leading([], Instant(0.0)) == 0
        for name in make_names(num):
            known.add([name])
        os.close(folder)
    return known


def fill_host(num: int) -> object:
    """`host`, without the bodies: all are the same empty one."""
    tier = open_tier("host", {})
    for name in make_names(num):
        tier.put(name, b"")
    return tier


def fill_router(num: int) -> object:
    """A gateway's index of what one worker holds: sequences of 64 blocks."""
    index = PrefixIndex()
    names = [int.from_bytes(name[:8], "little") for name in make_names(num)]
    for at in range(0, num, 64):
        index.store(WorkerId("worker"), names[at : at + 64], None)
    return index


class EverythingTier(HostTier):
    """Has every entry, and keeps none: its own memory is not to be measured."""

    def find(self, names: Sequence[EntryName]) -> int:
        """All of them."""
        return len(names)


def fill_journal(num: int) -> object:
    """What a worker has reported to gateways of the store: sequences of 64."""
    clock = MachineClock()
    tier = EverythingTier(HostTierOptions(), TierContext("bench", KEY, clock))
    place = StorePlace(tier, b"form", StoreId("0" * 32))
    reported = StoreJournal(CacheJournal(), [place], bytes(16), BLOCK_SIZE, clock)
    names = make_names(num)
    while batch := tuple(islice(names, 64)):
        segments = [
            TokenSegment(BlockHash(name), i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
            for i, name in enumerate(batch)
        ]
        ids = RNG.integers(0, 128_000, 64 * BLOCK_SIZE).astype(np.int32)
        reported.add_present(segments, ids, "", lambda block_hash: [EntryName(block_hash)])
    return reported


def fill_stored(num: int) -> object:
    """Entries of a store that one worker has reported, at a gateway."""
    entries = StoredEntries()
    names = (int.from_bytes(name[:8], "little") for name in make_names(num))
    while batch := tuple(islice(names, 64)):
        entries.store(WorkerId("worker"), StoreId("0" * 32), batch)
    return entries


INDEXES: Final[Mapping[str, tuple[Callable[[int], object], int]]] = {
    "names that a process has found": (fill_known, MAX_KNOWN),
    "host": (fill_host, 1_000_000),
    "gateway's index": (fill_router, 1_000_000),
    "gateway's index of stores": (fill_stored, 1_000_000),
    "reported to gateways": (fill_journal, MAX_REPORTED),
}


def measure_memory(index: str) -> float:
    """Resident bytes for each entry of one index; in a process of its own."""
    fill, num = INDEXES[index]
    gc.collect()
    before = _resident_bytes()
    filled = fill(num)
    gc.collect()
    after = _resident_bytes()
    del filled
    return (after - before) / num


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def show(lookups: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """The table of docs/store-figures.md."""
    print("| tier | for the first time | again | after another process removed 16 others |")
    print("|---|---|---|---|")
    for tier, rows in lookups.items():
        if tier != "names":
            each = [f"{row['p50_us']:,.0f} ({row['p90_us']:,.0f})" for row in rows.values()]
            print(f"| `{tier}` | {' | '.join(each)} |")
    print(f"names: {lookups['names']['names']['p50_us']:,.0f} us")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file again")
    parser.add_argument("--memory-of", choices=INDEXES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print(measure_memory(given.memory_of))
        return
    if given.table:
        show(json.loads(given.table.read_bytes())["lookups"])
        return
    lookups: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir="."))
        server = stack.enter_context(closing(RedisServer(Path(disk))))
        for kind, options in (
            ("host", {}),
            ("shared", {"directory": shared}),
            ("file", {"directory": f"{disk}/kv"}),
            ("redis", {"url": server.url, "timeout_s": 10.0}),
            ("names", None),
        ):
            rows = (
                measure_names(given.rounds)
                if options is None
                else measure_tier(kind, options, given.rounds)
            )
            lookups[kind] = {
                row: {
                    "p50_us": statistics.median(times) * 1e6,
                    "p90_us": statistics.quantiles(times, n=10)[-1] * 1e6,
                }
                for row, times in rows.items()
            }
    show(lookups)
    memory = {}
    for index in INDEXES:
        command = [sys.executable, __file__, "--memory-of", index]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        memory[index] = float(done.stdout)
        print(f"{index:32} {memory[index]:6.0f} bytes an entry")
    write_record(given.output, lookups=lookups, bytes_per_entry=memory)


if __name__ == "__main__":
    main()
