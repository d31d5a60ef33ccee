"""What a store's policies find of a real trace: `python benchmarks/bench_evictions.py TRACE`.

TRACE is Mooncake's conversation trace (FAST '25; `conversation_trace.jsonl` of its repository): for
each request the hashes of its prompt's blocks of 512 tokens, and when it came. It is replayed in
virtual time, with the eviction policies, the capacity's slack and the table of evicted names that
workers use; entries are of one size. A request finds its leading blocks that are there, and puts
the others. Reported: the share of all blocks that were found, by the tier's size as a share of all
different blocks of the trace.

- *admission*: what the lower of two tiers takes of the entries that make room in the upper one:
  all (as it is), those that were used again, or each entry at once when it is put (write-through)
- *promotion*: what workers read from their own memory of what they find, above a server that keeps
  all,
  where what they read from it is copied up at the first, or at the second read (`promote_at_read`)
- *second time*: a tier into which a block is put only when it is computed for the second time
- *ttl*: what is found where entries that were not used for so long are dropped, in a large tier
- *making room*: how long puts take in a full tier of this host's memory, by wall-clock time (the
  one part that depends on the machine): what `baton store serve` saves workers. Alone without TRACE
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from run_record import write_record

from baton.clock import MachineClock
from baton.store.capacity import Capacity, StoredEntry, count_use
from baton.store.eviction import EVICTIONS, EvictionPolicy
from baton.store.evictions.s3fifo import S3Fifo
from baton.store.folder.bodies import compute_cost
from baton.store.folder.evicted_names import EvictedNames
from baton.store.interface import TIERS, EntryName, TierContext
from baton.store.promotion import PromotionPolicy
from baton.store.victims import WaitingVictims, is_unused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
TIER_SHARES = ((0.02, 0.1), (0.02, 0.2), (0.05, 0.2))
TTLS_S = (60.0, 300.0, 600.0, 1200.0, 2400.0)
OWN_SHARES = (0.02, 0.1, 0.3)
SECOND_TIME_SHARES = (0.02, 0.1, 0.3, 1.0)
NUM_WORKERS = 4
PARTS = ("evictions", "admission", "ttl", "promotion", "second_time", "making_room")
NUM_ENTRIES = (1_000, 10_000, 100_000)
ENTRY_BYTES = 32 << 10
"""A small model's: larger ones have more places in the table of evicted names, for each entry."""
STEP_S = 1e-9
"""Between two entries of a request: no two are used at once."""

LRU = EVICTIONS.build("lru", {})
POLICIES: dict[str, EvictionPolicy] = {
    "lru": LRU,
    "s3fifo": EVICTIONS.build("s3fifo", {}),
    "s3fifo, small queue of a tenth": S3Fifo(small_share=0.1),
    "s3fifo, victims forgotten": S3Fifo(remembers=False),
}

Admission: TypeAlias = Literal["all", "used again", "write-through"]


class Request(msgspec.Struct, frozen=True):
    """One line of the trace; `timestamp` in milliseconds."""

    timestamp: int
    hash_ids: tuple[int, ...]


