"""How fast each transport moves pages between two pinned processes.

    python benchmarks/bench_transports.py [--rounds 5] [--json benchmarks/results/transports.json]

The writer runs on core 0, the receiver on core 1, each with a pre-faulted pool of 512 MiB: payloads
are cold in L3. Rows: `shared` and `tcp` from `submit` until `WriteCompleted` (the writer knows that
the bytes are in place; `read` is the other way round, until `ReadCompleted`, where a transport
reads), and two bounds that are no transports: `memcpy`, the same copies inside one process, and
`socket`, as many neighbouring bytes over one blocking TCP connection, then an answer.
Each figure is the median of the rounds, with their range; before it, random bytes are moved once
and compared. Workloads: `scatter`, 8,192 pages of 32 KiB between random places (256 MiB), and one
run of neighbouring pages of 1, 16 and 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.ids import Epoch, new_epoch, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    PageRead,
    PageWrite,
    ReadCompleted,
    RegionDescriptor,
    RemoteAttached,
    TransportContext,
    WriteCompleted,
    WriteGrant,
    as_reader,
)
from baton.transfer.region import allocate_shared_region, release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.transfer.interface import PagedRegion, Transport

PAGE_BYTES = 32_768
NUM_PAGES = 16_384
SPANS = np.array([[0, 0, PAGE_BYTES]])
WRITER_CORE, RECEIVER_CORE = 0, 1
READ = "read "


class Task(msgspec.Struct):
    """What the receiver is told."""

    kind: str
    options: dict[str, int]
    key_hex: str
    writer: Epoch
    grant: bytes


class Target(msgspec.Struct):
    """What the receiver answers."""

    descriptor: RegionDescriptor


class Check(msgspec.Struct):
    """Ask for the digest of pages in this order."""

    pages: list[int]


@dataclass(frozen=True)
class Workload:
    """Pages to copy."""

    name: str
    src_pages: np.ndarray
    dst_pages: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Bytes that it moves."""
        return len(self.src_pages) * PAGE_BYTES

    @property
    def copies(self) -> PageCopies:
        """As a transport is asked for it."""
        return PageCopies(0, (CopyGroup(self.src_pages, self.dst_pages, SPANS),))


@dataclass(frozen=True)
class Round:
    """What one transfer took: wall time, and CPU time of the writer's process."""

    wall_s: float
    writer_cpu_s: float


def make_workloads() -> list[Workload]:
    """The scatter, and three contiguous sizes."""
    rng = np.random.default_rng(7)
    scatter = Workload(
        "scatter 8192 x 32 KiB",
        rng.permutation(NUM_PAGES)[:8192],
        rng.permutation(NUM_PAGES)[:8192],
    )
    contiguous = [
        Workload(f"{mib} MiB", np.arange(mib * 32), np.arange(mib * 32) + 64)
        for mib in (1, 16, 256)
    ]
    return [scatter, *contiguous]


def digest(pages: np.ndarray, order: np.ndarray) -> str:
    """Of the pages, in this order."""
    hasher = xxhash.xxh3_128()
    for page in order:
        hasher.update(pages[page])
    return hasher.hexdigest()


def receive() -> None:
    """The child process: expose, poll, and answer digests."""
    os.sched_setaffinity(0, {RECEIVER_CORE})
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    region = replace(allocate_shared_region([(NUM_PAGES, PAGE_BYTES)]), is_public=True)
    np.frombuffer(region.memory, np.uint8)[:] = 0
    context = TransportContext(
        Credentials.of(ClusterKey.from_hex(task.key_hex)), new_epoch(), "127.0.0.1", MachineClock()
    )
    transport = TRANSPORTS.build(task.kind, task.options)(context)
    descriptor = transport.expose(region)
    transport.open_grant(WriteGrant(task.grant, region.handle, task.writer, np.arange(NUM_PAGES)))
    answer(msgspec.json.encode(Target(descriptor)))
    pages = view_pages(region.memory, region.arrays[0])
    num_arrived = 0
    while True:
        ready, _, _ = select.select([transport.readiness_fd, sys.stdin], [], [], 1.0)
        num_arrived += sum(isinstance(event, Arrived) for event in transport.poll())
        if sys.stdin in ready:
            line = sys.stdin.buffer.readline()
            if not line:
                break
            order = np.array(msgspec.json.decode(line, type=Check).pages)
            answer(digest(pages, order).encode())
    transport.close()
    del pages
    release_region(region)


