"""Whole fleets under load: requests/s, latency, and CPU of each process and thread per request."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
from bench_burst import read_threads
from control_figures import Sample
from control_load import make_bodies, run_load
from control_usage import Usage, sum_by_process

from baton.bench.architectures.transfer_check import fetch_traces, prove

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from pathlib import Path

    from baton.bench.architectures.results import Proof
    from baton.config.sections import Role
    from baton.testing.fleet import Fleet, FleetProcess

MODEL = {"layers": 4, "hidden": 64, "heads": 2, "kv-heads": 2}
"""2 KiB of KV per token in float32: what a request costs besides computing shows."""
LENGTHS = (32, 128, 512)
CONCURRENCIES = (1, 16, 64)
SETTLE_S = 2.0
"""After the first request, in which two workers meet and begin to measure their links."""
MOST_REQUESTS_PER_S = 3000
"""Prompts made for each second of a load: none is sent twice while a fleet serves fewer."""


@dataclass(frozen=True)
class Serving:
    """One gateway and its workers, by name."""

    engine: str
    configuration: str
    gateway: FleetProcess
    workers: dict[str, FleetProcess]

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: worker.pid for name, worker in self.workers.items()} | {
            "gateway": self.gateway.pid
        }

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Give each worker a core of its own meanwhile; the gateway runs where there is room."""
        cores = sorted(os.sched_getaffinity(0))
        try:
            for core, worker in zip(cores, self.workers.values(), strict=False):
                pin(worker.pid, {core})
            yield
        finally:
            for worker in self.workers.values():
                pin(worker.pid, set(cores))


def pin(pid: int, cores: set[int]) -> None:
    """Bind all threads of a process and of its descendants."""
    for _, thread, _ in read_threads(pid):
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue


def start_servings(fleet: Fleet, model: Path, engine: str) -> dict[str, Serving]:
    """1P1D and one colocated worker, each behind its own gateway, both of one engine."""
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "model",
        "engine.num_threads": 1,
        "engine.dtype": "float32",
    }
    if engine == "vllm":
        settings["worker.engine"] = "vllm"
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "colocated": "both"}
    workers = {
        name: fleet.start_worker(f"{engine}-{name}", role, settings) for name, role in roles.items()
    }
    for worker in workers.values():
        worker.wait_ready()
    pair, one = [workers["prefill"], workers["decode"]], workers["colocated"]
    return {
        "1P1D": Serving(
            engine, "1P1D", fleet.start_gateway(pair[:1], pair[1:]),
            {"prefill": pair[0], "decode": pair[1]},
        ),
        "colocated": Serving(
            engine, "colocated", fleet.start_gateway([], [], both=[one]), {"worker": one}
        ),
    }  # fmt: skip


class FleetLoad:
    """Loads fleets with prompts that none of them has seen."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._rng = np.random.default_rng(0)

    def warm_up(self, servings: dict[str, Serving]) -> None:
        """Links are measured, with nothing else to do; page tables filled; code paths run once."""
        for serving in servings.values():
            run_load(serving.gateway.url, self._make_bodies(min(LENGTHS), 0.1), 1, 0.0)
        time.sleep(SETTLE_S)
        for serving in servings.values():
            for num_tokens in LENGTHS:
                bodies = self._make_bodies(num_tokens, self._duration_s)
                run_load(serving.gateway.url, bodies, max(CONCURRENCIES), self._duration_s)

    def measure(
        self, serving: Serving, num_tokens: int, concurrency: int, *, is_pinned: bool = False
    ) -> Sample:
        """One load on one fleet."""
        bodies = self._make_bodies(num_tokens, self._duration_s)
        with serving.pinned() if is_pinned else nullcontext():
            before = Usage.read(serving.processes)
            load = run_load(serving.gateway.url, bodies, concurrency, self._duration_s)
            after = Usage.read(serving.processes)
        proof = asyncio.run(read_traces(serving.gateway.url, load.last_ids))
        num_requests, num_traced = len(load.latencies_s), proof.num_requests - proof.num_untraced
        cpu_ms, switches = after.cpu_ms_since(before), after.switches_since(before)

        def per_request(totals: Counter[str]) -> dict[str, float]:
            return {name: total / num_requests for name, total in totals.items()}

        return Sample(
            engine=serving.engine,
            configuration=serving.configuration,
            num_tokens=num_tokens,
            concurrency=concurrency,
            is_pinned=is_pinned,
            num_requests=num_requests,
            requests_per_s=num_requests / load.wall_s,
            p50_ms=1e3 * float(np.quantile(load.latencies_s, 0.5)),
            p99_ms=1e3 * float(np.quantile(load.latencies_s, 0.99)),
            process_cpu_ms=per_request(sum_by_process(cpu_ms)),
            thread_cpu_ms=per_request(cpu_ms),
            thread_switches=per_request(switches),
            num_traced=num_traced,
            num_handed_over=num_traced - proof.num_not_handed_over,
            transports=dict(proof.transports),
        )

    def _make_bodies(self, num_tokens: int, duration_s: float) -> list[bytes]:
        fields: dict[str, object] = {
            "model": "model", "max_tokens": 1, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        num = int(MOST_REQUESTS_PER_S * duration_s * min(1.0, 128 / num_tokens))
        return make_bodies(fields, self._rng.integers(300, 4000, (num, num_tokens)).tolist())


async def read_traces(url: str, ids: list[str]) -> Proof:
    """What the gateway's traces of these requests state."""
    async with aiohttp.ClientSession() as session:
        return prove(await fetch_traces(session, url, ids), len(ids))
