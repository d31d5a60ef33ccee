"""Telemetry's part of a request's CPU time, in a real fleet: gateway, prefill and decode worker.

One fleet, whose processes can be switched between three modes while they serve
(`telemetry_probe.py`); modes take turns in every round, so that all see the same processes and, on
the average, the same machine.

    timed   CPU time of all telemetry functions, by their own thread's clock
    on      CPU time of the three processes for a request, as they are
    off     the same while nothing is recorded of it: what that saves, with its spread

`share` is the time in telemetry functions over that of the whole request; `added_share` the
difference of `on` and `off`, which is mostly the noise of the machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench_burst import read_threads
from completion_client import stream
from telemetry_probe import OFF, PLAIN, SETTLE_S, TIMED, Probe

from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = {"on": PLAIN, "off": OFF, "timed": TIMED}
MODEL = Path(__file__).parents[1] / "src/baton/models/demo"
ENGINES: dict[str, dict[str, object]] = {
    "transformers": {},
    "vllm": {"worker.engine": "vllm", "engine.kv_cache_bytes": 64 << 20},
}
NUM_REQUESTS = 6
"""In each mode of each round."""
NUM_WARM_UP = 12
NUM_TOKENS = 32
IDLE_S = 10.0
NUM_LISTED = 12
SENTENCE = "She smiled, and said nothing of it. "


@dataclass(frozen=True)
class CpuFigures:
    """Of one engine. `quartiles` are the first and the third over rounds."""

    engine: str
    num_rounds: int
    request_ms: dict[str, float]
    """CPU time of a request, by process: median of mode `on`."""
    telemetry_us: dict[str, float]
    """Of it in telemetry functions, by process: median."""
    telemetry_calls: dict[str, float]
    share: float
    share_quartiles: list[float]
    added_share: float
    added_share_quartiles: list[float]
    idle_us_per_s: dict[str, float]
    """Time in telemetry functions while no request is served, by process."""
    functions_us: dict[str, float]
    """Those that take most of a request."""


@dataclass
class Fleets:
    """One fleet and its probe. `processes` are ids by name."""

    url: str
    processes: dict[str, int]
    probe: Probe
    _num_asked: int = field(default=0, init=False)

    def ask(self, num_requests: int) -> None:
        """Streams, one after the other, of prompts of which nothing was computed before."""
        for _ in range(num_requests):
            self._num_asked += 1
            prompt = f"Letter {self._num_asked} of {os.getpid()}. " + SENTENCE * 24
            body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            stream(self.url, body | {"ignore_eos": True})

    def spend(self, mode: str, num_requests: int) -> dict[str, float]:
        """Milliseconds of CPU of each process for a request."""
        self.probe.switch(MODES[mode])
        before = self._read_cpu_s()
        self.ask(num_requests)
        after = self._read_cpu_s()
        self.probe.switch(PLAIN)
        return {name: (after[name] - before[name]) / num_requests * 1e3 for name in after}

    def time_requests(self, num_requests: int) -> dict[str, Counter[str]]:
        """What telemetry took, by process: sums of functions' calls and nanoseconds."""
        before = self._read_timed()
        self.spend("timed", num_requests)
        return self._since(before)

    def time_idle(self, for_s: float) -> dict[str, Counter[str]]:
        """The same while nothing is asked."""
        before = self._read_timed()
        self.probe.switch(TIMED)
        time.sleep(for_s)
        self.probe.switch(PLAIN)
        return self._since(before)

    def count_skipped(self) -> dict[str, float]:
        """Calls that mode `off` left out, by process."""
        return {name: sum_of(found, "skipped") for name, found in self._read_timed().items()}

    def _since(self, before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
        time.sleep(SETTLE_S)
        return {name: found - before[name] for name, found in self._read_timed().items()}

    def _read_timed(self) -> dict[str, Counter[str]]:
        return {
            name: self.probe.read(owner for owner, _, _ in read_threads(pid))
            for name, pid in self.processes.items()
        }

    def _read_cpu_s(self) -> dict[str, float]:
        return {name: sum(read_threads(pid).values()) / 1e9 for name, pid in self.processes.items()}


@contextmanager
def started(engine: str) -> Iterator[Fleets]:
    """A gateway, a prefill and a decode worker of the demo model; a core for each worker."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        probe = Probe(Path(place))
        environment = {
            **os.environ, **probe.environment, "BATON_CLUSTER_KEY": os.urandom(32).hex()
        }  # fmt: skip
        settings = {
            "worker.model": str(MODEL), "worker.served_model_name": "demo",
            "engine.num_threads": 1, **ENGINES[engine],
        }  # fmt: skip
        with Fleet(Path(place), environment) as fleet:
            prefill = fleet.start_worker("prefill-0", "prefill", settings, cores=cores[:1])
            decode = fleet.start_worker("decode-0", "decode", settings, cores=cores[-1:])
            gateway = fleet.start_gateway([prefill.wait_ready()], [decode.wait_ready()])
            processes = {"gateway": gateway.pid, "prefill": prefill.pid, "decode": decode.pid}
            yield Fleets(gateway.url, processes, probe)


def measure_cpu(engine: str, num_rounds: int) -> CpuFigures:
    """Start a fleet of this engine, and take turns.

    Raises:
        RuntimeError: in some process nothing was timed, or switched off.
    """
    spent: list[dict[str, dict[str, float]]] = []
    timed: list[dict[str, Counter[str]]] = []
    with started(engine) as fleets:
        fleets.ask(NUM_WARM_UP)
        for number in range(num_rounds):
            modes = ("on", "off") if number % 2 else ("off", "on")
            spent.append({mode: fleets.spend(mode, NUM_REQUESTS) for mode in modes})
            timed.append(fleets.time_requests(NUM_REQUESTS))
        idle = fleets.time_idle(IDLE_S)
        skipped = fleets.count_skipped()
    by_process = [{name: sum_of(found, "ns") for name, found in each.items()} for each in timed]
    if not all(min(each.values()) > 0 for each in (*by_process, skipped)):
        raise RuntimeError(f"telemetry was not switched: timed {by_process}, skipped {skipped}")
    on_ms = [sum(each["on"].values()) for each in spent]
    added = [on / sum(each["off"].values()) - 1 for on, each in zip(on_ms, spent, strict=True)]
    shares = [
        sum(each.values()) / NUM_REQUESTS / 1e6 / on
        for each, on in zip(by_process, on_ms, strict=True)
    ]
    names = fleets.processes
    return CpuFigures(
        engine=engine,
        num_rounds=num_rounds,
        request_ms={name: statistics.median(each["on"][name] for each in spent) for name in names},
        telemetry_us={
            name: statistics.median(each[name] for each in by_process) / NUM_REQUESTS / 1e3
            for name in names
        },
        telemetry_calls={
            name: statistics.median(sum_of(each[name], "calls") for each in timed) / NUM_REQUESTS
            for name in names
        },
        share=statistics.median(shares),
        share_quartiles=statistics.quantiles(shares, n=4)[::2],
        added_share=statistics.median(added),
        added_share_quartiles=statistics.quantiles(added, n=4)[::2],
        idle_us_per_s={name: sum_of(found, "ns") / IDLE_S / 1e3 for name, found in idle.items()},
        functions_us=list_functions(timed),
    )


def sum_of(found: Counter[str], what: str) -> float:
    """Of all functions: `calls`, `ns` or `skipped`."""
    return sum(number for name, number in found.items() if name.endswith(f"/{what}"))


def list_functions(timed: list[dict[str, Counter[str]]]) -> dict[str, float]:
    """Microseconds of a request in those functions that take most, all processes together."""
    total: Counter[str] = Counter()
    for each in timed:
        for found in each.values():
            total.update(found)
    times = Counter({
        name.removesuffix("/ns"): ns / (len(timed) * NUM_REQUESTS) / 1e3
        for name, ns in total.items()
        if name.endswith("/ns")
    })
    return {name: round(us, 2) for name, us in times.most_common(NUM_LISTED)}
