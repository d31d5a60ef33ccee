"""Do requests fail while a fleet on one machine is scaled and upgraded?

    python benchmarks/bench_fleet.py --json benchmarks/results/fleet.json

`baton up --detach --prefill 0 --decode 2` with the demo model, then `baton scale --workers 4`,
`--workers 1` and `baton upgrade`, each while clients stream answers, and `baton down`; with
`--prefill 1` the answers are handed over, and `--decode` is scaled. Half of the
clients make each request on a new connection, the others keep theirs; none tries a request again.

*Failed*: no answer, or an error. *Broken*: a stream without its end, or with an error in it.
*Other tokens*: a greedy answer that differs from that to the same prompt before the first change.
*TTFT*: to the first token, of requests that began meanwhile. *Took*: the command, start to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from run_record import write_record

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

FLEET = "bench"
NUM_PROMPTS = 8
NUM_TOKENS = 48
TIMEOUT_S = 240


@dataclass
class Requests:
    """What clients saw in one phase."""

    num_answers: int = 0
    num_failed: int = 0
    num_broken: int = 0
    num_other_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Phase:
    """One command under load, as it is reported."""

    command: str
    took_s: float
    num_answers: int
    num_failed: int
    num_broken: int
    num_other_tokens: int
    ttft_p50_ms: float
    ttft_max_ms: float
    problems: dict[str, int]


class Clients:
    """Clients that stream one answer after the other; counted by the phase in which one ends."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = f"{url}/v1/chat/completions", model
        self.expected: dict[int, str] = {}
        self.seen = Requests()

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """The answer to each prompt, before anything changes."""
        for prompt in range(NUM_PROMPTS):
            self.expected[prompt] = (await self._stream(session, prompt))[0]

    async def run(self, session: aiohttp.ClientSession, client: int) -> None:
        """Until cancelled."""
        prompt = client
        while True:
            prompt = (prompt + 1) % NUM_PROMPTS
            try:
                text, ttft_s = await self._stream(session, prompt)
            except BrokenStreamError as exc:
                self.seen.num_broken += 1
                self.seen.problems[f"broken: {exc}"] += 1
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                self.seen.num_failed += 1
                self.seen.problems[f"failed: {exc!r}"] += 1
            else:
                self.seen.num_answers += 1
                self.seen.num_other_tokens += text != self.expected[prompt]
                self.seen.ttfts_s.append(ttft_s)

    async def _stream(self, session: aiohttp.ClientSession, prompt: int) -> tuple[str, float]:
        content = f"Story {prompt}: tell me of a house by the sea, and of who lived in it. " * 2
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        began, ttft_s, parts, is_ended = time.monotonic(), 0.0, [], False
        async with session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            try:
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    ttft_s = ttft_s or time.monotonic() - began
                    if line.startswith(b"data: [DONE]"):
                        is_ended = True
                    else:
                        parts.append(read_text(line[6:]))
            except aiohttp.ClientPayloadError as exc:
                raise BrokenStreamError(str(exc)) from exc
        if not is_ended:
            raise BrokenStreamError("it ended without [DONE]")
        return "".join(parts), ttft_s


class BrokenStreamError(Exception):
    """A stream that began and did not end as it should."""


def read_text(data: bytes) -> str:
    """The text of one event of a stream."""
    event = json.loads(data)
    if "error" in event:
        raise BrokenStreamError(event["error"].get("message", "an error"))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def baton(*arguments: str, environment: dict[str, str]) -> str:
    """Run one command; its standard output.

    Raises:
        SystemExit: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.cli", *arguments, "--fleet", FLEET,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(TIMEOUT_S):
        out, errors = await process.communicate()
    if process.returncode:
        sys.exit(f"baton {' '.join(arguments)} failed:\n{out.decode()}{errors.decode()}")
    return out.decode()


@asynccontextmanager
async def fleet(num_prefill: int, environment: dict[str, str]) -> AsyncGenerator[tuple[str, str]]:
    """A fleet in the background: its URL and its model's name."""
    start = ("up", "--detach", "--prefill", str(num_prefill), "--decode", "2", "--port", "0")
    announced = await baton(*start, environment=environment)
    found = re.search(r"answers at (\S+) \(model: ([^;]+);", announced)
    assert found is not None, announced
    try:
        yield found[1], found[2]
    finally:
        await baton("down", environment=environment)


async def measure(
    num_prefill: int, commands: Sequence[tuple[str, ...]], num_clients: int
) -> list[Phase]:
    """Each command under load."""
    phases = []
    with tempfile.TemporaryDirectory() as state:
        kept = {name: value for name, value in os.environ.items() if name[:6] != "BATON_"}
        environment = {**kept, "XDG_STATE_HOME": state}
        async with (
            fleet(num_prefill, environment) as (url, model),
            aiohttp.ClientSession() as keeping,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as closing,
        ):
            clients = Clients(url, model)
            await clients.learn(keeping)
            running = [
                asyncio.create_task(clients.run((keeping, closing)[number % 2], number))
                for number in range(num_clients)
            ]
            try:
                for command in commands:
                    phases.append(await measure_one(command, clients, environment))
                    show(phases[-1])
            finally:
                for task in running:
                    task.cancel()
                outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, asyncio.CancelledError):
                raise outcome
    return phases


async def measure_one(
    command: tuple[str, ...], clients: Clients, environment: dict[str, str]
) -> Phase:
    """One command; what ends within two seconds after it counts as well."""
    clients.seen = Requests()
    began = time.monotonic()
    if command:
        await baton(*command, environment=environment)
    took_s = time.monotonic() - began
    await asyncio.sleep(2.0 if command else 5.0)
    seen = clients.seen
    return Phase(
        " ".join(command) or "(no change)",
        round(took_s, 1),
        seen.num_answers,
        seen.num_failed,
        seen.num_broken,
        seen.num_other_tokens,
        round(1000 * statistics.median(seen.ttfts_s or [0.0]), 1),
        round(1000 * max(seen.ttfts_s, default=0.0), 1),
        dict(seen.problems),
    )


HEADER = (
    "| command | took (s) | answers | failed | broken | other tokens | TTFT p50 (ms) "
    "| TTFT max (ms) |"
)


def row(phase: Phase) -> str:
    """A line of the table in docs/clusters/machine.md."""
    values = (
        f"`{phase.command}`", phase.took_s, phase.num_answers, phase.num_failed, phase.num_broken,
        phase.num_other_tokens, phase.ttft_p50_ms, phase.ttft_max_ms,
    )  # fmt: skip
    return f"| {' | '.join(map(str, values))} |"


def show(phase: Phase) -> None:
    """Print what is known so far."""
    print(row(phase), *(f"  {what}: {num}" for what, num in phase.problems.items()), sep="\n")


def main() -> None:
    """Measure, or print the table of a result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--table", type=Path, help="print the table of a result, measure nothing")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--prefill", type=int, default=0, help="prefill workers beside two that decode"
    )
    arguments = parser.parse_args()
    print(HEADER, "|---|---|---|---|---|---|---|---|", sep="\n")
    if arguments.table:
        for each in json.loads(arguments.table.read_text("utf-8"))["phases"]:
            print(row(Phase(**each)))
        return
    flag = "--decode" if arguments.prefill else "--workers"
    commands = ((), ("scale", flag, "4"), ("scale", flag, "1"), ("upgrade",))
    phases = asyncio.run(measure(arguments.prefill, commands, arguments.clients))
    given = {"clients": arguments.clients, "prefill": arguments.prefill}
    write_record(arguments.json, **given, phases=phases)


if __name__ == "__main__":
    main()
