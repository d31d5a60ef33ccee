"""Real transfers between two processes of this machine, and how fast the machine was at each.

    python benchmarks/record_link.py --transport shared --seconds 20

One process sends messages of random sizes to another one, each of the two on a core of its own.
Before each transfer it copies as many bytes within its own memory: what this copy takes says how
fast the machine's memory is at that moment, without the transport and without the other process.
The kernel's counters say for how long the processes that move bytes waited for their cores.

The pools are larger than processors' caches, as an engine's KV cache is. With small ones each
program that takes the core for a moment makes the next 10 to 15 transfers slower: they find their
bytes no longer in the processor's caches.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.clock import MachineClock
from baton.rig.backend import BackendSpec
from baton.rig.node import run_node
from baton.rig.nodes import LocalNodes
from baton.rig.pages import PAGE_BYTES, Workload, layout_moves
from baton.rig.pair import NodePair
from baton.rig.transport import TransportBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from baton.rig.backend import Backend, BackendContext, Build

SIZES = (64 << 10, 256 << 10, 1 << 20)
POOL_BYTES = 128 << 20
NUM_PAGES = POOL_BYTES // PAGE_BYTES
NUM_PLACES = 512
NUM_OF_CALL = 500
WINDOW = 50
SLOW = log(1.3)
MACHINE_SLOW = log(1.15)
MOST_WAITED = 0.05
"""Of the transfers' time: a machine on which the two processes wait for longer has other work."""


class RecordTransfers(msgspec.Struct, frozen=True):
    """Make so many transfers. `owner_pid`: the process at the other end."""

    num_transfers: int
    seed: int
    owner_pid: int


class RecordingBackend(TransportBackend):
    """`record`: float64 `[n, 5]`, the columns of `Recording`. `pid`: the number of this process."""

    def __init__(self, command: Build, context: BackendContext) -> None:
        super().__init__(command.name, command.options, context)
        self._actions: dict[int, list[Callable[[], None]]] = {}
        self._copied = np.ones(POOL_BYTES, np.uint8)
        self._copy = np.full_like(self._copied, 2)
        self._schedstats: list[int] = []
        self._waited_s = 0.0

    def call(self, name: str, payload: bytes) -> bytes:
        """See `Backend`."""
        if name == "pid":
            return str(os.getpid()).encode()
        if name != "record":
            return super().call(name, payload)
        request = msgspec.msgpack.decode(payload, type=RecordTransfers)
        if not self._actions:
            self._prepare_all(request)
        rng = random.Random(request.seed)
        self._waited_s = self._read_waited_s()
        rows = [self._transfer(rng) for _ in range(request.num_transfers)]
        return np.array(rows).tobytes()

    def _prepare_all(self, request: RecordTransfers) -> None:
        # Over shared memory this process copies alone: the other one's waits delay nothing.
        pids = [os.getpid(), request.owner_pid][: 1 if self.traits.limit == "memcpy" else 2]
        for pid in pids:
            self._schedstats.append(os.open(f"/proc/{pid}/schedstat", os.O_RDONLY))
        for size in SIZES:
            moves = layout_moves(Workload("message", size), NUM_PAGES)[:NUM_PLACES]
            self._actions[size] = [self.prepare(move, "push") for move in moves]
            for action in self._actions[size]:
                action()

    def _read_waited_s(self) -> float:
        """For how long those who copy were ready to run and did not."""
        return sum(int(os.pread(fd, 99, 0).split()[1]) for fd in self._schedstats) / 1e9

    def _transfer(self, rng: random.Random) -> tuple[float, int, float, float, float]:
        size = rng.choice(SIZES)
        action = rng.choice(self._actions[size])
        begin = rng.randrange(POOL_BYTES - size)
        source, target = self._copied[begin : begin + size], self._copy[begin : begin + size]
        copying = time.perf_counter()
        np.copyto(target, source)
        copy_s = time.perf_counter() - copying
        began = time.perf_counter()
        action()
        seconds = time.perf_counter() - began
        waited_before_s, self._waited_s = self._waited_s, self._read_waited_s()
        return began, size, seconds, copy_s, self._waited_s - waited_before_s


def build_backend(command: Build, context: BackendContext) -> Backend:
    """See `BuildBackend`."""
    return RecordingBackend(command, context)


