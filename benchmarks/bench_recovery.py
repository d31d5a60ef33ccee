"""How soon a failure is over: the recomputed first token, and pages that nobody waits for.

    python benchmarks/bench_recovery.py [--repetitions 5] [--transport shared]
        [--json benchmarks/results/recovery.json]

One core for each worker, a gateway, a random Llama, random prompts of `--tokens` (2,048).

recompute: the prefill worker is killed (SIGKILL) in the middle of a handoff; the time from there to
the first token of the answer, which decode computes by itself, over the time that a prefill of the
same length takes on that decode worker alone (measured just before, on a fresh prompt). Target: at
most 1.5. The killed worker is started again before the next round.

disconnect: a client leaves in the middle of a handoff: until both workers have all their pages back
(target: 2 s).

crash: the prefill worker is stopped (SIGSTOP) in the middle of a handoff, so that nobody can know
whether it will write again, and then killed: until decode has all its pages back, from the kill.
And the gateway is killed: until both workers are free.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from completion_client import ServerError, find_metric, get
from random_model import make_model
from rich.console import Console
from run_record import write_record

from baton.testing.fleet import Fleet, FleetProcess

if TYPE_CHECKING:
    from collections.abc import Callable

MakePrompt: TypeAlias = "Callable[[], list[int]]"
Recorder: TypeAlias = "Callable[[str, float], None]"

MODEL = {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 8}
RECOMPUTE_TARGET = 1.5
DISCONNECT_TARGET_S = 2.0
TIMEOUT_S = 180.0
console = Console(stderr=True)


@dataclass
class OpenRequest:
    """A streamed request on a thread. `first_token_at` is on the monotonic clock."""

    url: str
    prompt: list[int]
    id: str = field(default_factory=lambda: f"recovery-{os.urandom(6).hex()}")
    first_token_at: float | None = None
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)
    _connection: http.client.HTTPConnection | None = None

    def start(self) -> OpenRequest:
        """Ask."""
        self._connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=300)
        body = {"model": "model", "prompt": self.prompt, "max_tokens": 1, "temperature": 0}
        headers = {"content-type": "application/json", "x-request-id": self.id}
        text = json.dumps(body | {"stream": True, "ignore_eos": True})
        self._connection.request("POST", "/v1/completions", text, headers)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def leave(self) -> None:
        """Close the connection, as a client does that is gone."""
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def wait(self) -> float:
        """When the first token came.

        Raises:
            RuntimeError: none did.
        """
        if not self.done.wait(TIMEOUT_S) or self.first_token_at is None:
            raise RuntimeError(f"no token: {self.error}")
        return self.first_token_at

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            response = self._connection.getresponse()
            first = response.readline()
            now = time.monotonic()
            rest = response.read()
            if response.status == http.HTTPStatus.OK and b'"error"' not in first + rest:
                self.first_token_at = now
            else:
                self.error = f"HTTP {response.status}: {(first + rest)[:300]!r}"
        self.done.set()


@dataclass
class Pair:
    """A prefill and a decode worker on a core each, and their gateway."""

    fleet: Fleet
    settings: dict[str, object]
    cores: list[int]
    prefill: FleetProcess = field(init=False)
    decode: FleetProcess = field(init=False)
    gateway: FleetProcess = field(init=False)

    def open(self) -> None:
        """Start all three."""
        self.prefill, self.decode = self.start_prefill(0), self._start("decode", 0)
        self.prefill.wait_ready()
        self.decode.wait_ready()
        self.start_gateway()

    def start_prefill(self, port: int) -> FleetProcess:
        """A prefill worker, at the address of a dead one."""
        return self._start("prefill", port)

    def start_gateway(self) -> None:
        """In front of the two."""
        settings = {"gateway.probe_interval_s": 0.2}
        self.gateway = self.fleet.start_gateway([self.prefill], [self.decode], settings=settings)

    def restart_prefill(self) -> None:
        """Another life at the same address, known to the gateway."""
        port = urlsplit(self.prefill.url).port
        self.prefill = self.start_prefill(port).wait_ready()
        url = f'url="{self.prefill.url}"'
        wait_until(lambda: any(
            url in line and line.endswith(" 1.0")
            for line in get(self.gateway.url, "/metrics").splitlines()
            if line.startswith("baton_gateway_worker_up")
        ))  # fmt: skip

    def _start(self, role: str, port: int) -> FleetProcess:
        core = self.cores[0] if role == "prefill" else self.cores[-1]
        settings = self.settings | {"worker.port": port}
        return self.fleet.start_worker(role, role, settings, cores=(core,))

    def begin(self, prompt: list[int]) -> OpenRequest:
        """Ask, and return in the middle of the handoff."""
        open_request = OpenRequest(self.gateway.url, prompt).start()
        wait_until(
            lambda: (
                gauge(self.decode, "reserved") > 0 and has_written(self.prefill, open_request.id)
            )
        )
        if open_request.done.is_set():
            raise RuntimeError("too late: the handoff is over")
        return open_request

    def wait_free(self, *workers: FleetProcess) -> float:
        """Seconds until every block of these is free."""
        begun = time.monotonic()
        wait_until(lambda: all(is_free(worker) for worker in workers))
        return time.monotonic() - begun


def main() -> None:
    """Run all parts, print them, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--transport", default="shared", choices=["shared", "tcp"])
    parser.add_argument("--dtype", default="float32", help="bfloat16 where cores have units for it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), options)
    summary = {name: summarize(values) for name, values in samples.items()}
    for name, row in summary.items():
        console.print(f"{name:28} {row['median']:.3f} ({row['min']:.3f} to {row['max']:.3f})")
    targets = {"recompute_ratio": RECOMPUTE_TARGET, "disconnect_s": DISCONNECT_TARGET_S}
    write_record(options.json, targets=targets, summary=summary, samples=samples)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """All parts, in turn, so many times."""
    model = make_model(folder, MODEL, options.dtype)
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "model",
        "engine.dtype": options.dtype,
        "engine.num_threads": 1,
        "engine.num_blocks": 512,
        "engine.max_batch_tokens": 256,
        "transfer.transports": [options.transport],
        "transfer.choice": "listed",
    }
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    samples: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)
        console.print(f"{name}: {value:.3f}")

    def prompt() -> list[int]:
        return rng.integers(300, 4000, options.tokens).tolist()

    with Fleet(folder, environment) as fleet:
        pair = Pair(fleet, settings, sorted(os.sched_getaffinity(0)))
        pair.open()
        OpenRequest(pair.gateway.url, rng.integers(300, 4000, 64).tolist()).start().wait()
        for _ in range(options.repetitions):
            recompute(pair, prompt, note)
            disconnect(pair, prompt, note)
            crash_stopped(pair, prompt, note)
            crash_gateway(pair, prompt, note)
    return samples


