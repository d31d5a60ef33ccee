"""Blocks that several workers read, in their tiers `host,peer`: `python benchmarks/bench_peer.py`.

One process keeps all shared entries, as a worker or a daemon does. Readers are processes, each with
a `host` tier of its own. A reader's operations, seeded: it reads a shared entry (drawn by Zipf's
law), or it puts one of its own and reads it again some operations later, as the next turn of a
conversation does; own entries that are gone would be computed again. Compared, in one run and with
the same operations: copying a shared entry into the reader's `host` at its first read, at its
second, never.

Shares of reads answered by the reader's own memory do not depend on the machine; times do. A read
is: find, lease, and a verified copy into an array. Medians and quartiles of all reads.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import secrets
import statistics
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from run_record import write_record

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.store.interface import EntryName, PeerAccess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.store.tiered import TieredStore

RESULT = Path(__file__).parent / "results" / "peer.json"
NEVER = 1 << 30
POLICIES = {"first read": 1, "second read": 2, "never": NEVER}
OWN_SHARE = 0.3
OWN_DISTANCE = 200
"""An own entry is read again after at most so many operations."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the readers do. Sizes are in entries but `entry_bytes`."""

    num_readers: int
    num_shared: int
    host_entries: int
    num_ops: int
    zipf: float
    entry_bytes: int


@dataclass(slots=True)
class Counts:
    """Of one reader."""

    num_shared: int = 0
    num_local: int = 0
    num_own: int = 0
    num_own_local: int = 0


def shared_name(at: int) -> EntryName:
    """Of one of the shared entries."""
    return EntryName(hashlib.sha256(b"shared %d" % at).digest())


