"""Tier `file` beside fio on the same disk: `python benchmarks/bench_store_file.py`.

Each round does each thing once, in an order that changes from round to round: the same number of
bytes, in requests of one entry's size, on one filesystem. What is reported is the wall-clock rate,
the median over the rounds with the quartiles, and its ratio to fio in the same round: to the best
of `fio, depth N`, or for writes that are durable to `fio, each flushed`.

- `fio, depth N`: O_DIRECT by libaio with N requests in flight, one file, flushed at its end
- `fio, each flushed`: the same with one request in flight, and fdatasync after each
- `direct`: the tier as it is by default: past the page cache, each entry on the disk before it has
  its name
- `direct, not durable`: the same with `durable = "none"`
- `page cache`: `direct_io = false`; its pages are dropped before it is read
- `page cache, not durable`: both, as it was before: what was written may be in memory alone

Needs fio (Debian package `fio`), and a disk: on a memory filesystem all is memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from baton.clock import MachineClock
from baton.store.interface import EntryName, TierContext
from baton.store.tiers.file import FileTier, FileTierOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Op: TypeAlias = Literal["write", "read"]

KEY: Final = bytes(32)
SETTINGS: Final[Mapping[str, tuple[bool, Literal["large", "none"]]]] = {
    "direct": (True, "large"),
    "direct, not durable": (True, "none"),
    "page cache": (False, "large"),
    "page cache, not durable": (False, "none"),
}
"""`direct_io` and `durable`."""
FLUSHED: Final = "fio, each flushed"
DURABLE: Final = (FLUSHED, "direct", "page cache")


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with so many requests in flight."""

    folder: Path
    body_bytes: int
    total_bytes: int
    depth: int
    is_each_flushed: bool = False

    def run(self, op: Op) -> float:
        """Seconds that fio took for all bytes, its flush included."""
        command = [
            *("fio", f"--name=depth{self.depth}", f"--directory={self.folder}", f"--rw={op}"),
            *(f"--bs={self.body_bytes}", f"--size={self.total_bytes}", "--direct=1"),
            *("--ioengine=libaio", f"--iodepth={self.depth}", "--end_fsync=1"),
            *("--fallocate=posix", "--output-format=json"),
            *(("--fdatasync=1",) if self.is_each_flushed and op == "write" else ()),
        ]
        done = subprocess.run(command, check=True, capture_output=True, timeout=300)
        (job,) = json.loads(done.stdout)["jobs"]
        assert job[op]["io_bytes"] == self.total_bytes
        return job["job_runtime"] / 1000


class TierRun:
    """One tier with its settings, and entries of one size."""

    def __init__(
        self,
        folder: Path,
        source: np.ndarray,
        *,
        direct_io: bool,
        durable: Literal["large", "none"],
    ) -> None:
        self.folder, self.source, self.target = folder, source, np.empty_like(source)
        options = FileTierOptions(
            directory=str(folder),
            capacity_bytes=4 * source.nbytes,
            direct_io=direct_io,
            durable=durable,
        )
        self.tier = FileTier(options, TierContext("bench", KEY, MachineClock()))
        assert self.tier.usage().direct_io == direct_io, "this filesystem refuses O_DIRECT"
        self.names = [EntryName(hashlib.sha256(b"%d" % i).digest()) for i in range(len(source))]

    def run(self, op: Op) -> float:
        """Seconds for all entries. They are removed before they are written."""
        self.prepare(op)
        began_at = time.perf_counter()
        for name, row, into in zip(self.names, self.source, self.target, strict=True):
            if op == "write":
                self.tier.put(name, row.data)
                continue
            lease = self.tier.try_lease(name)
            assert lease is not None
            with lease:
                assert lease.try_read(into.data)
        took_s = time.perf_counter() - began_at
        assert op == "write" or (self.source == self.target).all()
        return took_s

    def prepare(self, op: Op) -> None:
        """Before the time is taken: remove the entries, or drop their pages."""
        if op == "write":
            for name in self.names:
                self.tier.discard(name)
            return
        self.target[:] = 0
        os.sync()
        for name in self.names:
            fd = os.open(self.folder / name.hex(), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(place: Path, body_bytes: int, given: argparse.Namespace) -> dict[str, object]:
    """MB/s of everything for one size of entries."""
    total_bytes = given.total_mib << 20
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (total_bytes // body_bytes, body_bytes), dtype=np.uint8)
    runs: dict[str, Callable[[Op], float]] = {
        fio_name(depth): Fio(place, body_bytes, total_bytes, depth).run for depth in given.depths
    }
    runs[FLUSHED] = Fio(place, body_bytes, total_bytes, 1, is_each_flushed=True).run
    rates: dict[Op, dict[str, list[float]]] = {"write": {}, "read": {}}
    chance = random.Random(2)
    with ExitStack() as stack:
        for name, (direct_io, durable) in SETTINGS.items():
            run = TierRun(place / name, source, direct_io=direct_io, durable=durable)
            stack.enter_context(closing(run.tier))
            runs[name] = run.run
        for _ in range(given.rounds):
            for op, by_name in rates.items():
                for name in chance.sample(sorted(runs), len(runs)):
                    os.sync()  # what one leaves is not written in the next one's time
                    by_name.setdefault(name, []).append(total_bytes / runs[name](op) / 1e6)
    best = [fio_name(depth) for depth in given.depths]
    return {
        op: {
            name: summarize(by_name, name, [FLUSHED] if op == "write" and name in DURABLE else best)
            for name in runs
        }
        for op, by_name in rates.items()
    }


def fio_name(depth: int) -> str:
    """What it is called in tables."""
    return f"fio, depth {depth}"


def summarize(rates: dict[str, list[float]], name: str, best: list[str]) -> dict[str, float]:
    """MB/s, and the ratio to the best of those runs of fio in the same round."""
    low, median, high = statistics.quantiles(rates[name], n=4, method="inclusive")
    limits = [max(rates) for rates in zip(*(rates[each] for each in best), strict=True)]
    ratios = [rate / limit for rate, limit in zip(rates[name], limits, strict=True)]
    return {
        "low": round(low),
        "median": round(median),
        "high": round(high),
        "of_fio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    """Measure, print a table as in docs/store.md, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--body-kib", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, object] = {}
    for body_kib in given.body_kib:
        with tempfile.TemporaryDirectory(dir=given.directory) as place:
            found[str(body_kib << 10)] = by_op = measure(Path(place), body_kib << 10, given)
        print_table(body_kib, by_op)
    if given.output is not None:
        result = {
            "total_bytes": given.total_mib << 20,
            "num_rounds": given.rounds,
            "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "python": sys.version},
            "rates_mb_per_s": found,
        }
        given.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def print_table(body_kib: int, by_op: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """One size of entries."""
    print(f"| {body_kib} KiB, MB/s | write | of fio | read | of fio |\n|---|---|---|---|---|")
    for name, write in by_op["write"].items():
        cells = [
            f"{each['median']} ({each['low']} to {each['high']}) | {each['of_fio']:.2f}"
            for each in (write, by_op["read"][name])
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(flush=True)


if __name__ == "__main__":
    main()