def answer(line: bytes) -> None:
    """Say a line to the parent."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def measure_transport(
    kind: str, options: dict[str, int], workloads: list[Workload], num_rounds: int
) -> dict[str, list[Round]]:
    """All rounds, by workload."""
    key, epoch, grant = Credentials.generate(), new_epoch(), new_ticket_id()
    child = subprocess.Popen(
        [sys.executable, __file__, "--receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def ask(message: msgspec.Struct) -> bytes:
        child.stdin.write(msgspec.json.encode(message) + b"\n")
        child.stdin.flush()
        return child.stdout.readline()

    reply = ask(Task(kind, options, key.key.secret.hex(), epoch, grant))
    target = msgspec.json.decode(reply, type=Target)
    region = make_source()
    transport = TRANSPORTS.build(kind, options)(
        TransportContext(key, epoch, "127.0.0.1", MachineClock())
    )
    transport.expose(region)
    remote = transport.attach(target.descriptor)
    wait_for(transport, RemoteAttached)
    for _ in range(NUM_IDLE_POLLS):
        transport.poll()
    pages = view_pages(region.memory, region.arrays[0])

    def read(workload: Workload) -> None:
        as_reader(transport).read(PageRead(remote, region.handle, workload.copies))
        wait_for(transport, ReadCompleted)

    def move(workload: Workload) -> None:
        transport.submit(PageWrite(remote, grant, region.handle, workload.copies, b"n"))
        wait_for(transport, WriteCompleted)

    rounds: dict[str, list[Round]] = {}
    for workload in workloads:
        move(workload)
        there = ask(Check(workload.dst_pages.tolist())).decode().strip()
        if there != digest(pages, workload.src_pages):
            raise SystemExit(f"{kind}: {workload.name}: other bytes arrived")
        rounds[workload.name] = time_rounds(lambda: move(workload), num_rounds)  # noqa: B023
        if transport.capabilities.reads:
            reads = time_rounds(lambda: read(workload), num_rounds)  # noqa: B023
            rounds[READ + workload.name] = reads
    transport.close()
    child.stdin.close()
    child.wait(10)
    child.stdout.close()
    del pages
    release_region(region)
    return rounds


def measure_memcpy(workloads: list[Workload], num_rounds: int) -> dict[str, list[Round]]:
    """All rounds, by workload."""
    source, target = make_source(), make_source()
    src, dst = (view_pages(each.memory, each.arrays[0]) for each in (source, target))

    def copy(workload: Workload) -> None:
        if len(np.unique(np.diff(workload.src_pages))) == 1:
            count = len(workload.src_pages)
            first_src, first_dst = workload.src_pages[0], workload.dst_pages[0]
            dst[first_dst : first_dst + count] = src[first_src : first_src + count]
            return
        pairs = zip(workload.src_pages.tolist(), workload.dst_pages.tolist(), strict=True)
        for src_page, dst_page in pairs:
            dst[dst_page] = src[src_page]

    return {
        workload.name: time_rounds(lambda: copy(workload), num_rounds)  # noqa: B023
        for workload in workloads
    }


def sink() -> None:
    """The child process of `measure_socket`: take as many bytes as are announced, answer."""
    os.sched_setaffinity(0, {RECEIVER_CORE})
    pool = memoryview(bytearray(NUM_PAGES * PAGE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer(str(listener.getsockname()[1]).encode())
        peer, _ = listener.accept()
    with peer:
        while announced := peer.recv(8, socket.MSG_WAITALL):
            missing = int.from_bytes(announced, "little")
            at = 0
            while at < missing:
                at += peer.recv_into(pool[at : min(missing, at + (1 << 20))])
            peer.send(b"k")


def measure_socket(workloads: list[Workload], num_rounds: int) -> dict[str, list[Round]]:
    """All rounds, by workload."""
    child = subprocess.Popen([sys.executable, __file__, "--sink"], stdout=subprocess.PIPE)
    port = int(child.stdout.readline())
    region = make_source()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(workload: Workload) -> None:
            peer.sendall(workload.num_bytes.to_bytes(8, "little"))
            peer.sendall(region.memory[: workload.num_bytes])
            peer.recv(1)

        seconds = {
            workload.name: time_rounds(lambda: send(workload), num_rounds)  # noqa: B023
            for workload in workloads
        }
    child.wait(10)
    child.stdout.close()
    release_region(region)
    return seconds


def make_source() -> PagedRegion:
    """A pool of random bytes."""
    region = allocate_shared_region([(NUM_PAGES, PAGE_BYTES)])
    words = np.frombuffer(region.memory, np.uint64)
    words[:] = np.random.default_rng(1).integers(0, 1 << 63, len(words), np.uint64)
    return region


def time_rounds(action: Callable[[], None], num_rounds: int) -> list[Round]:
    """Each round, after one that does not count."""
    action()
    rounds = []
    for _ in range(num_rounds):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        action()
        wall_s = time.perf_counter() - begin
        rounds.append(Round(wall_s, time.process_time() - cpu_begin))
    return rounds


NUM_IDLE_POLLS = 128
"""As many as an agent makes in some seconds: `shared` prepares the peer's pages in idle polls."""


