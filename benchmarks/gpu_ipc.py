"""Part `cuda_ipc` of `bench_gpu.py`: pages from one process to another on the same GPU.

This process drives; `python gpu_ipc.py DEVICE NUM_PAGES` is the owner. Both have the same clock
(CLOCK_MONOTONIC), so that a write takes from the call here until its notification is there.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
import xxhash
from gpu_ipc_peers import (
    PAGE_BYTES,
    Direction,
    IsDone,
    Move,
    Owner,
    Pool,
    Welcome,
    open_driver,
    open_owner,
    wait_until,
)
from gpu_kernel import LIMIT
from gpu_rows import Failure, Row, Spread

from baton.engines.gpu.page_copier import choose_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench_gpu import Setup

    Start = Callable[[Move, Direction], IsDone]

ONE_PROCESS = " within one process"
STDIN_INTERVAL = 64
"""Polls of the owner between two looks for a command."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Open a peer; the answer is its description or an error."""

    name: str
    welcome: Welcome


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """From now on this peer is polled."""

    name: str


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Random bytes in all pages."""

    seed: int


class Check(msgspec.Struct, frozen=True, tag="check"):
    """The digest of these pages, in this order."""

    pages: list[int]


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """When the next notification came."""


Command = Open | Serve | Fill | Check | Arrival


class Answer(msgspec.Struct, frozen=True):
    """Of the owner; `error` where it failed."""

    described: bytes = b""
    digest: str = ""
    at_s: float = 0.0
    error: str = ""


def digest(pool: Pool, index: np.ndarray) -> str:
    """Of these pages, in this order."""
    pages = pool.pages[torch.from_numpy(index).to(pool.pages.device)]
    return xxhash.xxh3_128_hexdigest(pages.cpu().numpy())


# ---------------------------------------------------------------------------- the owner's process


class Owners:
    """The owner's sides of the peers. One of them is polled; its arrivals are kept."""

    def __init__(self, device: torch.device, num_pages: int) -> None:
        self._pool = Pool.make(device, num_pages)
        self._owners: dict[str, Owner] = {}
        self._served: Owner | None = None
        self._arrived_s: list[float] = []

    def poll(self) -> bool:
        """Serve the peer; whether a notification has come that was not asked for yet."""
        if self._served is not None:
            num_arrived = self._served.serve()
            self._arrived_s += [time.perf_counter()] * num_arrived
        return bool(self._arrived_s)

    def answer(self, command: Command) -> Answer:
        """Do what is asked."""
        match command:
            case Open(name, welcome):
                self._served = self._owners[name] = open_owner(name, self._pool, welcome)
                return Answer(described=self._served.describe())
            case Serve(name):
                self._served = self._owners[name]
                self._arrived_s.clear()
            case Fill(seed):
                self._pool.fill(seed)
            case Check(pages):
                return Answer(digest=digest(self._pool, np.array(pages)))
            case Arrival():
                wait_until(self.poll)
                return Answer(at_s=self._arrived_s.pop(0))
        return Answer()


def own(device: str, num_pages: int) -> None:
    """Poll one peer all the time, and answer commands until the input ends."""
    owners = Owners(torch.device(device), num_pages)
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.buffer.readline()
            if not line:
                return
            try:
                answer = owners.answer(msgspec.json.decode(line, type=Command))
            except Exception as exc:  # noqa: BLE001 - the other process reports it
                answer = Answer(error=f"{type(exc).__name__}: {exc}")
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        for _ in range(STDIN_INTERVAL):
            owners.poll()


class OwnerProcess:
    """The other process, and how it is asked."""

    def __init__(self, setup: Setup) -> None:
        command = [sys.executable, __file__, str(setup.device), str(setup.num_ipc_pages)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, command: Command) -> Answer:
        """Its answer.

        Raises:
            RuntimeError: it has ended, or reports an error.
        """
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()
        # A thread that slept would begin its next call with cold caches.
        while not select.select([self._process.stdout], [], [], 0)[0]:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the owner's process ended ({self._process.wait(10)})")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise RuntimeError(f"owner: {answer.error}")
        return answer

    def close(self) -> None:
        """End it; NIXL's threads may not let it end by itself."""
        try:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


# ---------------------------------------------------------------------------- this process


@dataclass(frozen=True)
class Request:
    """How many pages, and whether they are one run on either side."""

    num_pages: int
    is_scattered: bool

    @property
    def name(self) -> str:
        """For a table."""
        if self.num_pages == 1:
            return f"1 page of {PAGE_BYTES >> 10} KiB"
        kind = "" if self.is_scattered else " neighbours"
        return f"{self.num_pages:,} x {PAGE_BYTES >> 10} KiB{kind}"

    def moves(self, num_pool_pages: int) -> Iterator[Move]:
        """Without end, from all of both pools: no page is in the L2 cache."""
        random = np.random.default_rng(self.num_pages)
        while True:
            if self.is_scattered:
                ends = (random.permutation(num_pool_pages)[: self.num_pages] for _ in range(2))
                yield Move(*ends)
            else:
                firsts = random.integers(0, num_pool_pages - self.num_pages, 2)
                yield Move(*(first + np.arange(self.num_pages) for first in firsts))


