"""How much the gateway does for a request: counts that are the same on every machine.

Gateway, workers and client share one event loop: uvloop, as in production, none of whose own work
is Python. Workers and client are raw protocols of this file; what they call is left out. Counted is
what the gateway runs for one request of a client that has a connection already, to workers that it
has connections to, or for one event of a stream: of several rounds the least. A task that runs by
time can only add to a round, and on a slow machine it adds to more of them.

    python -m tests.integration.gateway_counts [push|one] [whole|stream]

prints the counts and, of Baton's own functions, those that run most often.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

import baton
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_gateway
from baton.ids import new_epoch
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bind, make_server_config, start_listening
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import FrameType

PACKAGE = str(Path(baton.__file__).parent)
NUM_ROUNDS = 80
NUM_IN_ROUND = 3
"""Requests, or events: so few that most rounds lie between two runs of a task that runs by time."""
WARM_UP = 40
PYTHON_CALLS = "Python calls"
BUILTIN_CALLS = "calls of builtins"
KEY = Credentials.of(ClusterKey(b"k" * 32))
MODEL = "demo"
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
WHOLE = json.dumps({
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": "length"}],
}).encode()  # fmt: skip


class GatewayCounts:
    """Calls between `start` and `stop`, by name, and by function."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self._outside: FrameType | None = None

    def start(self) -> None:
        """Count from now on."""
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Count no more."""
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _called: object) -> None:
        if self._outside is not None:
            if event == "return" and frame is self._outside:
                self._outside = None
            return
        if event == "call":
            code = frame.f_code
            if code.co_filename == __file__:
                self._outside = frame
                return
            self.totals[PYTHON_CALLS] += 1
            path = code.co_filename
            where = path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else Path(path).name
            self.functions[f"{where} {code.co_qualname}"] += 1
        elif event == "c_call":
            self.totals[BUILTIN_CALLS] += 1


class _Worker(asyncio.Protocol):
    """One connection of a worker without an engine."""

    def __init__(self, info: bytes, role: str, streams: list[_Worker]) -> None:
        self._info, self._role, self._received, self._streams = info, role, b"", streams
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        at = head.find(b"content-length: ")
        length = int(head[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
        if not found or len(body) < length:
            return
        self._received = b""
        if not head.startswith(b"POST"):
            self._answer(self._info if b"/info " in head else b"{}")
        elif self._role == "prefill":
            self._answer(b'{"object":"baton.prefill","prompt_tokens":200}')
        elif json.loads(body).get("stream"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._streams.append(self)
        else:
            self._answer(WHOLE)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def send_event(self) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))

    def end(self) -> None:
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))


class _Client(asyncio.Protocol):
    """One connection of a client: what has come of the last answer, and a future of more."""

    def __init__(self) -> None:
        self.received = b""
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._arrived.set()

    def ask(self, fields: dict[str, object]) -> None:
        body = json.dumps(fields).encode()
        self.received = b""
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
            b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def close(self) -> None:
        self._transport.abort()

    async def wait_for(self, end: bytes, num: int = 1) -> None:
        while self.received.count(end) < num:
            self._arrived.clear()
            await self._arrived.wait()


@asynccontextmanager
async def _gateway(roles: tuple[str, ...], streams: list[_Worker]) -> AsyncGenerator[int]:
    """The port of a gateway before workers of these roles."""
    loop, workers, servers = asyncio.get_running_loop(), [], []
    for number, role in enumerate(roles):
        info = json.dumps({
            "worker": f"{role}-{number}", "epoch": new_epoch(), "role": role, "model": "m",
            "served_model_name": MODEL, "fingerprint": "f", "max_context_tokens": 4096,
            "handoff_address": "127.0.0.1:1", "layout": {}, "transports": ["tcp"], "version": "0",
        }).encode()  # fmt: skip
        listening = await loop.create_server(
            lambda info=info, role=role: _Worker(info, role, streams), "127.0.0.1", 0
        )
        servers.append(listening)
        port = listening.sockets[0].getsockname()[1]
        workers.append(WorkerAddress(f"http://127.0.0.1:{port}", Role(role)))
    options = GatewayOptions(addresses=tuple(workers), credentials=KEY, tls="off")
    listener = bind("127.0.0.1", 0)
    start_listening(listener)
    async with open_gateway(options, MachineClock()) as app:
        limits = HttpLimits(max_connections=64, max_connections_per_address=64)
        connections = Connections(limits, MachineClock(), print)
        server = uvicorn.Server(make_server_config(app, connections, drain_timeout_s=1))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        await app.find_workers(10.0)
        await asyncio.sleep(0.2)  # the second worker of a pair is found by now
        try:
            yield listener.getsockname()[1]
        finally:
            await server.shutdown(sockets=[listener])
            for each in servers:
                each.close()


async def _count(roles: tuple[str, ...], kind: str) -> list[GatewayCounts]:
    """The counts of each round."""
    streams, rounds = list[_Worker](), list[GatewayCounts]()
    fields: dict[str, object] = {"model": MODEL, "prompt": "word " * 12, "max_tokens": 1}
    loop = asyncio.get_running_loop()

    async def do_one(number: int) -> None:
        if kind == "whole":
            client.ask(fields)
            await client.wait_for(WHOLE)
        else:
            streams[0].send_event()
            await client.wait_for(EVENT, number + 1)

    async with _gateway(roles, streams) as port:
        _, client = await loop.create_connection(_Client, "127.0.0.1", port)
        if kind == "stream":
            client.ask(fields | {"stream": True})
            while not streams:
                await asyncio.sleep(0.001)
        for number in range(WARM_UP):
            await do_one(number)
        for first in range(WARM_UP, WARM_UP + NUM_ROUNDS * NUM_IN_ROUND, NUM_IN_ROUND):
            rounds.append(GatewayCounts())
            rounds[-1].start()
            for number in range(first, first + NUM_IN_ROUND):
                await do_one(number)
            rounds[-1].stop()
        if kind == "stream":
            streams[0].end()
            await client.wait_for(DONE)
        client.close()
    return rounds


def count_gateway(workers: str, kind: str) -> tuple[dict[str, float], Counter[str]]:
    """Of one request of `kind` whole, or one event of a stream: the least counts of any round.

    And how often each function ran in the round with the fewest Python calls. `workers`: `push` to
    prefill and decode, or `one` worker of both roles.
    """
    roles = ("prefill", "decode") if workers == "push" else ("both",)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(_count(roles, kind))
    counts = {
        name: min(each.totals[name] for each in rounds) / NUM_IN_ROUND
        for name in (PYTHON_CALLS, BUILTIN_CALLS)
    }
    return counts, min(rounds, key=lambda each: each.totals[PYTHON_CALLS]).functions


def main() -> None:
    """Print the counts."""
    given = sys.argv[1:]
    workers, kind = *given, *("push", "whole")[len(given) :]
    counts, functions = count_gateway(workers, kind)
    for name, number in sorted(counts.items()):
        print(f"{number:8.1f} {name}")
    print("\nof one:")
    for name, number in functions.most_common(400):
        if number >= NUM_IN_ROUND / 2:
            print(f"{number / NUM_IN_ROUND:8.1f} {name}")


if __name__ == "__main__":
    main()
