"""What waiting for a handoff costs a vLLM server, and the requests that come meanwhile.

    python benchmarks/bench_vllm_waits.py [--before CHECKOUT] [--seconds 60] [--json FILE]

Needs `make install ENGINE=vllm`. A prefill server on core 0 and, for each `poll_interval_ms`, a
decode server on core 1; with `--before` another one for each, with the connector of an older
checkout. Those that are not measured are stopped. The prefill server is stopped for two seconds
while a request is pushed through it, so that its decode server waits. Of that server are measured:
how long it takes to answer a request for one token that it gets directly, which needs no handoff,
in the first `EARLY_S` (50 to 300 ms after it began to wait) and in the last `LATE_S`, at random
instants; between them its processor time. Before that: the same request while it is idle. Then the
prefill server goes on, and the pushed request has to be handed over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from completion_client import ServerError, get, stream
from random_model import make_model
from run_record import write_record
from vllm_servers import Server, Servers

from baton.testing.fleet import Fleet

MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8, "context": 4096}
SETTLE_S, EARLY_S, CPU_S, LATE_S = 0.05, 0.25, 0.8, 0.8
"""Together less than the silence after which a peer is given up: 3 s."""
rng = np.random.default_rng(7)


@dataclass(frozen=True)
class Waiting:
    """A decode server with its gateway."""

    name: str
    decode: Server
    url: str


@dataclass(frozen=True)
class Sample:
    """One turn. Times of answers in milliseconds; `cpu_share` of a core."""

    name: str
    cpu_share: float
    idle_ms: list[float]
    early_ms: list[float]
    late_ms: list[float]
    ready_to_scheduled_ms: float


def connector(role: str, **extra: object) -> dict[str, object]:
    """`--kv-transfer-config` of a server."""
    return {
        "kv_connector": "BatonConnector", "kv_connector_module_path": "baton.engines.vllm",
        "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"transports": ["shared", "tcp"], **extra},
    }  # fmt: skip


def body(num_tokens: int) -> dict[str, object]:
    """A random prompt, and one token as its answer."""
    prompt = rng.integers(300, 1000, num_tokens).tolist()
    return {"model": "model", "prompt": prompt, "max_tokens": 1, "ignore_eos": True,
            "temperature": 0}  # fmt: skip


def main() -> None:
    """Start the servers, take turns, print and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[10])
    parser.add_argument("--before", type=Path, help="an older checkout of this repository")
    parser.add_argument("--seconds", type=float, default=60.0, help="once all servers are up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder, MODEL)
        with Servers(folder, model, "float32") as servers, Fleet(folder, environment) as fleet:
            prefill = servers.start("prefill", 0, connector("kv_producer"), environment)
            arms = []
            sources = {"": environment}
            if options.before is not None:
                sources["before, "] = environment | {"PYTHONPATH": str(options.before / "src")}
            for (source, its_environment), interval_ms in product(
                sources.items(), options.intervals_ms
            ):
                name = f"{source}{interval_ms:g} ms"
                transfer = connector("kv_consumer", poll_interval_ms=interval_ms)
                decode = servers.start(f"decode, {name}", 1, transfer, its_environment)
                decode.wait_ready()
                prefill.wait_ready()
                settings = {
                    "gateway.prefill": [prefill.url],
                    "gateway.decode": [decode.url],
                    "gateway.mode": "push",
                }
                gateway = fleet.start_gateway([], [], settings=settings)
                arms.append(Waiting(name, decode, gateway.url))
                warm_up(arms[-1])
                decode.send(signal.SIGSTOP)
            order, samples = random.Random(7), list[Sample]()
            until = time.monotonic() + options.seconds
            while time.monotonic() < until:
                samples += [take_turn(arm, prefill) for arm in order.sample(arms, len(arms))]
    show(samples)
    write_record(options.json, samples=samples)


def warm_up(arm: Waiting) -> None:
    """Until its gateway finds the server (again), and hands over."""
    deadline = time.monotonic() + 30
    while True:
        try:
            if push(arm) is not None:
                return
        except (ServerError, OSError):
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise ServerError("nothing is handed over")
        time.sleep(0.3)


def push(arm: Waiting) -> dict[str, float] | None:
    """A request through the gateway: its stamps on decode, None if it was not handed over."""
    reply = stream(arm.url, body(512))
    trace = json.loads(get(arm.url, f"/debug/requests/{reply.request_id}"))
    is_handed_over = trace["summary"]["mode"] == "push" and not trace["summary"]["fallbacks"]
    return trace["decode"]["stamps"] if is_handed_over else None


def ask(decode: Server) -> float:
    """Milliseconds until a request of one token is answered."""
    return 1e3 * stream(decode.url, body(16)).ttft_s


def ask_for(decode: Server, for_s: float) -> list[float]:
    """Times of answers to requests at random instants of so many seconds."""
    until, answers_ms = time.monotonic() + for_s, []
    while time.monotonic() < until:
        answers_ms.append(ask(decode))
        time.sleep(rng.uniform(0.005, 0.03))
    return answers_ms


def take_turn(arm: Waiting, prefill: Server) -> Sample:
    """One wait of one decode server."""
    arm.decode.send(signal.SIGCONT)
    warm_up(arm)
    idle_ms = [ask(arm.decode) for _ in range(12)]
    prefill.send(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            pushed = pool.submit(push, arm)
            time.sleep(SETTLE_S)
            early_ms = ask_for(arm.decode, EARLY_S)
            cpu_s, began = arm.decode.cpu_seconds(), time.monotonic()
            time.sleep(CPU_S)
            share = (arm.decode.cpu_seconds() - cpu_s) / (time.monotonic() - began)
            late_ms = ask_for(arm.decode, LATE_S)
            if pushed.done():
                raise ServerError("the decode server did not wait for its handoff")
            prefill.send(signal.SIGCONT)
            stamps = pushed.result(60)
    finally:
        prefill.send(signal.SIGCONT)
        arm.decode.send(signal.SIGSTOP)
    if stamps is None:
        raise ServerError("the request was not handed over")
    after_ms = 1e3 * (stamps["decode_scheduled"] - stamps["kv_ready"])
    return Sample(arm.name, share, idle_ms, early_ms, late_ms, after_ms)


def show(samples: list[Sample]) -> None:
    """A table for the docs: medians over all answers, or turns."""
    print("| `poll_interval_ms` | a request while it is idle, ms | after 50 to 300 ms of waiting "
          "| after 1.1 to 1.9 s | processor time while it waits | KV ready to scheduled, ms |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    for name in dict.fromkeys(sample.name for sample in samples):
        some = [sample for sample in samples if sample.name == name]
        answers = [
            statistics.median(each for sample in some for each in getattr(sample, field))
            for field in ("idle_ms", "early_ms", "late_ms")
        ]
        print(
            f"| {name} | {answers[0]:.1f} | {answers[1]:.1f} | {answers[2]:.1f}"
            f" | {statistics.median(s.cpu_share for s in some):.1%}"
            f" | {statistics.median(s.ready_to_scheduled_ms for s in some):.2f} |"
        )


if __name__ == "__main__":
    main()
