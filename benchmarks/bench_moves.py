"""A running stream changes its decode worker: how long is it silent?

    python benchmarks/bench_moves.py [--engine vllm] [--rounds 5] [--case drains]
        [--streams 1] [--before SRC] [--json benchmarks/results/moves.json]

Two decode workers (float32, a random model, one thread each) behind a gateway, and
clients with greedy streams. In mid-answer the worker that has most of them

    drains    SIGTERM: its streams move, with their KV; how long until the worker has exited, too
    stays     the same with `gateway.move_streams = "never"`: what gaps this machine makes by itself
    is killed SIGKILL: the other worker computes prompt and tokens so far again
    before    as `drains`, gateway and workers run from SRC, the `src` folder of another version

One round of each case follows the other. The pause is the longest gap between two events of one
stream from that signal on, a step the median gap of that stream before. Of a move, `cut` is the
gateway's own figure: from the last event of the one worker to the first of the other. Each answer
is compared with the one that an undisturbed worker gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
from rich.console import Console
from run_record import write_record

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
BEFORE = "before"
SIGNAL_AT = 40
CASES = {
    "drains": (signal.SIGTERM, "auto"),
    "stays": (signal.SIGTERM, "never"),
    "is killed": (signal.SIGKILL, "never"),
    BEFORE: (signal.SIGTERM, "auto"),
}
console = Console(stderr=True)


@dataclass(frozen=True)
class Round:
    """What the clients saw of the streams that the worker had, in seconds.

    `step_s` and `pause_s` have one entry for each of them; `cut_s` is the mean. `exit_s` is from
    the signal, `end_s` from the worker's last event of these streams to its exit.
    """

    case: str
    num_prompt_tokens: int
    step_s: list[float]
    pause_s: list[float]
    cut_s: float
    exit_s: float
    end_s: float
    is_same: bool

    @property
    def pause_steps(self) -> list[float]:
        """The longest gap of each stream, in its steps."""
        return [pause / step for pause, step in zip(self.pause_s, self.step_s, strict=True)]


class Workers:
    """Two decode workers; who has ended is replaced at its address."""

    def __init__(self, fleet: Fleet, model: Path, engine: str) -> None:
        self._fleet = fleet
        self._settings: dict[str, object] = {
            **ENGINE,
            **TLS,
            "worker.engine": engine,
            "worker.model": str(model),
            "worker.served_model_name": "demo",
        }
        self.running = [self._start(0), self._start(1)]

    def _start(self, index: int, port: int = 0) -> FleetProcess:
        settings: dict[str, object] = {**self._settings, "worker.port": port}
        return self._fleet.start_worker(f"d{index}", "decode", settings, cores=[index])

    def wait_ready(self) -> None:
        """Wait until both answer."""
        for worker in self.running:
            worker.wait_ready()

    def replace(self, worker: FleetProcess) -> None:
        """Start another life of one that has ended."""
        index = self.running.index(worker)
        port = int(worker.url.rpartition(":")[2])
        self.running[index] = self._start(index, port).wait_ready()

    def start_gateway(self, setting: str) -> FleetProcess:
        """A gateway that moves streams as `setting` names."""
        settings: dict[str, object] = {
            **TLS,
            "gateway.move_streams": setting,
            "gateway.probe_interval_s": 0.2,
        }
        return self._fleet.start_gateway([], self.running, settings=settings)


@dataclass(frozen=True)
class Arm:
    """A case, and what it is measured with."""

    case: str
    workers: Workers
    gateway: FleetProcess

    @classmethod
    def start(cls, case: str, workers: Workers) -> Self:
        """With a gateway of its own."""
        return cls(case, workers, workers.start_gateway(CASES[case][1]))


class Client:
    """One stream: its text, and when each event came."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.text, self.times = prompt, "", list[float]()
        self.is_done, self.num_before = False, 0

    @property
    def step_s(self) -> float:
        """The median gap between two events before the signal."""
        return float(np.median(np.diff(self.times[5 : self.num_before])))

    @property
    def pause_s(self) -> float:
        """The longest gap since the signal."""
        return float(np.diff(self.times[self.num_before - 1 :]).max())

    @property
    def cut_at(self) -> float:
        """When the event before that gap came: of a stream that moves, its last there."""
        gaps = np.diff(self.times[self.num_before - 1 :])
        return self.times[self.num_before - 1 + int(gaps.argmax())]

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
    """The worker that has most of the streams."""
    async with session.get(f"{gateway.url}/debug/workers") as response:
        listed = (await response.json())["workers"]
    nums = {w["worker"]: w["given"]["num_decodes"] for w in listed if w["given"]}
    return max(workers.running, key=lambda worker: nums.get(worker.name, 0))


