"""Real transfers between two processes of this machine, each with a copy of as many bytes beside it.

    python benchmarks/record_link.py --transport shared --seconds 20

One process sends messages of random sizes to another one, each of the two on a core of its own.
Before each transfer it copies as many bytes within its own memory: what this copy takes says how
fast the machine is at that moment, without the transport and without the other process. A stretch
of transfers that are all slower is then the link's where the copies beside them are not slower,
and the machine's where they are.
"""

from __future__ import annotations

import argparse
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
NUM_PAGES = 2 * max(SIZES) // PAGE_BYTES
NUM_PLACES = 16
NUM_OF_CALL = 1000
WINDOW = 50
SLOW = log(1.3)
COPY_SLOW = log(1.15)


class RecordTransfers(msgspec.Struct, frozen=True):
    """Make so many transfers, with a pause of `pause_s` on average before each."""

    num_transfers: int
    pause_s: float
    seed: int


class RecordingBackend(TransportBackend):
    """`record`: float64 `[n, 4]`: when, bytes, seconds of the transfer, and of the copy."""

    def __init__(self, command: Build, context: BackendContext) -> None:
        super().__init__(command.name, command.options, context)
        self._actions: dict[int, list[Callable[[], None]]] = {}
        self._copied = np.ones(2 * max(SIZES), np.uint8)
        self._copy = np.zeros_like(self._copied)

    def call(self, name: str, payload: bytes) -> bytes:
        """See `Backend`."""
        if name != "record":
            return super().call(name, payload)
        if not self._actions:
            self._prepare_all()
        request = msgspec.msgpack.decode(payload, type=RecordTransfers)
        rng = random.Random(request.seed)
        rows = [self._transfer(rng, request.pause_s) for _ in range(request.num_transfers)]
        return np.array(rows).tobytes()

    def _prepare_all(self) -> None:
        for size in SIZES:
            moves = layout_moves(Workload("message", size), NUM_PAGES)[:NUM_PLACES]
            self._actions[size] = [self.prepare(move, "push") for move in moves]
            for action in self._actions[size]:
                action()

    def _transfer(self, rng: random.Random, pause_s: float) -> tuple[float, int, float, float]:
        size = rng.choice(SIZES)
        action = rng.choice(self._actions[size])
        begin = rng.randrange(max(SIZES))
        source, target = self._copied[begin : begin + size], self._copy[begin : begin + size]
        if pause_s:
            time.sleep(rng.expovariate(1 / pause_s))
        began = time.perf_counter()
        np.copyto(target, source)
        copied = time.perf_counter()
        action()
        return began, size, time.perf_counter() - copied, copied - began


def build_backend(command: Build, context: BackendContext) -> Backend:
    """See `BuildBackend`."""
    return RecordingBackend(command, context)


@dataclass(frozen=True)
class Recording:
    """What was recorded: one entry for each transfer, `[n]` each, in their order."""

    began_s: NDArray[np.float64]
    num_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    copy_s: NDArray[np.float64]

    @property
    def transfers(self) -> list[tuple[int, float]]:
        """`(bytes, seconds)`."""
        return list(zip(self.num_bytes.tolist(), self.seconds.tolist(), strict=True))

    def save(self, path: Path) -> None:
        """Keep it for other runs."""
        np.savez(path, a=self.began_s, b=self.num_bytes, c=self.seconds, d=self.copy_s)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """What `save` kept."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(kept["a"], kept["b"], kept["c"], kept["d"])


def record(transport: str, seconds: float, pause_s: float = 0.0) -> Recording:
    """Real transfers between two processes for so long."""
    clock = MachineClock()
    nodes = LocalNodes(clock, (sys.executable, str(Path(__file__).resolve())))
    rows: list[NDArray[np.float64]] = []
    with NodePair(BackendSpec("transport", transport, {}), NUM_PAGES, nodes) as pair:
        for size in SIZES:
            pair.verify(Workload("message", size), "push")
        began = clock.now()
        while clock.now() - began < seconds:
            request = RecordTransfers(NUM_OF_CALL, pause_s, len(rows))
            payload = msgspec.msgpack.encode(request)
            found = pair.call("driver", "record", payload, peer_serves=True)
            rows.append(np.frombuffer(found).reshape(-1, 4))
    columns = np.concatenate(rows).T
    return Recording(columns[0], columns[1].astype(np.int64), columns[2], columns[3])


@dataclass(frozen=True)
class Stretches:
    """Disjoint stretches of `WINDOW` transfers whose median is 30 % over that of all.

    A detector that finds +30 % within so many transfers finds these. `per_100k`: for each 100,000
    transfers. `num_machine`: of them, those in which copies took 15 % longer, too.
    `correlation`: of each residual with the next one; `copy_correlation`: of the stretches'
    medians with those of the copies. `first_ratio`: the median of the first 512 over that of all.
    """

    num_transfers: int
    num_slow: int
    per_100k: float
    num_machine: int
    correlation: float
    copy_correlation: float
    first_ratio: float


def find_stretches(recording: Recording) -> Stretches:
    """See `Stretches`."""
    residuals = _residuals(recording.num_bytes, recording.seconds)
    of_copies = _residuals(recording.num_bytes, recording.copy_s)
    num = len(residuals) // WINDOW
    medians = np.median(residuals[: num * WINDOW].reshape(num, WINDOW), axis=1)
    copies = np.median(of_copies[: num * WINDOW].reshape(num, WINDOW), axis=1)
    is_slow = medians >= SLOW
    clipped = np.clip(residuals, -1.0, 1.0)
    return Stretches(
        len(residuals),
        int(is_slow.sum()),
        100_000 * float(is_slow.sum()) / len(residuals),
        int((is_slow & (copies >= COPY_SLOW)).sum()),
        _correlation(clipped[1:], clipped[:-1]),
        _correlation(medians, copies),
        float(np.exp(np.median(residuals[:512]))),
    )


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
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each, on average")
    parser.add_argument("--keep", type=Path, help="a file for what was recorded (.npz)")
    options = parser.parse_args()
    if options.fd is not None:
        run_node(build_backend)
    recording = record(options.transport, options.seconds, options.pause)
    if options.keep is not None:
        recording.save(options.keep)
    print(find_stretches(recording))


if __name__ == "__main__":
    main()