@dataclass(slots=True)
class Tier:
    """One tier, in entries of one size."""

    policy: EvictionPolicy
    max_entries: int
    ttl_s: float | None = None
    entries: dict[EntryName, StoredEntry] = field(default_factory=dict)
    num_puts: int = 0
    capacity_bytes: int = field(init=False)
    evicted: EvictedNames | None = field(init=False)
    waiting: WaitingVictims = field(init=False)

    def __post_init__(self) -> None:
        self.capacity_bytes = self.max_entries * ENTRY_BYTES
        self.waiting = WaitingVictims(self.policy, self.capacity_bytes)
        folder = os.open(tempfile.mkdtemp(), os.O_RDONLY | os.O_DIRECTORY)
        self.evicted = EvictedNames(folder, self.capacity_bytes) if self.policy.remembers else None

    def has(self, name: EntryName, now: float) -> bool:
        """Whether it would be found."""
        entry = self.entries.get(name)
        return entry is not None and (self.ttl_s is None or now - entry.used_at <= self.ttl_s)

    def use(self, name: EntryName, now: float) -> None:
        """It was read."""
        entry = self.entries[name]
        self.entries[name] = replace(entry, used_at=now, num_uses=count_use(entry.num_uses))

    def put(self, name: EntryName, now: float) -> Sequence[StoredEntry]:
        """Put it; what had to make room."""
        if name in self.entries:
            self.use(name, now)
            return ()
        used_bytes = len(self.entries) * ENTRY_BYTES
        shortage = Capacity(self.capacity_bytes, used_bytes).shortage(ENTRY_BYTES)
        victims = self._evict(shortage, now) if shortage else ()
        is_back = self.evicted is not None and self.evicted.take(name)
        self.entries[name] = StoredEntry(name, ENTRY_BYTES, now, now, is_protected=is_back)
        self.num_puts += 1
        return victims

    def _evict(self, num_bytes: int, now: float) -> Sequence[StoredEntry]:
        victims: list[StoredEntry] = []
        while len(victims) * ENTRY_BYTES < num_bytes:
            victim = self.waiting.pop()
            if victim is None:
                requeued = self.waiting.choose(list(self.entries.values()), num_bytes, now)
                self.entries |= {entry.name: entry for entry in requeued}
                continue
            if victim.name not in self.entries:
                continue
            if not is_unused(victim, self.entries[victim.name]):
                continue
            victims.append(self.entries.pop(victim.name))
            if self.evicted is not None and not victim.is_protected:
                self.evicted.add(victim.name)
        return victims


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests: when each came (seconds), and the names of its blocks."""

    requests: Sequence[tuple[float, Sequence[EntryName]]]
    num_blocks: int
    num_different: int

    def uses(self) -> Iterator[tuple[float, Sequence[EntryName]]]:
        """Each request, a microsecond after the one before at least."""
        yield from ((at + i * 1e-6, names) for i, (at, names) in enumerate(self.requests))


def read_trace(path: Path) -> Trace:
    """Read Mooncake's format."""
    decoder = msgspec.json.Decoder(Request)
    lines = [decoder.decode(line) for line in path.read_bytes().splitlines()]
    names = {
        number: EntryName(hashlib.sha256(number.to_bytes(8, "little")).digest())
        for line in lines
        for number in line.hash_ids
    }
    requests = [(line.timestamp / 1000, [names[n] for n in line.hash_ids]) for line in lines]
    return Trace(requests, sum(len(each) for _, each in requests), len(names))


def replay(trace: Trace, tier: Tier, at_time: int = 1) -> float:
    """The share of blocks that were found. What is computed is put the `at_time`-th time."""
    num_computed: Counter[EntryName] = Counter()
    num_found = 0
    for now, names in trace.uses():
        found = next((i for i, name in enumerate(names) if not tier.has(name, now)), len(names))
        num_found += found
        for at, name in enumerate(names):
            if at < found:
                tier.use(name, now + at * STEP_S)
                continue
            num_computed[name] += 1
            if num_computed[name] >= at_time:
                tier.put(name, now + at * STEP_S)
    return num_found / trace.num_blocks


def replay_two(trace: Trace, upper: Tier, lower: Tier, admission: Admission) -> float:
    """The same with two tiers: what is read from the lower one is copied up."""
    num_found = 0

    def put(name: EntryName, now: float) -> None:
        for victim in upper.put(name, now):
            if admission == "all" or (admission == "used again" and victim.num_uses):
                lower.put(victim.name, now)

    for came_at, names in trace.uses():
        for at, name in enumerate(names):
            now = came_at + at * STEP_S
            if upper.has(name, now):
                upper.use(name, now)
            elif lower.has(name, now):
                lower.use(name, now)
                put(name, now)
            else:
                num_found += at
                break
        else:
            num_found += len(names)
            continue
        for later, name in enumerate(names[at:], at):
            now = came_at + later * STEP_S
            if not upper.has(name, now) and lower.has(name, now):
                continue  # a store of tiers does not write again what a lower one has
            put(name, now)
            if admission == "write-through":
                lower.put(name, now)
    return num_found / trace.num_blocks


