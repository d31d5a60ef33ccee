"""Where a wave of requests spends its time: many at once, each followed through all processes.

    baton up --engine vllm --model /tmp/m --set engine.dtype=float32 --port 8123 &
    python benchmarks/bench_burst.py --url http://127.0.0.1:8123 --pid $! [--requests 32]
        [--bursts 4] [--input-len 128] [--output-len 64] [--json FILE]

Answers of one length end together, and closed loops then ask for as many at once: what a load test
calls TTFT is often this. The traces of each wave (`/debug/requests/ID`) are laid over the client's
clock, which is the same on one host; printed are the least, the median and the most of each stamp
after the client's send. With --pid also the CPU time that each thread of that process and of its
descendants took, per request. The first wave warms up, and is counted in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

SETTLE_S = 2.0
LEGS = ("gateway", "prefill", "decode")
NUM_THREADS_SHOWN = 12
console = Console()


@dataclass(frozen=True)
class StreamedReply:
    """One request, by the client's clock."""

    name: str
    sent_s: float
    first_s: float


Stamps = dict[str, list[float]]
CpuTimes = dict[tuple[int, int, str], int]
"""Nanoseconds of CPU time by process, thread and its name."""


def main() -> None:
    """Ask in waves, print what is in the middle of all but the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, help="of baton up: its threads' CPU time is shown too")
    parser.add_argument("--requests", type=int, default=32, help="in each wave")
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.bursts < 2:
        parser.error("--bursts: at least 2, as the first is not counted")
    stamps, before = asyncio.run(ask_all(options))
    spent = spent_ms(before, read_threads(options.pid))
    num_requests = options.requests * (options.bursts - 1)
    console.print(render_stamps(stamps, options))
    if options.pid:
        console.print(render_threads(spent, num_requests))
    if options.json:
        record = {
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "stamps_s": stamps,
            "thread_ms_per_request": {name: ms / num_requests for name, ms in spent.items()},
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


async def ask_all(options: argparse.Namespace) -> tuple[Stamps, CpuTimes]:
    """All waves, one after the other: stamps of all but the first; what threads had taken by then.

    Links are measured in the first one, too: it is given time to end.
    """
    rng, stamps, before = np.random.default_rng(7), Stamps(), CpuTimes()
    async with aiohttp.ClientSession(options.url) as session:
        async with session.get("/v1/models") as response:
            response.raise_for_status()
            served = (await response.json())["data"]
        if not served:
            raise SystemExit(f"{options.url} serves no model yet: wait until it says it is ready")
        base = f"burst-{time.time_ns():x}"
        for burst in range(options.bursts):
            names = [f"{base}-{burst}-{i}" for i in range(options.requests)]
            bodies = [make_body(served[0]["id"], rng, options) for _ in names]
            answers = await asyncio.gather(*map(lambda n, b: ask(session, n, b), names, bodies))
            if burst:
                for reply in answers:
                    await follow(session, reply, stamps)
            else:
                await asyncio.sleep(SETTLE_S)
                before = read_threads(options.pid)
    return stamps, before


def make_body(
    model: str, rng: np.random.Generator, options: argparse.Namespace
) -> dict[str, object]:
    """A random prompt that nobody has cached."""
    prompt = rng.integers(5, 250, options.input_len).tolist()
    return {"model": model, "prompt": prompt, "max_tokens": options.output_len, "stream": True,
            "ignore_eos": True, "temperature": 0}  # fmt: skip


async def ask(session: aiohttp.ClientSession, name: str, body: dict[str, object]) -> StreamedReply:
    """One request, read to its end."""
    sent_s, first_s = time.monotonic(), None
    headers = {"x-request-id": name}
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if first_s is None and line.startswith(b"data: {"):
                first_s = time.monotonic()
    if first_s is None:
        raise SystemExit(f"{name}: the stream had no token")
    return StreamedReply(name, sent_s, first_s)


async def follow(session: aiohttp.ClientSession, reply: StreamedReply, stamps: Stamps) -> None:
    """Add what the traces of a request say, in seconds after the client's send."""
    stamps.setdefault("client: first token", []).append(reply.first_s - reply.sent_s)
    async with session.get(f"/debug/requests/{reply.name}") as response:
        response.raise_for_status()
        trace = await response.json()
    for leg in LEGS:
        for name, at in ((trace.get(leg) or {}).get("stamps") or {}).items():
            stamps.setdefault(f"{leg}: {name}", []).append(at - reply.sent_s)


def read_threads(root: int | None) -> CpuTimes:
    """Of each thread of a process and of its descendants, so far; of none, nothing."""
    if root is None:
        return {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    spent, to_visit = {}, [root]
    while to_visit:
        pid = to_visit.pop()
        to_visit += children.get(pid, [])
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                name = (task / "comm").read_text().strip()
                spent[pid, int(task.name), name] = int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue
    return spent


def spent_ms(before: CpuTimes, after: CpuTimes) -> dict[str, float]:
    """What each thread has taken in between, the most first."""
    taken = {key: ns - before.get(key, 0) for key, ns in after.items()}
    most = sorted(taken.items(), key=lambda item: -item[1])
    return {f"{pid}/{tid} {name}": ns / 1e6 for (pid, tid, name), ns in most}


def render_stamps(stamps: Stamps, options: argparse.Namespace) -> Table:
    """In the order in which the medians fall."""
    table = Table(title=f"{options.requests} at once, {options.input_len} tokens in: ms after send")
    for name in ("", "least", "median", "most"):
        table.add_column(name, justify="right" if name else "left")
    for name, seconds in sorted(stamps.items(), key=lambda item: statistics.median(item[1])):
        shown = (min(seconds), statistics.median(seconds), max(seconds))
        table.add_row(name, *(f"{1e3 * each:.0f}" for each in shown))
    return table


def render_threads(spent: dict[str, float], num_requests: int) -> Table:
    """Those that took the most."""
    table = Table(title="CPU time per request")
    table.add_column("process/thread")
    table.add_column("ms", justify="right")
    for name, ms in list(spent.items())[:NUM_THREADS_SHOWN]:
        table.add_row(name, f"{ms / num_requests:.2f}")
    return table


if __name__ == "__main__":
    main()
