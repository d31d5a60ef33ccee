"""Tier `file` beside fio on the same disk: `python benchmarks/bench_store_file.py`.

Each round does each thing once, in an order that changes from round to round: the same number of
bytes, in requests of one entry's size, on one filesystem. What is reported is the wall-clock rate,
the median over the rounds with the quartiles, and its ratio to fio in the same round: to the best
of `fio, depth N`, or for writes that are durable to `fio, each flushed`.

- `fio, depth N`: O_DIRECT by libaio with N requests in flight, one file, flushed at its end
- `fio, each flushed`: the same with one request in flight, and fdatasync after each
- `fio, a file each`: O_DIRECT into a new file for each request, flushed when it is closed
- `direct`: the tier as it is by default, past the page cache, as a worker puts what a request
  leaves: `put_many` of 8 MiB at once, each entry on the disk before it has its name
- `direct, full`: the same in a tier that is full, so that the entries of the round before make
  room; what is removed and looked for in advance for that is in the time, too
- `direct, all at once`: one `put_many` of all entries
- `direct, one by one`: a `put` of each
- `direct, not durable`: as `direct`, with `durable = "none"`
- `page cache`: `direct_io = false`; its pages are dropped before it is read
- `page cache, not durable`: both: what was written may be in memory alone

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
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from run_record import write_record

from baton.clock import MachineClock
from baton.handoff.pool_mode.block_copier import BATCH_BYTES
from baton.store.folder.bodies import compute_cost
from baton.store.interface import EntryName, NamedBody, PutResult, TierContext
from baton.store.tiers.file import FileTier, FileTierOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Op: TypeAlias = Literal["write", "read"]
ByOp: TypeAlias = "dict[Op, dict[str, dict[str, float]]]"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a tier is opened, and how many bytes of bodies are put at once (at least one entry).

    `is_full`: it has room for the entries of one round.
    """

    direct_io: bool = True
    durable: Literal["large", "none"] = "large"
    at_once_bytes: int = BATCH_BYTES
    is_full: bool = False


