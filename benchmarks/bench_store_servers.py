"""Tiers on servers beside their libraries: `python benchmarks/bench_store_servers.py`.

Each round puts and reads the same bytes once in each place, in another order each time: by the tier
(tag, check and threads included) and by the library alone, entry after entry. Rates are of the
clock: the server is another process of this machine.

- `redis`: a real redis-server without a disk, over TCP on loopback; beside redis-py
- `object`: moto's S3 server, which is Python itself and sets the pace; beside obstore
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import obstore
import redis
from bench_store_peers import KEY, BatonTier, measure_rounds, show
from obstore.store import from_url
from run_record import write_record

from baton.clock import MachineClock
from baton.store.interface import TIERS, EntryName, TierContext

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store_servers import BUCKET, S3_CREDENTIALS, RedisServer, S3Server

if TYPE_CHECKING:
    from bench_store_peers import Run

BODY_BYTES = (128 << 10, 1 << 20)
TOTAL_BYTES = {"redis": 64 << 20, "object": 16 << 20}


class ServerTier(BatonTier):
    """A tier on a server."""

    def read(self, names: list[bytes]) -> None:
        """As a worker does: it looks for all, then takes one after the other."""
        assert self.tier.find([*map(EntryName, names)]) == len(names)
        super().read(names)


class RawRedis:
    """redis-py alone."""

    name = "redis-py"

    def __init__(self, server: RedisServer, source: np.ndarray, target: np.ndarray) -> None:
        self.source, self.target = source, target
        self.bodies = [row.tobytes() for row in source]
        self.client = redis.Redis(port=server.port, protocol=2)

    def put(self, names: list[bytes]) -> None:
        """Unless it exists, as the tier does."""
        for name, body in zip(names, self.bodies, strict=True):
            self.client.set(f"raw{name.hex()}", body, nx=True, px=3_600_000)

    def read(self, names: list[bytes]) -> None:
        """Into arrays."""
        for name, row in zip(names, self.target, strict=True):
            np.copyto(row, np.frombuffer(self.client.get(f"raw{name.hex()}"), np.uint8))

    def forget(self, names: list[bytes]) -> None:
        """As the tier removes."""
        self.client.unlink(*(f"raw{name.hex()}" for name in names))

    def cpu_s(self) -> float:
        """The server's is not counted."""
        return 0.0


class RawObject:
    """obstore alone."""

    name = "obstore"

    def __init__(self, server: S3Server, source: np.ndarray, target: np.ndarray) -> None:
        self.source, self.target = source, target
        self.bodies = [row.tobytes() for row in source]
        config = {"endpoint": server.endpoint, "region": "us-east-1"}
        client = {"allow_http": True}
        self.store = from_url(f"s3://{BUCKET}", config=config, client_options=client)

    def put(self, names: list[bytes]) -> None:
        """Unless it exists, as the tier does."""
        for name, body in zip(names, self.bodies, strict=True):
            key = f"raw{name.hex()}"
            obstore.put(self.store, key, body, mode="create", use_multipart=False)

    def read(self, names: list[bytes]) -> None:
        """Into arrays."""
        for name, row in zip(names, self.target, strict=True):
            body = obstore.get(self.store, f"raw{name.hex()}").bytes()
            np.copyto(row, np.frombuffer(body, np.uint8))

    def forget(self, names: list[bytes]) -> None:
        """Each object."""
        for name in names:
            obstore.delete(self.store, f"raw{name.hex()}")

    def cpu_s(self) -> float:
        """The server's is not counted."""
        return 0.0


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.update(S3_CREDENTIALS)
    context = TierContext("bench", KEY, MachineClock())
    found: dict[str, list[Run]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RedisServer(Path(folder))) as redis_server,
        closing(S3Server()) as s3_server,
    ):
        setups = (
            ("redis", {"url": redis_server.url}, lambda *arrays: RawRedis(redis_server, *arrays)),
            ("object", s3_server.options, lambda *arrays: RawObject(s3_server, *arrays)),
        )
        for kind, options, make_raw in setups:
            found[kind] = runs = []
            with closing(TIERS.build(kind, {**options, "timeout_s": 10.0})(context)) as tier:
                for body_bytes in BODY_BYTES:
                    shape = TOTAL_BYTES[kind] // body_bytes, body_bytes
                    source = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
                    arrays = source, np.ones_like(source)
                    raw = make_raw(*arrays)
                    places = [ServerTier(tier, kind, *arrays), raw]
                    runs += measure_rounds(places, given.rounds)
            show(runs, TOTAL_BYTES[kind], limit=raw.name)
    write_record(given.json, total_bytes=TOTAL_BYTES, runs=found)


if __name__ == "__main__":
    main()
