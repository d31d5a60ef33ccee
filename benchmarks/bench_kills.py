"""Workers die under load, and clients do not notice: how many errors, broken streams, wrong tokens?

    python benchmarks/bench_kills.py [--kills 20] [--clients 4] [--tokens 120]
        [--json benchmarks/results/kills.json]

Two prefill and two decode workers (embedded engine, float32, the demo model) behind a gateway,
under clients that ask without a pause: completions and chats, greedy and with a seed, most of them
streams, with log-probabilities, none of their prompts cached. What each request is answered while
nothing happens is known beforehand.

Then, `--kills` times: SIGKILL of one of the two prefill workers while it has requests, another life
at its address; SIGKILL of one of the two decode workers while it has answers under way, and another
life of that.

A client error is any answer but 200, or none; a broken stream ends with an error event or without
`[DONE]`; wrong tokens are any others than were known. All three are to be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from baton.auth.key import ClusterKey
from baton.testing.fleet import Fleet, FleetProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_REQUESTS = 24
SEED = 20261125
IDLE_TIMEOUT_S = 60.0
ENGINE: dict[str, object] = {"engine.dtype": "float32", "engine.num_threads": 1}
console = Console(stderr=True)


@dataclass(frozen=True)
class Request:
    """One of the requests that are asked again and again."""

    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes token by token."""
        return bool(self.body["stream"])


@dataclass
class Answer:
    """What a client got: the tokens, or what was wrong; its longest gap between two parts."""

    tokens: list[str] = field(default_factory=list)
    text: str = ""
    status: int = 0
    error: str | None = None
    is_done: bool = False
    longest_gap_s: float = 0.0

    def same_as(self, other: Answer) -> bool:
        """Whether both are one answer."""
        return (self.tokens, self.text) == (other.tokens, other.text)

    def add(self, fields: dict[str, Any]) -> None:
        """Add what an event, or a whole answer, has."""
        if "error" in fields:
            self.error = json.dumps(fields["error"])[:300]
        for choice in fields.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or {}
            self.text += choice.get("text") or part.get("content") or ""
            logprobs = choice.get("logprobs") or {}
            self.tokens += logprobs.get("tokens", ())
            self.tokens += [entry["token"] for entry in logprobs.get("content") or ()]


@dataclass
class Counts:
    """The result."""

    requests: int = 0
    streams: int = 0
    client_errors: int = 0
    broken_streams: int = 0
    wrong_tokens: int = 0
    prefill_kills: int = 0
    decode_kills: int = 0
    requests_at_killed_prefill: int = 0
    answers_at_killed_decode: int = 0
    examples: list[str] = field(default_factory=list)


def make_requests(num_tokens: int) -> list[Request]:
    """Every kind of request, with prompts that share nothing."""
    rng = random.Random(SEED)
    requests = []
    for number in range(NUM_REQUESTS):
        sampling: dict[str, object] = {"temperature": 0} if number % 2 else {"seed": number}
        common = {"model": "demo", "max_tokens": num_tokens, "ignore_eos": True, **sampling}
        stream = number % 4 != 3
        if number % 3:
            prompt = [rng.randrange(300, 4000) for _ in range(rng.randrange(50, 800))]
            body = {**common, "stream": stream, "prompt": prompt, "logprobs": 1}
            requests.append(Request(COMPLETIONS, body))
        else:
            words = " ".join(str(rng.random()) for _ in range(rng.randrange(4, 40)))
            messages = [{"role": "user", "content": words}]
            body = {**common, "stream": stream, "messages": messages, "logprobs": True}
            requests.append(Request(CHAT, body))
    return requests