class Bench:
    """The ways to move, by name. Those within one process have no owner."""

    def __init__(self, setup: Setup, owner: OwnerProcess) -> None:
        self._setup, self._owner = setup, owner
        self._pool = Pool.make(setup.device, setup.num_ipc_pages)
        self._other = torch.empty_like(self._pool.pages)
        self._copier = choose_copier(setup.device)
        self.starts: dict[str, Start] = {
            LIMIT + ONE_PROCESS: self._copy_run,
            f"{type(self._copier).__name__}{ONE_PROCESS}": self._copy_pages,
        }
        self.failures: list[Failure] = []

    def connect(self, name: str) -> None:
        """Open both sides of a peer; a failure is kept."""
        try:
            welcome = Welcome.make()
            described = self._owner.ask(Open(name, welcome)).described
            self.starts[name] = open_driver(name, self._pool, welcome, described).start
        except Exception as exc:  # noqa: BLE001 - the others still have something to show
            self._drop(name, exc)

    def measure(self, request: Request, direction: Direction) -> list[Row]:
        """One row for each way, in turns, after a move whose bytes are compared."""
        times: dict[str, list[tuple[float, float]]] = {}
        moves = request.moves(len(self._pool.pages))
        num_rounds = self._setup.num_ipc_rounds if request.num_pages > 1 else 100
        for number in range(num_rounds + 1):
            for name, start in list(self.starts.items()):
                if direction == "read" and name.endswith(ONE_PROCESS):
                    continue
                try:
                    if not number:
                        self._check(name, start, next(moves), direction)
                    taken = self._time(name, start, next(moves), direction)
                except Exception as exc:  # noqa: BLE001 - see `connect`
                    self._drop(name, exc)
                    continue
                if number:
                    times.setdefault(name, []).append(taken)
        return [
            Row(
                part=f"cuda_ipc, {direction}",
                what=request.name,
                by=name,
                num_bytes=request.num_pages * PAGE_BYTES,
                seconds=Spread.of([each for each, _ in found]),
                calling_s=Spread.of([each for _, each in found]),
            )
            for name, found in times.items()
        ]

    def _time(
        self, name: str, start: Start, move: Move, direction: Direction
    ) -> tuple[float, float]:
        """Seconds until the bytes are known to be in place, and of the call."""
        is_between = not name.endswith(ONE_PROCESS)
        if is_between:
            self._owner.ask(Serve(name))
        began = time.perf_counter()
        is_done = start(move, direction)
        called = time.perf_counter()
        wait_until(is_done)
        ended = time.perf_counter()
        if is_between and direction == "write":
            ended = self._owner.ask(Arrival()).at_s
        return ended - began, called - began

    def _check(self, name: str, start: Start, move: Move, direction: Direction) -> None:
        if name.endswith(ONE_PROCESS):
            return
        ours, theirs = np.random.default_rng().integers(1 << 30, size=2).tolist()
        self._pool.fill(ours)
        self._owner.ask(Fill(theirs))
        self._time(name, start, move, direction)
        there = self._owner.ask(Check(move.theirs.tolist())).digest
        if there != digest(self._pool, move.ours):
            raise RuntimeError(f"{direction}: other bytes arrived")

    def _drop(self, name: str, exc: Exception) -> None:
        self._setup.progress(f"cuda_ipc: {name} FAILED: {exc}")
        self.failures.append(Failure(name, f"{type(exc).__name__}: {exc}"))
        self.starts.pop(name, None)

    def _copy_run(self, move: Move, direction: Direction) -> IsDone:
        del direction
        num = len(move.ours)
        first = int(move.ours[0]) % (len(self._pool.pages) - num + 1)
        self._other[first : first + num].copy_(self._pool.pages[first : first + num])
        return self._end_of_stream()

    def _copy_pages(self, move: Move, direction: Direction) -> IsDone:
        del direction
        self._copier.gather(self._pool.pages, move.ours, self._other)
        return self._end_of_stream()

    def _end_of_stream(self) -> IsDone:
        if self._setup.device.type == "cpu":
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query


def measure_ipc(setup: Setup) -> list[Row | Failure]:
    """All requests, writes and reads."""
    owner = OwnerProcess(setup)
    try:
        bench = Bench(setup, owner)
        for name in setup.ipc_peers:
            bench.connect(name)
            setup.progress(f"cuda_ipc: opened {name}")
        rows = []
        for direction in ("write", "read"):
            for request in (Request(*each) for each in setup.ipc_requests):
                rows += bench.measure(request, direction)
                setup.progress(f"cuda_ipc: {direction}, {request.name}")
        return [*rows, *bench.failures]
    finally:
        owner.close()


if __name__ == "__main__":
    own(sys.argv[1], int(sys.argv[2]))