KEY: Final = bytes(32)
SETTINGS: Final[Mapping[str, Setting]] = {
    "direct": Setting(),
    "direct, full": Setting(is_full=True),
    "direct, all at once": Setting(at_once_bytes=1 << 40),
    "direct, one by one": Setting(at_once_bytes=0),
    "direct, not durable": Setting(durable="none"),
    "page cache": Setting(direct_io=False),
    "page cache, not durable": Setting(direct_io=False, durable="none"),
}
FLUSHED: Final = "fio, each flushed"
FILES: Final = "fio, a file each"


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with so many requests in flight."""

    folder: Path
    body_bytes: int
    total_bytes: int
    name: str
    options: tuple[str, ...]

    def run(self, op: Op) -> float:
        """Seconds that fio took for all bytes, its flush included."""
        command = [
            *("fio", f"--name={self.name.replace(' ', '-')}", f"--directory={self.folder}"),
            *(f"--rw={op}", f"--bs={self.body_bytes}", f"--size={self.total_bytes}"),
            *("--direct=1", "--ioengine=libaio", "--output-format=json", *self.options),
        ]
        done = subprocess.run(command, check=True, capture_output=True, timeout=300)
        (job,) = json.loads(done.stdout)["jobs"]
        assert job[op]["io_bytes"] == self.total_bytes
        return job["job_runtime"] / 1000


def list_fio(folder: Path, body_bytes: int, total_bytes: int, depths: Sequence[int]) -> list[Fio]:
    """Those that are measured for one size of requests."""
    in_one_file = ("--end_fsync=1", "--fallocate=posix")
    flushed = ("--iodepth=1", "--fdatasync=1", *in_one_file)
    files = (
        *("--iodepth=1", f"--nrfiles={total_bytes // body_bytes}", f"--filesize={body_bytes}"),
        *("--openfiles=1", "--file_service_type=sequential", "--create_on_open=1"),
        *("--fsync_on_close=1", "--fallocate=none", "--unlink=1"),
    )
    options = {
        **{fio_name(depth): (f"--iodepth={depth}", *in_one_file) for depth in depths},
        FLUSHED: flushed,
        FILES: files,
    }
    return [Fio(folder, body_bytes, total_bytes, name, each) for name, each in options.items()]


class TierRun:
    """One tier with its settings, and entries of one size."""

    def __init__(self, folder: Path, source: np.ndarray, setting: Setting) -> None:
        self.folder, self.source, self.target = folder, source, np.empty_like(source)
        num_rounds = 1 if setting.is_full else 4
        options = FileTierOptions(
            directory=str(folder),
            capacity_bytes=num_rounds * len(source) * compute_cost(source.shape[1]),
            direct_io=setting.direct_io,
            durable=setting.durable,
        )
        self.tier = FileTier(options, TierContext("bench", KEY, MachineClock()))
        assert self.tier.usage().direct_io == setting.direct_io, "this filesystem refuses O_DIRECT"
        self.num_at_once = max(1, setting.at_once_bytes // len(source[0]))
        self.is_full, self.num_written = setting.is_full, 0
        self.names: list[EntryName] = []
        self.batches: list[list[NamedBody]] = []
        if self.is_full:
            self.name_entries()
            self.write()

    def name_entries(self) -> None:
        """Give the entries new names."""
        self.num_written += 1
        texts = (b"%d %d" % (self.num_written, i) for i in range(len(self.source)))
        self.names = [EntryName(hashlib.sha256(text).digest()) for text in texts]
        rows = (row.data for row in self.source)
        entries = [NamedBody(*each) for each in zip(self.names, rows, strict=True)]
        starts = range(0, len(entries), self.num_at_once)
        self.batches = [entries[at : at + self.num_at_once] for at in starts]

    def run(self, op: Op) -> float:
        """Seconds for all entries, under new names if they are written."""
        self.prepare(op)
        began_at = time.perf_counter()
        if op == "write":
            self.write()
        else:
            self.read()
        took_s = time.perf_counter() - began_at
        assert op == "write" or (self.source == self.target).all()
        return took_s

    def write(self) -> None:
        """Put all entries."""
        for batch in self.batches:
            for outcome in self.tier.put_many(batch):
                assert outcome is PutResult.STORED, outcome

    def read(self) -> None:
        """Read all entries."""
        for name, into in zip(self.names, self.target, strict=True):
            lease = self.tier.try_lease(name)
            assert lease is not None
            with lease:
                assert lease.try_read(into.data)

    def prepare(self, op: Op) -> None:
        """Before the time is taken: remove the entries, unless they make room; or drop pages."""
        if op == "write":
            if not self.is_full:
                for name in self.names:
                    self.tier.discard(name)
            self.name_entries()
            return
        self.target[:] = 0
        os.sync()
        for name in self.names:
            fd = os.open(self.folder / name.hex(), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(place: Path, body_bytes: int, given: argparse.Namespace) -> ByOp:
    """MB/s of everything for one size of entries."""
    total_bytes = given.total_mib << 20
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (total_bytes // body_bytes, body_bytes), dtype=np.uint8)
    runs: dict[str, Callable[[Op], float]] = {
        each.name: each.run for each in list_fio(place, body_bytes, total_bytes, given.depths)
    }
    rates: dict[Op, dict[str, list[float]]] = {"write": {}, "read": {}}
    chance = random.Random(2)
    with ExitStack() as stack:
        for name, setting in SETTINGS.items():
            run = TierRun(place / name, source, setting)
            stack.enter_context(closing(run.tier))
            runs[name] = run.run
        for _ in range(given.rounds):
            for op, by_name in rates.items():
                for name in chance.sample(sorted(runs), len(runs)):
                    if op == "read" and name == FILES:  # removed once they are written
                        continue
                    os.sync()  # what one leaves is not written in the next one's time
                    by_name.setdefault(name, []).append(total_bytes / runs[name](op) / 1e6)
    best = [fio_name(depth) for depth in given.depths]
    return {
        op: {
            name: summarize(
                by_name, name, [FLUSHED] if op == "write" and is_durable(name) else best
            )
            for name in runs
            if name in by_name
        }
        for op, by_name in rates.items()
    }


def is_durable(name: str) -> bool:
    """Whether each entry, or request, is on the disk before the next one is reported as written."""
    return SETTINGS[name].durable == "large" if name in SETTINGS else name in {FLUSHED, FILES}


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
    """Measure, print the table of docs/store-figures.md, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--body-kib", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such an output")
    given = parser.parse_args()
    if given.table is not None:
        print_table(json.loads(given.table.read_text("utf-8"))["rates_mb_per_s"])
        return
    found: dict[str, ByOp] = {}
    for body_kib in given.body_kib:
        with tempfile.TemporaryDirectory(dir=given.directory) as place:
            found[str(body_kib << 10)] = measure(Path(place), body_kib << 10, given)
    print_table(found)
    total_bytes = given.total_mib << 20
    write_record(
        given.output, total_bytes=total_bytes, num_rounds=given.rounds, rates_mb_per_s=found
    )


def print_table(found: Mapping[str, ByOp]) -> None:
    """MB/s of each size and operation; in brackets the ratio to fio."""
    columns = [(int(size) >> 20, op) for size in found for op in ("write", "read")]
    print(f"| | {' | '.join(f'{mib} MiB, {op}' for mib, op in columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    by_columns = [by_op[op] for by_op in found.values() for op in ("write", "read")]
    for name in by_columns[0]:
        cells = [
            f"{rates[name]['median']:,} ({rates[name]['of_fio']:.2f})" if name in rates else ""
            for rates in by_columns
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