async def ask(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    """One request; what goes wrong is part of the answer."""
    answer = Answer()
    body = {**request.body, "cache_salt": secrets.token_hex(8)}  # nobody has its KV
    try:
        async with session.post(url + request.path, json=body) as response:
            answer.status = response.status
            if request.is_stream and response.status == 200:
                await read_stream(response, answer)
            else:
                answer.add(await response.json())
                answer.is_done = True
    except (aiohttp.ClientError, OSError, ValueError, AssertionError) as exc:
        answer.error = f"{type(exc).__name__}: {exc}"
    return answer


async def read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Every event must be whole, and nothing may follow the end."""
    rest, last = b"", time.monotonic()
    async for chunk in response.content.iter_any():
        now = time.monotonic()
        answer.longest_gap_s, last = max(answer.longest_gap_s, now - last), now
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == event or answer.is_done:
                answer.error = f"no event: {event[:200]!r}"
            elif data == b"[DONE]":
                answer.is_done = True
            else:
                answer.add(json.loads(data))
    if rest:
        answer.error = f"half an event: {rest[:200]!r}"


class Load:
    """Clients that ask without a pause, and compare."""

    def __init__(self, session: aiohttp.ClientSession, url: str, requests: list[Request]) -> None:
        self._session, self._url, self._requests = session, url, requests
        self._known: list[Answer] = []
        self._turn = itertools.count()
        self.counts = Counts()
        self.gaps_s: list[float] = []

    async def learn(self) -> None:
        """What each request is answered while nothing happens."""
        for request in self._requests:
            answer = await ask(self._session, self._url, request)
            if answer.error or not answer.is_done:
                raise RuntimeError(f"no answer before anything was killed: {answer.error}")
            self._known.append(answer)

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """Ask until `stop` is set; requests under way come to their end."""
        await asyncio.gather(*(self._ask_on(stop) for _ in range(num_clients)))

    async def _ask_on(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = next(self._turn) % len(self._requests)
            request = self._requests[number]
            answer = await ask(self._session, self._url, request)
            self._count(request, answer, self._known[number])

    def _count(self, request: Request, answer: Answer, known: Answer) -> None:
        counts = self.counts
        counts.requests += 1
        counts.streams += request.is_stream
        if request.is_stream:
            self.gaps_s.append(answer.longest_gap_s)
        if answer.status != 200:
            counts.client_errors += 1
        elif answer.error or not answer.is_done:
            counts.broken_streams += 1
        elif not answer.same_as(known):
            counts.wrong_tokens += 1
        else:
            return
        what = f"{answer.status} {answer.error} after {len(answer.tokens)} tokens"
        counts.examples.append(what)
        console.print(f"[red]{what}")


class Victims:
    """The four workers. Each life of one is at the same address."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet, self._session = fleet, session
        self.workers = {
            name: fleet.start_worker(name, role, ENGINE)
            for name, role in (
                ("p0", "prefill"),
                ("p1", "prefill"),
                ("d0", "decode"),
                ("d1", "decode"),
            )
        }
        for worker in self.workers.values():
            worker.wait_ready()

    def start_gateway(self) -> FleetProcess:
        """In front of all four."""
        p0, p1, d0, d1 = self.workers.values()
        settings = {"gateway.probe_interval_s": 0.2}
        return self._fleet.start_gateway([p0, p1], [d0, d1], settings=settings)

    async def kill_when_busy(self, name: str) -> int:
        """Kill a worker that has requests; how many it had."""
        worker = self.workers[name]
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while not (num := await self._read_inflight(worker)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} gets no requests")
            await asyncio.sleep(0)
        worker.kill()
        return num

    async def restart(self, name: str) -> None:
        """Another life at its address."""
        dead = self.workers[name]
        if dead.ready is None:
            raise RuntimeError(f"{name} never lived")
        settings = ENGINE | {
            "worker.port": urlsplit(dead.url).port,
            "worker.handoff_port": int(dead.ready.handoff_address.rpartition(":")[2]),
        }
        role = "prefill" if name.startswith("p") else "decode"
        fresh = self._fleet.start_worker(name, role, settings)
        self.workers[name] = await asyncio.to_thread(fresh.wait_ready)

    async def _read_inflight(self, worker: FleetProcess) -> int:
        async with self._session.get(f"{worker.url}/metrics") as response:
            return int(read_metric(await response.text(), "baton_worker_inflight_requests"))


def read_metric(text: str, name: str) -> float:
    """The sum of a metric's series whose names begin so."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def kill_in_turn(victims: Victims, counts: Counts, num_kills: int) -> None:
    """One of two prefill workers, then one of two decode workers, and again."""
    for number in range(num_kills):
        prefill, decode = f"p{number % 2}", f"d{number % 2}"
        counts.requests_at_killed_prefill += await victims.kill_when_busy(prefill)
        counts.prefill_kills += 1
        await victims.restart(prefill)
        counts.answers_at_killed_decode += await victims.kill_when_busy(decode)
        counts.decode_kills += 1
        await victims.restart(decode)
        await asyncio.sleep(1.0)  # the gateway looks at it five times meanwhile
        console.print(
            f"{number + 1} of {num_kills}: {counts.requests} requests, "
            f"{counts.client_errors} client errors, {counts.broken_streams} broken "
            f"streams, {counts.wrong_tokens} wrong"
        )


async def measure(args: argparse.Namespace, fleet: Fleet, key: str) -> dict[str, object]:
    """The whole run."""
    token = ClusterKey.from_hex(key).sign("http", b"worker").hex()
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers={"authorization": f"Bearer {token}"},
    ) as session:
        victims = await asyncio.to_thread(Victims, fleet, session)
        gateway = await asyncio.to_thread(victims.start_gateway)
        load = Load(session, gateway.url, make_requests(args.tokens))
        await load.learn()
        stop = asyncio.Event()
        asking = asyncio.create_task(load.run(args.clients, stop))
        try:
            await kill_in_turn(victims, load.counts, args.kills)
        finally:
            stop.set()
            await asking
        async with session.get(f"{gateway.url}/metrics") as response:
            metrics = await response.text()
    counts, gaps_s = load.counts, sorted(load.gaps_s)
    resumed = 'baton_gateway_resumed_streams_total{result="resumed"}'
    return {
        **asdict(counts),
        "resumed_streams": read_metric(metrics, resumed),
        "resumed_tokens": read_metric(metrics, "baton_gateway_resumed_tokens_total"),
        "lost_before_an_answer": read_metric(
            metrics, 'baton_gateway_fallbacks_total{cause="decode'
        ),
        "longest_gap_of_a_stream_s": {
            "median": statistics.median(gaps_s),
            "p99": gaps_s[int(0.99 * (len(gaps_s) - 1))],
            "longest": gaps_s[-1],
        },
    }


def main() -> int:
    """Run it, print the figures; 1 if a client noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=120, help="of an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    key = secrets.token_hex(32)
    environment = dict(os.environ, BATON_CLUSTER_KEY=key)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-kills-")))
        fleet = stack.enter_context(Fleet(logs, environment))
        began = time.monotonic()
        figures = asyncio.run(measure(args, fleet, key))
    figures["command"] = "python benchmarks/bench_kills.py " + " ".join(sys.argv[1:])
    figures["machine"] = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    figures["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(figures, indent=1)
    Console().print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    failed = ("client_errors", "broken_streams", "wrong_tokens")
    return int(any(figures[name] for name in failed))


if __name__ == "__main__":
    sys.exit(main())