def replay_promoting(
    trace: Trace, workers: Sequence[Tier], at_read: int, *, sticky: bool
) -> tuple[float, float]:
    """Own memories above a server that keeps all; what is computed goes into both.

    `sticky`: a conversation stays at one worker, else requests take turns. Returns, of the blocks
    that were found, the share that was read from the own memory, and the share that was copied up.
    """
    on_server: set[EntryName] = set()
    promotions = [PromotionPolicy(at_read) for _ in workers]
    num_own = num_found = num_copied = 0
    for number, (came_at, names) in enumerate(trace.uses()):
        conversation = int.from_bytes(names[min(1, len(names) - 1)][:4], "little")
        chosen = (conversation if sticky else number) % len(workers)
        own, promotion = workers[chosen], promotions[chosen]
        num_there = next((i for i, name in enumerate(names) if name not in on_server), len(names))
        num_found += num_there
        for at, name in enumerate(names):
            now = came_at + at * STEP_S
            if own.has(name, now):
                num_own += at < num_there
                own.use(name, now)
            elif at >= num_there:
                own.put(name, now)
                on_server.add(name)
            elif promotion.count_read(name):
                num_copied += 1
                own.put(name, now)
    return num_own / num_found, num_copied / num_found


def main() -> None:
    """Replay everything; print tables; with --json, keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    parts, results = arguments.parts, dict[str, object]()
    if arguments.trace is not None:
        results = replay_all(read_trace(arguments.trace), parts)
    if "making_room" in parts:
        results["making_room"] = [
            measure_making_room(kind, num_entries)
            for kind in ("lru", "s3fifo")
            for num_entries in NUM_ENTRIES
        ]
    write_record(arguments.json, **results)


def replay_all(trace: Trace, parts: Sequence[str]) -> dict[str, object]:
    """Those parts that need a trace."""
    best = 1 - trace.num_different / trace.num_blocks
    print(f"{trace.num_blocks:,} blocks, {trace.num_different:,} different: at most {best:.3f}")
    rows: dict[str, Iterator[object]] = {
        "evictions": (row for share in SHARES for row in compare_policies(trace, share)),
        "admission": (row for pair in TIER_SHARES for row in compare_admission(trace, *pair)),
        "ttl": (measure_ttl(trace, ttl_s) for ttl_s in TTLS_S),
        "promotion": (row for share in OWN_SHARES for row in compare_promotion(trace, share)),
        "second_time": (compare_times(trace, share) for share in SECOND_TIME_SHARES),
    }
    counts = {"num_blocks": trace.num_blocks, "num_different": trace.num_different}
    return counts | {part: list(rows[part]) for part in parts if part in rows}


def compare_policies(trace: Trace, share: float) -> Iterator[dict[str, object]]:
    """A tier of that size under each policy."""
    for kind, policy in POLICIES.items():
        found = replay(trace, Tier(policy, int(share * trace.num_different)))
        print(f"size {share:4.0%}  {kind:30} found {found:.3f}")
        yield {"size": share, "policy": kind, "found": round(found, 4)}


def compare_admission(trace: Trace, upper: float, lower: float) -> Iterator[dict[str, object]]:
    """Two tiers of those sizes, and what the lower one takes."""
    modes: tuple[Admission, ...] = ("all", "used again", "write-through")
    for mode in modes:
        tiers = [Tier(LRU, int(share * trace.num_different)) for share in (upper, lower)]
        found = replay_two(trace, tiers[0], tiers[1], mode)
        written = tiers[1].num_puts / trace.num_different
        print(
            f"sizes {upper:4.0%} {lower:4.0%}  {mode:13} found {found:.3f}  "
            f"written to the lower tier {written:.2f} of the different blocks"
        )
        yield {
            "upper": upper,
            "lower": lower,
            "admission": mode,
            "found": round(found, 4),
            "written": round(written, 4),
        }


def compare_promotion(trace: Trace, share: float) -> Iterator[dict[str, object]]:
    """Workers with memory of that size together."""
    for sticky in (True, False):
        for at_read in (1, 2):
            size = int(share * trace.num_different / NUM_WORKERS)
            workers = [Tier(LRU, size) for _ in range(NUM_WORKERS)]
            own, copied = replay_promoting(trace, workers, at_read, sticky=sticky)
            print(
                f"memory {share:4.0%} of {NUM_WORKERS} workers, sticky {sticky!s:5}, copied up at "
                f"read {at_read}: own memory {own:.3f} of what is found, copied up {copied:.3f}"
            )
            yield {
                "memory": share,
                "sticky": sticky,
                "at_read": at_read,
                "own": round(own, 4),
                "copied": round(copied, 4),
            }


def compare_times(trace: Trace, share: float) -> dict[str, object]:
    """A tier of that size, put at the first and at the second time."""
    row: dict[str, object] = {"size": share}
    for at_time in (1, 2):
        tier = Tier(LRU, int(share * trace.num_different) + 1)
        found = replay(trace, tier, at_time)
        written = tier.num_puts / trace.num_different
        print(f"size {share:4.0%}  put at time {at_time}: found {found:.3f}  written {written:.2f}")
        row |= {f"found_{at_time}": round(found, 4), f"written_{at_time}": round(written, 4)}
    return row


def measure_ttl(trace: Trace, ttl_s: float) -> dict[str, object]:
    """A tier that holds everything, and drops what was not used for that long."""
    found = replay(trace, Tier(LRU, trace.num_different + 1, ttl_s))
    print(f"ttl {ttl_s:6.0f} s  found {found:.3f}")
    return {"ttl_s": ttl_s, "found": round(found, 4)}


def measure_making_room(kind: str, num_entries: int) -> dict[str, object]:
    """Puts into a full tier of so many small entries, twice as many as it has."""
    body = bytes(3000)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        capacity_bytes = num_entries * compute_cost(len(body))
        options = {"directory": place, "capacity_bytes": capacity_bytes, "eviction": kind}
        tier = TIERS.build("shared", options)(TierContext("bench", bytes(32), MachineClock()))
        with closing(tier):
            all_ms: list[float] = []
            making_room_ms: list[float] = []
            for number in range(3 * num_entries):
                num_dropped, began_at = tier.usage().num_dropped, time.perf_counter()
                tier.put(EntryName(number.to_bytes(32, "little")), body)
                took_ms = 1000 * (time.perf_counter() - began_at)
                if number >= num_entries:
                    all_ms.append(took_ms)
                if tier.usage().num_dropped > num_dropped:
                    making_room_ms.append(took_ms)
    row = {
        "policy": kind,
        "num_entries": num_entries,
        "mean_put_ms": round(statistics.mean(all_ms), 3),
        "num_that_make_room": len(making_room_ms),
        "median_ms": round(statistics.median(making_room_ms), 2),
        "p99_ms": round(statistics.quantiles(making_room_ms, n=100)[98], 1),
        "max_ms": round(max(making_room_ms), 1),
    }
    print(
        f"{kind:7} {num_entries:7,} entries  a put {row['mean_put_ms']} ms on average; one that "
        f"makes room {row['median_ms']} (99th percentile {row['p99_ms']}, most {row['max_ms']})"
    )
    return row


if __name__ == "__main__":
    main()
