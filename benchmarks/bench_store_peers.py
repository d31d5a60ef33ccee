"""Tiers in memory beside Mooncake Store: one request's KV in and out.

    python benchmarks/bench_store_peers.py --json benchmarks/results/store-peers.json
    python benchmarks/bench_store_peers.py --entry-bytes 65536 1048576 8388608 --json FILE

A request of `--tokens` tokens in Llama-3.1-8B's layout (128 KiB a token in bfloat16: 256 MiB for
2,048), as entries of 64 tokens (8 MiB) or of `--entry-bytes`. Each round puts all of it and reads
all of it once in each place, in another order; bytes are compared with the source after each read.

    memcpy            array to array: the limit
    copy and tag      the same into memory like that of `shared`, and back, with each entry's tag
                      made and checked, and nothing else: the limit with verification
    host, shared      Baton's tiers, entry by entry, with what workers pay: name, tag, check
    shared, together  the same, but 8 entries are put at once (`put_many`)
    mooncake          Mooncake Store (`batch_put_from`, `batch_get_into`, memory registered), in a
                      segment of this process
    mooncake shm      the same, in the segment of a `mooncake_client` of this host, which maps the
                      memory that source and target lie in. `shared` is beside this one
    mooncake tcp      the same, in the segment of another process, over TCP on loopback

Mooncake Store does not check bytes as it is run here. GB/s of the clock, and for each CPU second of
all processes that take part (its threads use both cores).

Mooncake listens on all interfaces, so all of this runs in a network namespace of its own, which
needs `unshare` and `ip`. Without `mooncake.store`, or with several sizes, its rows are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from run_record import write_record

from baton.clock import MachineClock
from baton.handoff.pool_mode.keep_queue import KEEP_BATCH_ENTRIES
from baton.store.entry_format import MAGIC, BodyCheck, BodySeal, parse_header
from baton.store.folder.body_pool import COPIED_IN_BYTES, PIECE_BYTES, copy_in
from baton.store.interface import EntryName, NamedBody, PutResult, TierContext
from baton.store.tiers.host import HostTier, HostTierOptions
from baton.store.tiers.shared import SharedTier, SharedTierOptions
from baton.transfer.huge_pages import fill_with_huge_pages, map_shared

if TYPE_CHECKING:
    from baton.store.entry_format import EntryHeader
    from baton.store.interface import Tier

TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
"""Llama-3.1-8B: layers, keys and values, KV heads, their size, bfloat16."""
ENTRY_BYTES = 64 * TOKEN_BYTES
START_S = 3.0
KEY = bytes(32)
BUFFER_BYTES = 64 << 20
CONTAINED = "--contained"
ORDER = (
    *("memcpy", "copy and tag", "host", "shared", "shared, together"),
    *("mooncake", "mooncake shm", "mooncake tcp"),
    *("redis", "redis-py", "object", "obstore"),
)
"""Of the table's rows."""
FIGURES = ("GB/s (quartiles)", "of the limit", "GB per CPU s")


class Place(Protocol):
    """Where KV is kept."""

    name: str
    source: np.ndarray
    target: np.ndarray

    def put(self, names: list[bytes]) -> None:
        """Keep each row of the source."""
        ...

    def read(self, names: list[bytes]) -> None:
        """Get each row into the target."""
        ...

    def forget(self, names: list[bytes]) -> None:
        """Remove all; not measured."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds until now of other processes that serve it."""
        ...


class Memcpy:
    """Array to array."""

    name = "memcpy"

    def __init__(self, source: np.ndarray, target: np.ndarray) -> None:
        self.source, self.target = source, target
        self.kept = np.ones_like(source)

    def put(self, names: list[bytes]) -> None:
        """Copy each row."""
        del names
        for row, kept in zip(self.source, self.kept, strict=True):
            np.copyto(kept, row)

    def read(self, names: list[bytes]) -> None:
        """Copy each row back."""
        del names
        for row, kept in zip(self.target, self.kept, strict=True):
            np.copyto(row, kept)

    def forget(self, names: list[bytes]) -> None:
        """Nothing to do."""

    def cpu_s(self) -> float:
        """None."""
        return 0.0


