"""A running stream changes its decode worker: how long is it silent?

    python benchmarks/bench_moves.py [--engine vllm] [--rounds 5] [--case drains] [--length 1024]
        [--json benchmarks/results/moves.json]

Two decode workers (float32, a random model, one thread each) behind a gateway, and one client with
one greedy stream. In mid-answer its worker

    drains    SIGTERM: the stream moves, with its KV; how long until the worker has exited, too
    stays     the same with `gateway.move_streams = "never"`
    is killed SIGKILL: the other worker computes prompt and tokens so far again

The pause is the longest gap between two events from that signal on, a step the median gap before.
Of a move, `cut` is the gateway's own figure: from the last event of the one worker to the first of
the other. The difference is a step of the old worker that hands over at the same time.
Each answer is compared with the one that an undisturbed worker gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.testing.fleet import Fleet, FleetProcess

SPEC = RandomModelSpec(
    num_layers=12,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    max_context_tokens=8192,
    dtype="float32",
)
ENGINE: dict[str, object] = {"engine.dtype": "float32", "engine.num_threads": 1}
TLS = {"security.tls": "control"}
LENGTHS = (256, 1024, 2048)
NUM_TOKENS = 160
SIGNAL_AT = 40
CASES = {
    "drains": (signal.SIGTERM, "auto"),
    "stays": (signal.SIGTERM, "never"),
    "is killed": (signal.SIGKILL, "never"),
}
console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """What one stream's client saw, in seconds."""

    case: str
    num_prompt_tokens: int
    step_s: float
    pause_s: float
    cut_s: float
    exit_s: float
    is_same: bool


class Workers:
    """Two decode workers; who has ended is replaced at its address."""

    def __init__(self, fleet: Fleet, model: Path, engine: str) -> None:
        self._fleet = fleet
        self._settings = {
            **ENGINE,
            **TLS,
            "worker.engine": engine,
            "worker.model": str(model),
            "worker.served_model_name": "demo",
        }
        self.running = [self._start(0), self._start(1)]

    def _start(self, index: int, port: int = 0) -> FleetProcess:
        settings = {**self._settings, "worker.port": port}
        return self._fleet.start_worker(f"d{index}", "decode", settings, cores=[index]).wait_ready()

    def replace(self, worker: FleetProcess) -> None:
        """Start another life of one that has ended."""
        index = self.running.index(worker)
        port = int(worker.url.rpartition(":")[2])
        self.running[index] = self._start(index, port)

    def start_gateway(self, setting: str) -> FleetProcess:
        """A gateway that moves streams as `setting` names."""
        settings = {**TLS, "gateway.move_streams": setting, "gateway.probe_interval_s": 0.2}
        return self._fleet.start_gateway([], self.running, settings=settings)


class Client:
    """One stream: its text, and when each event came."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.text, self.times = prompt, "", list[float]()
        self.is_done = False

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read it to its end."""
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        rest = b""
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    self._read(event.removeprefix(b"data: "))

    def _read(self, data: bytes) -> None:
        self.times.append(time.monotonic())
        if data == b"[DONE]":
            self.is_done = True
            return
        fields = json.loads(data)
        if "error" in fields:
            raise RuntimeError(f"the stream broke: {fields['error']}")
        self.text += fields["choices"][0]["text"]


async def find_busy(
    session: aiohttp.ClientSession, gateway: FleetProcess, workers: Workers
) -> FleetProcess:
    """The worker that has the stream."""
    async with session.get(f"{gateway.url}/debug/workers") as response:
        listed = (await response.json())["workers"]
    (name,) = (w["worker"] for w in listed if w["given"] and w["given"]["num_decodes"])
    return next(worker for worker in workers.running if worker.name == name)