@dataclass(frozen=True)
class Recording:
    """What was recorded: one entry for each transfer, `[n]` each, in their order.

    `copy_s`: of a copy of as many bytes before it. `waited_s`: for how long the processes
    that move bytes waited for a core from the end of the transfer before to its own end, in sum.
    """

    began_s: NDArray[np.float64]
    num_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    copy_s: NDArray[np.float64]
    waited_s: NDArray[np.float64]

    @property
    def transfers(self) -> list[tuple[int, float]]:
        """`(bytes, seconds)`."""
        return list(zip(self.num_bytes.tolist(), self.seconds.tolist(), strict=True))

    def save(self, path: Path) -> None:
        """Keep it for other runs."""
        np.savez(path, *self._columns)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """What `save` kept."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(*(kept[f"arr_{number}"] for number in range(5)))

    @property
    def _columns(self) -> tuple[NDArray[np.float64] | NDArray[np.int64], ...]:
        return self.began_s, self.num_bytes, self.seconds, self.copy_s, self.waited_s

    def only_on_steady_machine(self) -> Recording:
        """The stretches in which the machine was as it mostly was.

        The choice is made by copies and waits, not by what transfers took.
        """
        is_steady = np.repeat(~_is_machine_slow(self), WINDOW)
        return Recording(*(column[: len(is_steady)][is_steady] for column in self._columns))


def record(transport: str, seconds: float) -> Recording:
    """Real transfers between two processes for so long."""
    clock = MachineClock()
    nodes = LocalNodes(clock, (sys.executable, str(Path(__file__).resolve())))
    rows: list[NDArray[np.float64]] = []
    with NodePair(BackendSpec("transport", transport, {}), NUM_PAGES, nodes) as pair:
        owner_pid = int(pair.call("owner", "pid"))
        for size in SIZES:
            pair.verify(Workload("message", size), "push")
        began = clock.now()
        while clock.now() - began < seconds:
            request = RecordTransfers(NUM_OF_CALL, len(rows), owner_pid)
            payload = msgspec.msgpack.encode(request)
            found = pair.call("driver", "record", payload, peer_serves=True)
            rows.append(np.frombuffer(found).reshape(-1, 5))
    columns = np.concatenate(rows).T
    return Recording(columns[0], columns[1].astype(np.int64), *columns[2:])


@dataclass(frozen=True)
class Stretches:
    """Disjoint stretches of `WINDOW` transfers, and those whose median is 30 % over that of all.

    A detector that finds +30 % within so many transfers finds these. `num_machine_slow`: stretches
    in which copies took 15 % longer (geometric mean) than the median of all, or the processes
    waited for cores for 5 % of the time; `num_both`: those that are slow themselves, too.
    `correlation`: of each transfer's residual with the next one's; `copy_correlation`: of the
    stretches' medians with the means of the copies. `first_ratio`: the median of the first 512
    transfers over that of all.
    """

    num_transfers: int
    num_stretches: int
    num_slow: int
    num_machine_slow: int
    num_both: int
    correlation: float
    copy_correlation: float
    first_ratio: float


def find_stretches(recording: Recording) -> Stretches:
    """See `Stretches`."""
    residuals = _residuals(recording.num_bytes, recording.seconds)
    medians = np.median(_in_stretches(residuals), axis=1)
    copies = _copies_of_stretches(recording)
    is_slow, is_machine_slow = medians >= SLOW, _is_machine_slow(recording)
    clipped = np.clip(residuals, -1.0, 1.0)
    return Stretches(
        len(residuals),
        len(medians),
        int(is_slow.sum()),
        int(is_machine_slow.sum()),
        int((is_slow & is_machine_slow).sum()),
        _correlation(clipped[1:], clipped[:-1]),
        _correlation(medians, copies),
        float(np.exp(np.median(residuals[:512]))),
    )


def _copies_of_stretches(recording: Recording) -> NDArray[np.float64]:
    """Means of the copies' residuals, for each stretch: they also show a slow part of it."""
    residuals = _in_stretches(_residuals(recording.num_bytes, recording.copy_s))
    means: NDArray[np.float64] = residuals.mean(axis=1)
    return means


def _is_machine_slow(recording: Recording) -> NDArray[np.bool_]:
    """For each stretch."""
    waited_s = _in_stretches(recording.waited_s).sum(axis=1)
    seconds = _in_stretches(recording.seconds).sum(axis=1)
    is_slow: NDArray[np.bool_] = (_copies_of_stretches(recording) >= MACHINE_SLOW) | (
        waited_s >= MOST_WAITED * seconds
    )
    return is_slow


def _in_stretches(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[num_stretches, WINDOW]`."""
    return values[: len(values) // WINDOW * WINDOW].reshape(-1, WINDOW)


def _residuals(num_bytes: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithms of times over the median time of the size, `[n]`."""
    logarithms = np.log(np.maximum(seconds, 1e-9))
    for size in SIZES:
        logarithms[num_bytes == size] -= np.median(logarithms[num_bytes == size])
    residuals: NDArray[np.float64] = logarithms
    return residuals


def _correlation(some: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    return float(np.corrcoef(some, others)[0, 1])


def main() -> None:
    """Be one of the two processes, or record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="shared")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, help="a file for what was recorded (.npz)")
    options = parser.parse_args()
    if options.fd is not None:
        run_node(build_backend)
    recording = record(options.transport, options.seconds)
    if options.keep is not None:
        recording.save(options.keep)
    print(find_stretches(recording))


if __name__ == "__main__":
    main()
