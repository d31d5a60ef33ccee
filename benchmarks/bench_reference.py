"""From prefill's end to the first decode step: by reference, by push, and colocated.

    python benchmarks/bench_reference.py [--repetitions 7] [--json FILE]

One core for each worker, one request at a time, by tickets made here. The model has much KV for
little computing (a random Llama, 8 KiB a token), so that what is moved weighs. The instants are
those of the decode worker's trace; `first decode step` is the first step after the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, TicketIssuer, WorkerRef, seal
from baton.clock import MachineClock
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.telemetry.trace import Stamp
from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from baton.auth.ticket import HandoffMode
    from baton.testing.fleet import FleetProcess

LENGTHS = (512, 2048, 8000)
MODEL = {"layers": 4, "hidden": 256, "heads": 16, "kv-heads": 16}
CONFIGURATIONS = ("reference", "push", "colocated")
console = Console(stderr=True)


@dataclass(frozen=True)
class Sample:
    """One request. `wait_s`: prefill's end to the first decode step. Colocated moves nothing."""

    configuration: str
    num_tokens: int
    wait_s: float
    landed_s: float | None
    num_bytes: int
    transport: str | None


def main() -> None:
    """Run the benchmark, print a table, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--mode", choices=CONFIGURATIONS, nargs="+", default=CONFIGURATIONS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        samples = measure(Path(folder), model, options)
    console.print(render(samples))
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{os.cpu_count()} cores",
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
            "model": MODEL | {"dtype": "float32"},
            "summary": summarize(samples),
            "samples": [asdict(sample) for sample in samples],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def make_model(folder: Path) -> Path:
    """A random Llama of about 6 million parameters, and its embeddings."""
    path = folder / "model"
    shape = [word for key, value in MODEL.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "baton.cli", "model", "make", "--random", *shape]
    command += ["--context", "8192", "--dtype", "float32", "--out", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def measure(folder: Path, model: Path, options: argparse.Namespace) -> list[Sample]:
    """Start two workers and ask them in each way in turn."""
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "model",
        "engine.num_threads": 1,
        "engine.num_blocks": 1300,
        "transfer.transports": ["shared"],
        "handoff.timeout_s": 300,
    }
    secret = os.urandom(32)
    environment = dict(os.environ, BATON_CLUSTER_KEY=secret.hex())
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    with Fleet(folder, environment) as fleet:
        cores = sorted(os.sched_getaffinity(0))
        prefill = fleet.start_worker("prefill-0", "both", settings, cores=(cores[0],))
        decode = fleet.start_worker("decode-0", "both", settings, cores=(cores[-1],))
        pair = Pair(prefill.wait_ready(), decode.wait_ready(), Credentials.of(ClusterKey(secret)))
        for configuration in CONFIGURATIONS:
            pair.ask(configuration, rng.integers(300, 4000, 64).tolist())  # warm-up
        for repetition in range(options.repetitions):
            for num_tokens in options.lengths:
                order = list(options.mode) if repetition % 2 else list(reversed(options.mode))
                for configuration in order:
                    sample = pair.ask(configuration, rng.integers(300, 4000, num_tokens).tolist())
                    samples.append(sample)
                    console.print(
                        f"{configuration:10} {num_tokens:5} tokens {1e3 * sample.wait_s:8.2f} ms"
                    )
    return samples


ISSUER = TicketIssuer(MachineClock())


@dataclass
class Pair:
    """Two workers, and the key with which tickets for them are sealed."""

    prefill: FleetProcess
    decode: FleetProcess
    key: Credentials

    def ask(self, configuration: str, prompt: list[int]) -> Sample:
        """Three tokens: the first is prefill's, the second the first decode step's."""
        request = f"bench-{new_ticket_id().hex()}"
        match configuration:
            case "colocated":
                self._post(self.decode, request, prompt, None)
            case "push" | "reference":
                self._run_handoff(configuration, request, prompt)
            case _:
                raise ValueError(configuration)
        trace = self._read_trace(request)
        stamps, peer = trace["stamps"], trace["peer_stamps"]
        done = (peer if configuration != "colocated" else stamps)[Stamp.PREFILL_DONE]
        if configuration != "colocated" and trace["num_received_tokens"] != len(prompt):
            raise RuntimeError(f"not a handoff: {trace}")
        landed = stamps.get(Stamp.LAST_LAYER_LANDED)
        return Sample(
            configuration=configuration,
            num_tokens=len(prompt),
            wait_s=stamps[Stamp.DECODE_SCHEDULED] - done,
            landed_s=None if landed is None else landed - done,
            num_bytes=trace["num_bytes"],
            transport=trace["transport"],
        )

    def _run_handoff(self, mode: HandoffMode, request: str, prompt: list[int]) -> None:
        ticket = Ticket(
            new_ticket_id(),
            request,
            ref_of(self.prefill),
            ref_of(self.decode),
            mode,
            ISSUER.issue(600),
        )
        sealed = seal(ticket, self.key)
        legs = [
            threading.Thread(target=self._post, args=(worker, request, prompt, sealed))
            for worker in (self.decode, self.prefill)
        ]
        for leg in legs:
            leg.start()
        for leg in legs:
            leg.join()

    def _post(
        self, worker: FleetProcess, request: str, prompt: list[int], ticket: str | None
    ) -> None:
        body: dict[str, object] = {"model": "model", "prompt": prompt, "max_tokens": 3}
        body |= {"temperature": 0, "ignore_eos": True}
        if ticket is not None:
            body["kv_transfer_params"] = {"baton_ticket": ticket}
        headers = {
            "content-type": "application/json",
            "x-request-id": request,
            "authorization": f"Bearer {os.environ.get('BATON_CLUSTER_KEY', '')}",
        }
        call = urllib.request.Request(
            f"{worker.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(call, timeout=600) as reply:
            reply.read()

    def _read_trace(self, request: str) -> dict:
        time.sleep(0.05)
        url = f"{self.decode.url}/baton/v1/traces/{request}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            return json.load(reply)


def ref_of(worker: FleetProcess) -> WorkerRef:
    """As the gateway would name it."""
    with urllib.request.urlopen(f"{worker.url}/baton/v1/info", timeout=60) as reply:
        info = json.load(reply)
    return WorkerRef(WorkerId(info["worker"]), Epoch(info["epoch"]), info["handoff_address"])


def summarize(samples: list[Sample]) -> list[dict[str, object]]:
    """For each length and arm: median, least and most."""
    rows: list[dict[str, object]] = []
    for num_tokens in sorted({sample.num_tokens for sample in samples}):
        for configuration in CONFIGURATIONS:
            here = sorted(
                s.wait_s
                for s in samples
                if (s.num_tokens, s.configuration) == (num_tokens, configuration)
            )
            moved = {
                s.num_bytes
                for s in samples
                if (s.num_tokens, s.configuration) == (num_tokens, configuration)
            }
            if here:
                rows.append({
                    "num_tokens": num_tokens,
                    "configuration": configuration,
                    "wait_ms": 1e3 * statistics.median(here),
                    "wait_ms_min": 1e3 * here[0],
                    "wait_ms_max": 1e3 * here[-1],
                    "num_bytes": max(moved),
                })
    return rows


def render(samples: list[Sample]) -> Table:
    """The summary for people."""
    table = Table(title="From prefill's end to the first decode step")
    for name in ("tokens", "how", "median", "least to most", "bytes moved"):
        table.add_column(name, justify="right")
    for row in summarize(samples):
        table.add_row(
            f"{row['num_tokens']}",
            f"{row['configuration']}",
            f"{row['wait_ms']:.2f} ms",
            f"{row['wait_ms_min']:.2f} to {row['wait_ms_max']:.2f}",
            f"{row['num_bytes']:,}",
        )
    return table


if __name__ == "__main__":
    main()