async def measure(
    session: aiohttp.ClientSession,
    gateway: FleetProcess,
    workers: Workers,
    *,
    case: str,
    length: int,
) -> Round:
    """One stream, whose worker gets its signal in mid-answer."""
    rng = np.random.default_rng(secrets.randbits(32))
    cut_before_s = await read_cut_s(session, gateway)
    client = Client(rng.integers(300, 4000, length).tolist())
    asking = asyncio.create_task(client.ask(session, gateway.url))
    while len(client.times) < SIGNAL_AT and not asking.done():
        await asyncio.sleep(0.002)
    before = np.diff(client.times[5:])
    busy = await find_busy(session, gateway, workers)
    num_before, at = len(client.times), time.monotonic()
    busy.send(CASES[case][0])
    while busy.is_alive:
        await asyncio.sleep(0.005)
    exit_s = time.monotonic() - at
    await asking
    undisturbed = Client(client.prompt)
    other = next(worker for worker in workers.running if worker is not busy)
    await asyncio.to_thread(workers.replace, busy)
    while not await is_up(session, gateway):
        await asyncio.sleep(0.05)
    await undisturbed.ask(session, gateway.url)
    assert other.is_alive
    return Round(
        case,
        length,
        float(np.median(before)),
        float(np.diff(client.times[num_before - 1 :]).max()),
        await read_cut_s(session, gateway) - cut_before_s,
        exit_s,
        is_same=client.is_done and client.text == undisturbed.text,
    )


async def read_cut_s(session: aiohttp.ClientSession, gateway: FleetProcess) -> float:
    """The pauses of all moves so far."""
    async with session.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    (line,) = (line for line in lines if line.startswith("baton_gateway_move_pause_seconds_sum"))
    return float(line.rpartition(" ")[2])


async def is_up(session: aiohttp.ClientSession, gateway: FleetProcess) -> bool:
    """Whether the gateway uses both workers."""
    async with session.get(f"{gateway.url}/debug/workers") as response:
        return all(w["state"] == "up" for w in (await response.json())["workers"])


async def measure_all(
    workers: Workers, cases: list[str], lengths: list[int], num_rounds: int
) -> list[Round]:
    """All cases, one after the other."""
    rounds: list[Round] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for case in cases:
            setting = CASES[case][1]
            gateway = await asyncio.to_thread(workers.start_gateway, setting)
            for number in range(num_rounds * len(lengths)):
                length = lengths[number % len(lengths)]
                rounds.append(await measure(session, gateway, workers, case=case, length=length))
                console.print(rounds[-1])
            await asyncio.to_thread(gateway.stop)
    return rounds


def report(rounds: list[Round]) -> None:
    """Print a line for each case and length."""
    console.print("milliseconds: median (range); exit in seconds")
    for case in CASES:
        for length in sorted({r.num_prompt_tokens for r in rounds}):
            own = [r for r in rounds if (r.case, r.num_prompt_tokens) == (case, length)]
            if not own:
                continue
            step, pause = [1e3 * r.step_s for r in own], [1e3 * r.pause_s for r in own]
            exits = statistics.median(r.exit_s for r in own)
            cut = 1e3 * statistics.median(r.cut_s for r in own)
            console.print(
                f"{case:10} {length:5} tokens: step {statistics.median(step):6.1f}, pause "
                f"{statistics.median(pause):7.1f} ({min(pause):.1f} to {max(pause):.1f}), "
                f"cut {cut:.1f}, exit {exits:.2f} s, "
                f"same answers {sum(r.is_same for r in own)} of {len(own)}"
            )


def main() -> int:
    """Measure; 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--length", action="append", type=int, help="of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", choices=CASES, help="all, unless given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = dict(os.environ, BATON_CLUSTER_KEY=secrets.token_hex(32))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "demo"
        make_random_model(model, SPEC)
        with Fleet(Path(folder), environment) as fleet:
            workers = Workers(fleet, model, arguments.engine)
            cases, lengths = arguments.case or list(CASES), arguments.length or list(LENGTHS)
            rounds = asyncio.run(measure_all(workers, cases, lengths, arguments.rounds))
    report(rounds)
    if arguments.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        result = {**machine, "rounds": [asdict(each) for each in rounds]}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(each.is_same for each in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