async def measure(
    session: aiohttp.ClientSession, arm: Arm, *, length: int, num_streams: int
) -> Round:
    """Some streams, of which one worker gets its signal in mid-answer."""
    gateway, workers = arm.gateway, arm.workers
    rng = np.random.default_rng(secrets.randbits(32))
    cut_before = await read_cut(session, gateway)
    clients = [Client(rng.integers(300, 4000, length).tolist()) for _ in range(num_streams)]
    asking = [asyncio.create_task(client.ask(session, gateway.url)) for client in clients]
    while any(len(c.times) < SIGNAL_AT for c in clients) and not any(t.done() for t in asking):
        await asyncio.sleep(0.002)
    busy = await find_busy(session, gateway, workers)
    for client in clients:
        client.num_before = len(client.times)
    at = time.monotonic()
    busy.send(CASES[arm.case][0])
    while busy.is_alive:
        await asyncio.sleep(0.005)
    exited_at = time.monotonic()
    await asyncio.gather(*asking)
    moves = CASES[arm.case][1] != "never"
    left_at = max(client.cut_at if moves else client.times[-1] for client in clients)
    cut = await read_cut(session, gateway)
    undisturbed = [Client(client.prompt) for client in clients]
    other = next(worker for worker in workers.running if worker is not busy)
    await asyncio.to_thread(workers.replace, busy)
    while not await is_up(session, gateway):
        await asyncio.sleep(0.05)
    for client in undisturbed:
        await client.ask(session, gateway.url)
    assert other.is_alive
    num_moved = max(1, cut[1] - cut_before[1])
    return Round(
        arm.case,
        length,
        [client.step_s for client in clients],
        [client.pause_s for client in clients],
        (cut[0] - cut_before[0]) / num_moved,
        exited_at - at,
        exited_at - left_at,
        is_same=all(
            one.is_done and one.text == two.text
            for one, two in zip(clients, undisturbed, strict=True)
        ),
    )


async def read_cut(session: aiohttp.ClientSession, gateway: FleetProcess) -> tuple[float, int]:
    """The pauses of all moves so far, in seconds, and how many there were."""
    async with session.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "baton_gateway_move_pause_seconds"
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(name))
    return float(values[f"{name}_sum"]), int(float(values[f"{name}_count"]))


async def is_up(session: aiohttp.ClientSession, gateway: FleetProcess) -> bool:
    """Whether the gateway uses both workers."""
    async with session.get(f"{gateway.url}/debug/workers") as response:
        return all(w["state"] == "up" for w in (await response.json())["workers"])


async def measure_all(
    arms: list[Arm], num_rounds: int, lengths: list[int], num_streams: int, rounds: list[Round]
) -> None:
    """All cases, one round of each after the other; each is added to `rounds`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for number in range(num_rounds * len(lengths)):
            for arm in arms:
                length = lengths[number % len(lengths)]
                rounds.append(await measure(session, arm, length=length, num_streams=num_streams))
                console.print(rounds[-1])


def report(rounds: list[Round]) -> None:
    """Print a line for each case and length."""
    console.print("median (range); the pause is the longest gap of a stream")
    for case in CASES:
        for length in sorted({r.num_prompt_tokens for r in rounds}):
            own = [r for r in rounds if (r.case, r.num_prompt_tokens) == (case, length)]
            if not own:
                continue
            step = 1e3 * statistics.median(s for r in own for s in r.step_s)
            pause = sorted(p for r in own for p in r.pause_steps)
            cut = statistics.median(r.cut_s / statistics.median(r.step_s) for r in own)
            console.print(
                f"{case:10} {length:5} tokens: step {step:5.1f} ms, pause "
                f"{statistics.median(pause):4.1f} steps ({pause[0]:.1f} to {pause[-1]:.1f}), "
                f"cut {cut:.1f} steps, exit {statistics.median(r.exit_s for r in own):.2f} s "
                f"({statistics.median(r.end_s for r in own):.2f} s after the last stream), "
                f"same answers {sum(r.is_same for r in own)} of {len(own)}"
            )


def main() -> int:
    """Measure; 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", choices=CASES, help="all, unless given")
    parser.add_argument("--length", action="append", type=int, help="of the prompts, in tokens")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = arguments.case or [c for c in CASES if c != BEFORE or arguments.before is not None]
    environment = dict(os.environ, BATON_CLUSTER_KEY=secrets.token_hex(32))
    old = environment | {"PYTHONPATH": str(arguments.before)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as fleets:
        model = Path(folder) / "demo"
        make_random_model(model, SPEC)
        workers = {}
        for is_old in sorted({case == BEFORE for case in cases}):
            logs = Path(folder) / ("old" if is_old else "new")
            logs.mkdir()
            fleet = fleets.enter_context(Fleet(logs, old if is_old else environment))
            workers[is_old] = Workers(fleet, model, arguments.engine)
        for each in workers.values():
            each.wait_ready()
        arms = [Arm.start(case, workers[case == BEFORE]) for case in cases]
        lengths = arguments.length or list(LENGTHS)
        rounds: list[Round] = []
        with suppress(KeyboardInterrupt):  # what was measured by then is reported
            asyncio.run(measure_all(arms, arguments.rounds, lengths, arguments.streams, rounds))
    report(rounds)
    write_record(arguments.json, num_streams=arguments.streams, rounds=rounds)
    return 0 if all(each.is_same for each in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
