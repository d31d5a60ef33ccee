"""Tiers on servers beside their libraries: `python benchmarks/bench_store_servers.py`.

Each round does each thing once, in another order each time: entries into the tier and out of it
(tag, check and threads included) and the same bytes with the library alone, one after the other.
Time is the clock's: the server is another process of this machine. Medians and quartiles over the
rounds; ratios are of the same round.

- `redis`: a real redis-server without a disk, over TCP on loopback; beside redis-py
- `object`: moto's S3 server, which is Python itself and sets the pace; beside obstore
- `find`: 1,000 names that are there, asked in one call
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
import obstore
import redis
from obstore.store import from_url

from baton.clock import MachineClock
from baton.store.interface import TIERS, EntryName, TierContext

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store_servers import BUCKET, S3_CREDENTIALS, RedisServer, S3Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.interface import Tier

KEY = bytes(32)
BODY_BYTES = (128 << 10, 1 << 20)
TOTAL_BYTES = {"redis": 64 << 20, "object": 16 << 20}
NUM_NAMES = 1000


class Bench:
    """One size of entries, in a tier and by its library."""

    def __init__(
        self, tier: Tier, raw: RawRedis | RawObject, num_bodies: int, body_bytes: int
    ) -> None:
        self.tier, self.raw = tier, raw
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, (num_bodies, body_bytes), dtype=np.uint8)
        self.target = np.ones_like(self.source)
        self.bodies = [row.tobytes() for row in self.source]
        self.names = make_names(f"{body_bytes}", len(self.source))

    def put(self) -> None:
        """Arrays to the tier."""
        for name, row in zip(self.names, self.source, strict=True):
            self.tier.put(name, memoryview(row))

    def read(self) -> None:
        """As a worker does: it looks for all, then takes one after the other."""
        assert self.tier.find(self.names) == len(self.names)
        for name, row in zip(self.names, self.target, strict=True):
            lease = self.tier.try_lease(name)
            assert lease is not None
            with lease:
                assert lease.try_read(memoryview(row))

    def raw_put(self) -> None:
        """The same bytes by the library."""
        for name, body in zip(self.names, self.bodies, strict=True):
            self.raw.put(f"raw{name.hex()}", body)

    def raw_read(self) -> None:
        """Into arrays by the library."""
        for name, row in zip(self.names, self.target, strict=True):
            np.copyto(row, np.frombuffer(self.raw.get(f"raw{name.hex()}"), np.uint8))

    def remove(self) -> None:
        """Back to an empty server."""
        for name in self.names:
            self.tier.discard(name)
            self.raw.delete(f"raw{name.hex()}")


class RawRedis:
    """redis-py alone."""

    def __init__(self, server: RedisServer) -> None:
        self.client = redis.Redis(port=server.port, protocol=2)
        self.get, self.delete = self.client.get, self.client.unlink  # as the tier removes

    def put(self, key: str, body: bytes) -> None:
        """Unless it exists, as the tier does."""
        self.client.set(key, body, nx=True, px=3_600_000)


class RawObject:
    """obstore alone."""

    def __init__(self, server: S3Server) -> None:
        config = {"endpoint": server.endpoint, "region": "us-east-1"}
        client = {"allow_http": True}
        self.store = from_url(f"s3://{BUCKET}", config=config, client_options=client)

    def get(self, key: str) -> obstore.Bytes:
        """One object."""
        return obstore.get(self.store, key).bytes()

    def put(self, key: str, body: bytes) -> None:
        """Unless it exists, as the tier does."""
        obstore.put(self.store, key, body, mode="create", use_multipart=False)

    def delete(self, key: str) -> None:
        """One object, if it is there."""
        obstore.delete(self.store, key)


def make_names(word: str, count: int) -> list[EntryName]:
    """Names that no other word has."""
    return [EntryName(hashlib.sha256(f"{word} {i}".encode()).digest()) for i in range(count)]


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summarize(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    return dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4), strict=True))


def measure(bench: Bench, num_rounds: int) -> dict[str, dict[str, float]]:
    """GB for each second, and the tier's over its library's; the first round is not counted."""
    seconds: dict[str, list[float]] = {k: [] for k in ("put", "raw_put", "read", "raw_read")}
    chance = random.Random(2)
    for _ in range(num_rounds + 1):
        bench.remove()
        for pair in (["put", "raw_put"], ["read", "raw_read"]):
            chance.shuffle(pair)
            for kind in pair:
                seconds[kind].append(timed(getattr(bench, kind)))
        assert (bench.source == bench.target).all()
    bench.remove()
    found = {
        k: summarize([bench.source.nbytes / s / 1e9 for s in v[1:]]) for k, v in seconds.items()
    }
    for kind in ("put", "read"):
        pairs = zip(seconds[f"raw_{kind}"][1:], seconds[kind][1:], strict=True)
        found[f"{kind} of raw"] = summarize([raw / own for raw, own in pairs])
    return found


def measure_find(tier: Tier, num_rounds: int) -> dict[str, float]:
    """Milliseconds of one `find` of entries that are all there, and of one that has none."""
    names, others = make_names("find", NUM_NAMES), make_names("nothing", NUM_NAMES)
    for name in names:
        tier.put(name, b"x")
    assert tier.find(names) == NUM_NAMES
    there = [1e3 * timed(lambda: tier.find(names)) for _ in range(num_rounds)]
    missing = [1e3 * timed(lambda: tier.find(others)) for _ in range(num_rounds)]
    for name in names:
        tier.discard(name)
    return {"find 1000, ms": statistics.median(there), "find 0, ms": statistics.median(missing)}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.update(S3_CREDENTIALS)
    context = TierContext("bench", KEY, MachineClock())
    found: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RedisServer(Path(folder))) as redis_server,
        closing(S3Server()) as s3_server,
    ):
        setups = (
            ("redis", {"url": redis_server.url, "timeout_s": 10.0}, RawRedis(redis_server)),
            ("object", {**s3_server.options, "timeout_s": 10.0}, RawObject(s3_server)),
        )
        for kind, options, raw in setups:
            with closing(TIERS.build(kind, options)(context)) as tier:
                rows: dict[str, object] = {
                    str(size): measure(
                        Bench(tier, raw, TOTAL_BYTES[kind] // size, size), given.rounds
                    )
                    for size in BODY_BYTES
                }
                if kind == "redis":
                    rows["find"] = measure_find(tier, given.rounds)
                found[kind] = rows
                print(kind, json.dumps(rows, indent=1))
    write_record(given.json, total_bytes=TOTAL_BYTES, gb_per_s=found)


if __name__ == "__main__":
    main()