class CopyAndTag(Memcpy):
    """What a verified put and read are at least, by this library's tag."""

    name = "copy and tag"

    def __init__(self, folder: str, source: np.ndarray, target: np.ndarray) -> None:
        super().__init__(source, target)
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE)
        os.ftruncate(fd, source.nbytes)
        fill_with_huge_pages(fd, source.nbytes)
        os.posix_fallocate(fd, 0, source.nbytes)
        self.memory = map_shared(fd, source.nbytes)
        os.close(fd)
        self.kept = np.frombuffer(self.memory, np.uint8).reshape(source.shape)
        self.headers: list[EntryHeader] = []

    def put(self, names: list[bytes]) -> None:
        """Each row, some MiB at once."""
        self.headers = []
        for name, row, kept in zip(names, self.source, self.kept, strict=True):
            seal = BodySeal(KEY, EntryName(name), len(row))
            for piece in copy_in(
                iter(np.split(kept, max(1, len(row) // COPIED_IN_BYTES))), row.data
            ):
                seal.add(piece.data)
            header = parse_header(seal.make_header(MAGIC))
            assert header is not None
            self.headers.append(header)

    def read(self, names: list[bytes]) -> None:
        """Each row, a MiB at once."""
        del names
        for header, row, kept in zip(self.headers, self.target, self.kept, strict=True):
            check = BodyCheck(KEY, header)
            for at in range(0, len(row), PIECE_BYTES):
                piece = row[at : at + PIECE_BYTES]
                piece[:] = kept[at : at + PIECE_BYTES]
                check.add(piece.data)
            assert check.is_passed()


class BatonTier:
    """One of Baton's tiers."""

    def __init__(self, tier: Tier, name: str, source: np.ndarray, target: np.ndarray) -> None:
        self.tier, self.name, self.source, self.target = tier, name, source, target

    def put(self, names: list[bytes]) -> None:
        """Entry by entry."""
        for name, row in zip(names, self.source, strict=True):
            self.tier.put(EntryName(name), memoryview(row))

    def read(self, names: list[bytes]) -> None:
        """Entry by entry."""
        for name, row in zip(names, self.target, strict=True):
            lease = self.tier.try_lease(EntryName(name))
            assert lease is not None
            with lease:
                assert lease.try_read(memoryview(row))

    def forget(self, names: list[bytes]) -> None:
        """Discard each."""
        for name in names:
            self.tier.discard(EntryName(name))

    def cpu_s(self) -> float:
        """None: there is no daemon."""
        return 0.0


class FullTier(BatonTier):
    """One whose old entries make room, so that memory is used again."""

    def forget(self, names: list[bytes]) -> None:
        """The next round's entries do it."""


class TierTogether(BatonTier):
    """Some entries are put at once."""

    def put(self, names: list[bytes]) -> None:
        """As many as a worker keeps at once, at most."""
        rows = zip(names, self.source, strict=True)
        entries = [NamedBody(EntryName(name), row.data) for name, row in rows]
        for at in range(0, len(entries), KEEP_BATCH_ENTRIES):
            batch = entries[at : at + KEEP_BATCH_ENTRIES]
            results = self.tier.put_many(batch)  # type: ignore[attr-defined] # of tier `shared`
            assert results == [PutResult.STORED] * len(batch)


class Mooncake:
    """Mooncake Store with one segment. `others` are the processes that serve it."""

    def __init__(self, name: str, store: Any, others: list[int], arrays: list[np.ndarray]) -> None:  # noqa: ANN401 - Mooncake is untyped
        self.name, self.store, self.others = name, store, others
        self.source, self.target = arrays
        for array in arrays:
            check(store.register_buffer(array.ctypes.data, array.nbytes))

    def put(self, names: list[bytes]) -> None:
        """All in one batch."""
        for code in self.store.batch_put_from(*describe(names, self.source)):
            check(code)

    def read(self, names: list[bytes]) -> None:
        """All in one batch."""
        keys, places, sizes = describe(names, self.target)
        if self.store.batch_get_into(keys, places, sizes) != sizes:
            raise AssertionError(self.name)

    def forget(self, names: list[bytes]) -> None:
        """Remove each, though what was read is leased."""
        for name in names:
            check(self.store.remove(name.hex(), force=True))

    def cpu_s(self) -> float:
        """The master's, and that of the segment's process."""
        return sum(map(read_cpu_s, self.others))


def make_local(stack: ExitStack, arrays: list[np.ndarray]) -> Mooncake:
    """Its segment is in this process."""
    master = start_master(stack, 50100)
    store = open_store(50100, 4 * arrays[0].nbytes, "127.0.0.1:50101")
    stack.callback(store.close)
    return Mooncake("mooncake", store, [master], arrays)


def make_tcp(stack: ExitStack, arrays: list[np.ndarray]) -> Mooncake:
    """Its segment is in another process, which does nothing else."""
    master = start_master(stack, 50200)
    owner = start(
        stack, sys.executable, __file__, "--own", f"50200:{4 * arrays[0].nbytes}", CONTAINED
    )
    store = open_store(50200, 0, "127.0.0.1:50201")
    stack.callback(store.close)
    return Mooncake("mooncake tcp", store, [master, owner], arrays)


def make_shm(stack: ExitStack, arrays: list[np.ndarray]) -> Mooncake:
    """Its segment is in a `mooncake_client`; the arrays are copied into memory of the store."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - only where it is there

    master = start_master(stack, 50300)
    num_bytes = arrays[0].nbytes
    owner = start(
        stack, find_program("mooncake_client"), "-host=127.0.0.1", "-port=50301",
        "-master_server_address=127.0.0.1:50300", "-metadata_server=P2PHANDSHAKE",
        f"-global_segment_size={4 * num_bytes >> 20} MB",
    )  # fmt: skip
    store = MooncakeDistributedStore()
    check(store.setup_dummy(2 * num_bytes, BUFFER_BYTES, "127.0.0.1:50301"))
    stack.callback(store.close)
    own = []
    for array in arrays:
        memory = (ctypes.c_uint8 * num_bytes).from_address(store.alloc_from_mem_pool(num_bytes))
        own.append(np.frombuffer(memory, np.uint8).reshape(array.shape))
        own[-1][:] = array
    return Mooncake("mooncake shm", store, [master, owner], own)


def open_store(port: int, segment_bytes: int, address: str) -> Any:  # noqa: ANN401 - Mooncake is untyped
    """A client with a segment of so many bytes."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - only where it is there

    store = MooncakeDistributedStore()
    where = "tcp", "", f"127.0.0.1:{port}"
    check(store.setup(address, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, *where))
    return store


def start_master(stack: ExitStack, port: int) -> int:
    """Its process id."""
    place = f"-rpc_port={port}", "-rpc_address=127.0.0.1", f"-metrics_port={port + 3}"
    return start(stack, find_program("mooncake_master"), *place)


def find_program(name: str) -> str:
    """One that was installed with Mooncake."""
    return str(Path(sys.executable).with_name(name))


def start(stack: ExitStack, *command: str) -> int:
    """A process that ends with `stack`; waits until it has had time to listen."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    time.sleep(START_S)
    if process.poll() is not None:
        raise SystemExit(f"it has ended: {' '.join(command)}")
    return process.pid


def describe(names: list[bytes], rows: np.ndarray) -> tuple[list[str], list[int], list[int]]:
    """Keys, addresses and sizes."""
    places = [int(row.ctypes.data) for row in rows]
    return [name.hex() for name in names], places, [rows.shape[1]] * len(rows)


def check(code: int) -> None:
    """Raise AssertionError for an error of Mooncake's."""
    if code != 0:
        raise AssertionError(f"Mooncake: {code}")


def read_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of another process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Run:
    """One put or read of all bytes."""

    place: str
    op: str
    seconds: float
    cpu_seconds: float
    entry_bytes: int = ENTRY_BYTES


def measure_one(place: Place, names: list[bytes]) -> list[Run]:
    """One put and one read."""
    runs = []
    place.target[:] = 0
    for op, work in (("put", place.put), ("read", place.read)):
        cpu_s, began = time.process_time() + place.cpu_s(), time.perf_counter()
        work(names)
        seconds = time.perf_counter() - began
        spent_s = time.process_time() + place.cpu_s() - cpu_s
        runs.append(Run(place.name, op, seconds, spent_s, place.source.shape[1]))
    if not (place.source == place.target).all():
        raise AssertionError(f"{place.name}: other bytes")
    place.forget(names)
    return runs


def contain() -> None:
    """Start the running script again, where nothing outside reaches it."""
    script = 'ip link set lo up && exec "$0" "$@"'
    words = [sys.executable, *sys.argv, CONTAINED]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", script, *words])


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--entry-bytes", type=int, nargs="+", default=[ENTRY_BYTES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of such a file again")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    parser.add_argument("--contained", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are ended, too
    if options.own is not None:
        port, segment_bytes = map(int, options.own.split(":"))
        store = open_store(port, segment_bytes, f"127.0.0.1:{port + 2}")
        while store is not None:
            time.sleep(60)
    if options.read is not None:
        kept = json.loads(options.read.read_bytes())
        show([Run(**run) for run in kept["runs"]], kept["num_bytes"])
        return
    is_installed = importlib.util.find_spec("mooncake") is not None
    has_mooncake = is_installed and len(options.entry_bytes) == 1
    if has_mooncake and not options.contained:
        contain()
    runs: list[Run] = []
    num_bytes = options.tokens * TOKEN_BYTES
    for entry_bytes in options.entry_bytes:
        shape = num_bytes // entry_bytes, entry_bytes
        runs += measure(shape, options.rounds, has_mooncake=has_mooncake)
    show(runs, num_bytes)
    write_record(options.json, num_bytes=num_bytes, runs=runs)


def measure(shape: tuple[int, int], num_rounds: int, *, has_mooncake: bool) -> list[Run]:
    """All places in turn, with so many entries of so many bytes."""
    source = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    target = np.ones_like(source)
    context = TierContext("bench", KEY, MachineClock())
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        shared = SharedTier(
            SharedTierOptions(directory=folder, capacity_bytes=2 * source.nbytes), context
        )
        stack.callback(shared.close)
        host = HostTier(HostTierOptions(capacity_bytes=source.nbytes), context)
        arrays = [source, target]
        places: list[Place] = [
            Memcpy(*arrays),
            CopyAndTag(folder, *arrays),
            FullTier(host, "host", *arrays),
            BatonTier(shared, "shared", *arrays),
            TierTogether(shared, "shared, together", *arrays),
        ]
        if has_mooncake:
            places += [make(stack, arrays) for make in (make_local, make_shm, make_tcp)]
        return measure_rounds(places, num_rounds)


def measure_rounds(places: list[Place], num_rounds: int) -> list[Run]:
    """Each place once in each round, in another order; two rounds before take memory into use."""
    runs: list[Run] = []
    num_entries, entry_bytes = places[0].source.shape
    chance = random.Random(2)
    for number in range(num_rounds + 2):
        chance.shuffle(places)
        names = [
            hashlib.sha256(f"{entry_bytes} {number} {row}".encode()).digest()
            for row in range(num_entries)
        ]
        for place in places:
            found = measure_one(place, names)
            runs += found if number > 1 else []
    return runs


def show(runs: list[Run], num_bytes: int, limit: str = "memcpy") -> None:
    """A table for each size: medians and quartiles of rates; ratios of medians to `limit`."""
    for entry_bytes in dict.fromkeys(run.entry_bytes for run in runs):
        print(f"entries of {entry_bytes >> 10} KiB")
        show_size([run for run in runs if run.entry_bytes == entry_bytes], num_bytes, limit)


def show_size(runs: list[Run], num_bytes: int, limit_name: str) -> None:
    """Of one size of entries."""
    limits = {op: describe_runs(runs, limit_name, op, num_bytes)[1] for op in ("put", "read")}
    print("| place |" + "".join(f" {op}, {figure} |" for op in limits for figure in FIGURES))
    print("|---" * (1 + len(limits) * len(FIGURES)) + "|")
    for place in sorted({run.place for run in runs}, key=ORDER.index):
        cells = [place]
        for op, limit in limits.items():
            low, rate, high, of_cpu = describe_runs(runs, place, op, num_bytes)
            cells += [f"{rate:.2f} ({low:.2f} to {high:.2f})", f"{rate / limit:.2f}"]
            cells.append(f"{of_cpu:.2f}")
        print("| " + " | ".join(cells) + " |")


def describe_runs(
    runs: list[Run], place: str, op: str, num_bytes: int
) -> tuple[float, float, float, float]:
    """GB/s of the clock: lower quartile, median, upper one; median of GB for each CPU second."""
    own = [run for run in runs if (run.place, run.op) == (place, op)]
    low, rate, high = statistics.quantiles([num_bytes / run.seconds / 1e9 for run in own], n=4)
    return low, rate, high, statistics.median(num_bytes / run.cpu_seconds / 1e9 for run in own)


if __name__ == "__main__":
    main()