def recompute(pair: Pair, prompt: MakePrompt, note: Recorder) -> None:
    """SIGKILL of prefill to the first token, over a local prefill."""
    begun = time.monotonic()
    local_s = OpenRequest(pair.decode.url, prompt()).start().wait() - begun
    open_request = pair.begin(prompt())
    pair.prefill.send(signal.SIGKILL)
    killed_at = time.monotonic()
    recovered_s = open_request.wait() - killed_at
    pair.prefill.kill()
    note("local_prefill_s", local_s)
    note("kill_to_first_token_s", recovered_s)
    note("recompute_ratio", recovered_s / local_s)
    pair.wait_free(pair.decode)
    pair.restart_prefill()


def disconnect(pair: Pair, prompt: MakePrompt, note: Recorder) -> None:
    """A client that leaves, to all pages free on both sides."""
    open_request = pair.begin(prompt())
    open_request.leave()
    note("disconnect_reclaimed_s", pair.wait_free(pair.prefill, pair.decode))


def crash_stopped(pair: Pair, prompt: MakePrompt, note: Recorder) -> None:
    """A writer that may come back, until it is dead: the quarantine's end."""
    open_request = pair.begin(prompt())
    pair.prefill.send(signal.SIGSTOP)
    open_request.wait()
    pair.prefill.kill()
    note("quarantine_after_death_s", pair.wait_free(pair.decode))
    pair.restart_prefill()


def crash_gateway(pair: Pair, prompt: MakePrompt, note: Recorder) -> None:
    """Nobody is left who waits."""
    pair.begin(prompt())
    pair.gateway.kill()
    note("gateway_crash_reclaimed_s", pair.wait_free(pair.prefill, pair.decode))
    pair.start_gateway()


def is_free(worker: FleetProcess) -> bool:
    """Whether every block is free, and nothing is under way."""
    text = get(worker.url, "/metrics")
    capacity = find_metric(text, "baton_worker_blocks_capacity")
    free = find_metric(text, 'baton_worker_blocks{state="free"}')
    states = ("waiting", "running", "awaiting_kv")
    busy = [find_metric(text, f'baton_worker_inflight_requests{{state="{one}"}}') for one in states]
    return free == capacity and not any(busy)


def gauge(worker: FleetProcess, state: str) -> float:
    """Blocks in a state."""
    return find_metric(get(worker.url, "/metrics"), f'baton_worker_blocks{{state="{state}"}}')


def has_written(worker: FleetProcess, request_id: str) -> bool:
    """Whether some of a request's KV was written, while the rest is being computed."""
    try:
        trace = json.loads(get(worker.url, f"/baton/v1/traces/{request_id}"))
    except (ServerError, ValueError):
        return False
    return trace.get("num_bytes", 0) > 0 and "prefill_done" not in trace["stamps"]


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll every 5 ms.

    Raises:
        RuntimeError: it does not come.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("it does not come")
        time.sleep(0.005)


def summarize(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