def wait_for(transport: Transport, kind: type) -> None:
    """Poll as an agent does, until the next event, which must be of this type."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for event in transport.poll():
            if isinstance(event, kind):
                return
            raise SystemExit(f"unexpected: {event}")
        select.select([transport.readiness_fd], [], [], 1.0)
    raise SystemExit(f"no {kind.__name__} in 30 s")


def report(rows: dict[str, dict[str, list[Round]]], workloads: list[Workload]) -> dict:
    """Print the rates; give them back for JSON."""
    found = {}
    for name, seconds in rows.items():
        found[name] = {}
        both = ((way + each.name, each) for each in workloads for way in ("", READ))
        for what, workload in ((what, each) for what, each in both if what in seconds):
            rounds, num_gb = seconds[what], workload.num_bytes / 1e9
            rates = [num_gb / each.wall_s for each in rounds]
            cpu_s_per_gb = statistics.median(each.writer_cpu_s for each in rounds) / num_gb
            median = statistics.median(rates)
            found[name][what] = {
                "median_gb_per_s": round(median, 3),
                "min_gb_per_s": round(min(rates), 3),
                "max_gb_per_s": round(max(rates), 3),
                "writer_cpu_s_per_gb": round(cpu_s_per_gb, 4),
                "num_rounds": len(rates),
            }
            print(
                f"{name:18} {what:29} {median:6.2f} GB/s"
                f"  ({min(rates):.2f} to {max(rates):.2f})"
                f"  writer CPU {cpu_s_per_gb:.3f} s/GB"
            )
    return found


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tcp-options", type=json.loads, default={}, help="JSON object")
    arguments = parser.parse_args()
    if arguments.receive:
        receive()
        return
    if arguments.sink:
        sink()
        return
    os.sched_setaffinity(0, {WRITER_CORE})
    workloads = make_workloads()
    rows = {
        "memcpy": measure_memcpy(workloads, arguments.rounds),
        "socket": measure_socket(workloads, arguments.rounds),
        "shared": measure_transport("shared", {}, workloads, arguments.rounds),
        "tcp": measure_transport("tcp", arguments.tcp_options, workloads, arguments.rounds),
    }
    found = report(rows, workloads)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "host": platform.platform(),
            "cores": [WRITER_CORE, RECEIVER_CORE],
            "load_average": os.getloadavg(),
            "tcp_options": arguments.tcp_options,
        }
        arguments.json.write_text(json.dumps({**header, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