def body_of(name: EntryName, num_bytes: int) -> bytes:
    """Of an entry: it begins with the name."""
    return (name * (num_bytes // len(name) + 1))[:num_bytes]


def open_store(url: str, key: ClusterKey, load: Load, at_read: int) -> TieredStore:
    """A reader's."""
    options = {
        "host": {"capacity_bytes": load.host_entries * load.entry_bytes},
        "peer": {"urls": [url], "timeout_s": 30.0, "promote_at_read": at_read},
    }
    # Own entries stay here: what others keep is only read.
    return open_keyed_store(
        ("host", "peer"),
        options,
        key=key,
        clock=MachineClock(),
        peers=PeerAccess(Credentials.of(key)),
    )


def read(store: TieredStore, name: EntryName, into: memoryview) -> tuple[bool, bool]:
    """Whether the entry was there, and whether it was in this process's memory."""
    is_local = store.tiers[0].inner.find((name,)) == 1
    lease = store.try_lease(name) if store.find((name,)) else None
    if lease is None:
        return False, False
    with lease:
        assert lease.try_read(into)
    assert into[:32] == name
    return True, is_local


def run_reader(
    seed: int, url: str, key: ClusterKey, load: Load, at_read: int
) -> tuple[Counts, list[float], list[float]]:
    """Counts, and seconds of each shared read that was local, and of each that was not."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, load.num_shared + 1) ** load.zipf
    drawn = rng.choice(load.num_shared, load.num_ops, p=weights / weights.sum())
    is_own = rng.random(load.num_ops) < OWN_SHARE
    distance = rng.integers(1, OWN_DISTANCE, load.num_ops)
    due: dict[int, list[EntryName]] = {}
    counts, local, remote = Counts(), [], []
    into = memoryview(bytearray(load.entry_bytes))
    with closing(open_store(url, key, load, at_read)) as store:
        own = store.tiers[0]
        for at in range(load.num_ops):
            for name in due.pop(at, []):
                counts.num_own += 1
                # Own entries are in no other process: what is gone would be computed again.
                lease = own.try_lease(name)
                counts.num_own_local += lease is not None
            if is_own[at]:
                name = EntryName(hashlib.sha256(b"own %d %d" % (seed, at)).digest())
                own.put(name, body_of(name, load.entry_bytes))
                due.setdefault(at + int(distance[at]), []).append(name)
                continue
            began = time.perf_counter()
            was_there, is_local = read(store, shared_name(int(drawn[at])), into)
            took = time.perf_counter() - began
            assert was_there
            counts.num_shared += 1
            counts.num_local += is_local
            (local if is_local else remote).append(took)
    return counts, local, remote


@contextmanager
def holder(key: ClusterKey, load: Load) -> Iterator[str]:
    """The URL of a `host` tier of this process that has all shared entries."""
    options = {"capacity_bytes": load.num_shared * load.entry_bytes, "listen": "127.0.0.1:0"}
    access = PeerAccess(Credentials.of(key), serves=True)
    opened = open_keyed_store(
        ("host",), {"host": options}, key=key, clock=MachineClock(), peers=access
    )
    with closing(opened) as store:
        for at in range(load.num_shared):
            name = shared_name(at)
            store.put(name, body_of(name, load.entry_bytes))
        port = store.tiers[0].inner.address[1]  # type: ignore[attr-defined] # a host tier
        yield f"tcp://127.0.0.1:{port}"


def run(load: Load, policy: str, url: str, key: ClusterKey) -> dict[str, Any]:
    """One row of the result."""
    jobs = [(seed, url, key, load, POLICIES[policy]) for seed in range(load.num_readers)]
    with multiprocessing.get_context("spawn").Pool(load.num_readers) as pool:
        done = pool.starmap(run_reader, jobs)
    local = [s * 1e6 for _, seconds, _ in done for s in seconds]
    remote = [s * 1e6 for _, _, seconds in done for s in seconds]
    total = {each: sum(getattr(counts, each) for counts, _, _ in done) for each in Counts.__slots__}
    return {
        "policy": policy,
        "readers": load.num_readers,
        "shared_entries": load.num_shared,
        "host_entries": load.host_entries,
        "zipf": load.zipf,
        "shared_local_share": round(total["num_local"] / total["num_shared"], 4),
        "own_kept_share": round(total["num_own_local"] / max(1, total["num_own"]), 4),
        "read_us": quartiles(local + remote),
        "local_read_us": quartiles(local),
        "peer_read_us": quartiles(remote),
        "mean_read_us": round(statistics.fmean(local + remote), 1),
    }


def quartiles(values: list[float]) -> list[float] | None:
    """Median, first and third quartile."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(middle, 1), round(low, 1), round(high, 1)]


def print_table(rows: list[dict[str, Any]]) -> None:
    """The table of docs/store-figures.md."""
    print(
        "| readers | memory of a reader, of the shared entries | copied at | shared reads from own "
        "memory | own entries still there | a shared read, us: mean | own memory | a peer |"
    )
    print("|" + "---|" * 8)
    for row in rows:
        cells = [
            f"{row['readers']}",
            f"{row['host_entries'] / row['shared_entries']:.0%}",
            row["policy"],
            f"{row['shared_local_share']:.0%}",
            f"{row['own_kept_share']:.0%}",
            f"{row['mean_read_us']:,.0f}",
            *(
                f"{each[0]:,.0f} ({each[1]:,.0f} to {each[2]:,.0f})" if each else ""
                for each in (row["local_read_us"], row["peer_read_us"])
            ),
        ]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--host-shares", type=float, nargs="+", default=[0.1, 0.4])
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--ops", type=int, default=4000)
    parser.add_argument("--entry-kib", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print that of the last run")
    options = parser.parse_args()
    if options.table:
        print_table(json.loads(options.out.read_text())["rows"])
        return
    key = ClusterKey(secrets.token_bytes(32))
    rows = []
    entry_bytes = options.entry_kib << 10
    load = Load(0, options.shared, 0, options.ops, options.zipf, entry_bytes)
    with holder(key, load) as url:
        for num_readers, share in itertools.product(options.readers, options.host_shares):
            host_entries = int(share * options.shared)
            for policy in POLICIES:
                changed = replace(load, num_readers=num_readers, host_entries=host_entries)
                row = run(changed, policy, url, key)
                rows.append(row)
                print(json.dumps(row), flush=True)
    write_record(options.out, entry_bytes=entry_bytes, ops=options.ops, rows=rows)
    print_table(rows)


if __name__ == "__main__":
    main()
