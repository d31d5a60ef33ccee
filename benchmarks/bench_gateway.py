"""What the gateway costs, next to a proxy that only copies bytes.

Arms, each in front of the same scripted upstream processes:

    proxy       uvicorn + raw ASGI + aiohttp client, no parsing, no counting
    colocated   the gateway, one worker of both roles: one upstream call
    push        the gateway, prefill and decode worker: two upstream calls and a signed ticket
    *-tls       the same with workers that speak TLS (the default); the ticket is not signed

Two loads: requests that are answered in one chunk (closed loop), and streams of events at a fixed
rate. What is read is the server process's own CPU time (/proc/PID/task/*/schedstat, nanoseconds),
which includes the kernel's work on its sockets. Arms are interleaved; "spread" is (max - min) /
median over the repetitions, "ratio" the median of the ratios to the proxy in the same repetition.
An event's cost includes its share of opening the stream: the fewer events, the larger.

    python benchmarks/bench_gateway.py --repetitions 5 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import signal
import socket
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_gateway
from baton.ids import new_epoch
from baton.net.http_limits import WORKER_LIMITS, Connections
from baton.net.http_server import bounded_protocol
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MakeApp = Callable[..., AbstractAsyncContextManager[ASGIApp]]
KEY = Credentials.of(ClusterKey(b"k" * 32))
MODEL = "demo"
PATH = "/v1/completions"
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
PROMPT = {"model": MODEL, "prompt": "word " * 200, "max_tokens": 128, "temperature": 0}


# The upstream: a worker without an engine ---------------------------------------------------------


class Upstream:
    """Answers the gateway's questions, one-chunk requests, and streams at a rate."""

    def __init__(self, name: str, role: str, address: str) -> None:
        self._info = json.dumps({
            "worker": name, "epoch": new_epoch(), "role": role, "model": "m",
            "served_model_name": MODEL, "fingerprint": "f", "max_context_tokens": 4096,
            "handoff_address": address, "layout": {}, "transports": ["tcp"], "version": "0",
            "takes_unsigned_tickets": True,  # where it is reached over TLS
        }).encode()  # fmt: skip
        self._role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/health":
            await whole(send, b"{}")
        elif scope["path"] == "/baton/v1/info":
            await whole(send, self._info)
        elif self._role == "prefill":
            await whole(send, b'{"object":"baton.prefill","prompt_tokens":200}')
        elif scope["method"] == "GET":  # What it has no answer to: events, limits.
            await whole(send, b"{}", 404)
        else:
            fields = json.loads(body)
            await stream(send, fields["max_tokens"], fields.get("rate_hz"))


async def whole(send: Send, body: bytes, status: int = 200) -> None:
    """Answer in one piece."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def stream(send: Send, num_events: int, rate_hz: float | None) -> None:
    """Answer in one chunk, or event by event at a rate."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if rate_hz is None:
        await send({"type": "http.response.body", "body": EVENT + DONE})
        return
    loop = asyncio.get_running_loop()
    began = loop.time()
    for i in range(num_events):
        await asyncio.sleep(max(0.0, began + i / rate_hz - loop.time()))
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": DONE})


# The plain proxy ----------------------------------------------------------------------------------


class PlainProxy:
    """Copies bytes, watches its client, and nothing else."""

    def __init__(self, url: str) -> None:
        self._url = url + PATH
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                read_bufsize=1 << 20,
            )
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(cancel_when_left(receive, task))
        try:
            async with self._session.post(self._url, data=body, headers=headers) as upstream:
                content_type = upstream.headers["content-type"].encode()
                await send({
                    "type": "http.response.start",
                    "status": upstream.status,
                    "headers": [(b"content-type", content_type)],
                })
                async for chunk in upstream.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.cancel()


async def cancel_when_left(receive: Receive, task: asyncio.Task[object]) -> None:
    """Stop serving a client that has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


# Processes ----------------------------------------------------------------------------------------


def serve(
    make_app: MakeApp, args: tuple[object, ...], port_out: Connection, *, is_tls: bool
) -> None:
    """Body of a server process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_async(make_app, args, port_out, is_tls=is_tls))


async def serve_async(
    make_app: MakeApp, args: tuple[object, ...], port_out: Connection, *, is_tls: bool
) -> None:
    """Serve what `make_app` makes."""
    tls = ClusterTls(KEY) if is_tls else None
    protocol = bounded_protocol(Connections(WORKER_LIMITS, MachineClock(), print, tls))
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = sock.getsockname()[1]
    async with make_app(*args) as app:
        server = uvicorn.Server(
            uvicorn.Config(
                app, http="httptools" if make_app is proxy_app else protocol, ws="none",
                lifespan="off", log_config=None,
                access_log=False, server_header=False, timeout_keep_alive=75,
            )
        )  # fmt: skip
        port_out.send(port)
        await server.serve(sockets=[sock])


@asynccontextmanager
async def upstream_app(name: str, role: str) -> AsyncGenerator[ASGIApp]:
    """A worker without an engine."""
    yield Upstream(name, role, "127.0.0.1:1")


@asynccontextmanager
async def proxy_app(url: str) -> AsyncGenerator[ASGIApp]:
    """The plain proxy."""
    yield PlainProxy(url)


def gateway_app(*workers: tuple[str, str]) -> AbstractAsyncContextManager[ASGIApp]:
    """The gateway before these workers, each a URL and a role."""
    options = GatewayOptions(
        workers=tuple(WorkerAddress(url, Role(role)) for url, role in workers),
        credentials=KEY,
        tls="control" if workers[0][0].startswith("https:") else "off",
    )
    return open_gateway(options, MachineClock())


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, make_app: MakeApp, *args: object, is_tls: bool = False) -> None:
        reading, writing = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=serve, args=(make_app, args, writing), kwargs={"is_tls": is_tls}, daemon=True
        )
        self._process.start()
        self.url = f"http{'s' if is_tls else ''}://127.0.0.1:{reading.recv()}"

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.join(5)


# Loads --------------------------------------------------------------------------------------------


async def one_chunk_requests(url: str, num_requests: int, concurrency: int) -> int:
    """Closed loop: each client asks again as soon as it was answered. Units: requests."""
    body = json.dumps({**PROMPT, "stream": True}).encode()
    left = num_requests

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            async with session.post(url + PATH, data=body) as response:
                assert response.status == 200, await response.text()
                assert (await response.read()).endswith(DONE)

    async with load_session() as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return num_requests


async def streams(url: str, num_streams: int, num_events: int, rate_hz: float) -> int:
    """Streams that all run at once. Units: events that arrived."""
    body = json.dumps({**PROMPT, "stream": True, "max_tokens": num_events, "rate_hz": rate_hz})

    async def client(session: aiohttp.ClientSession) -> int:
        async with session.post(url + PATH, data=body.encode()) as response:
            assert response.status == 200, await response.text()
            text = await response.read()
            assert text.endswith(DONE)
            return text.count(b"data: {")

    async with load_session() as session:
        return sum(await asyncio.gather(*(client(session) for _ in range(num_streams))))


def load_session() -> aiohttp.ClientSession:
    """The load generator's own connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"content-type": "application/json"},
        read_bufsize=1 << 20,
    )


# Measuring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """CPU microseconds per unit, over the repetitions."""

    load: str
    configuration: str
    median_us: float
    spread: float
    ratio: float
    samples_us: list[float]


def measure(configurations: dict[str, ServerProcess], args: argparse.Namespace) -> list[Result]:
    """Run both loads against every arm, interleaved."""
    samples: dict[tuple[str, str], list[float]] = {}
    for repetition in range(-1, args.repetitions):  # one to warm up
        order = list(configurations) if repetition % 2 == 0 else list(reversed(configurations))
        for configuration in order:
            server = configurations[configuration]
            for load in ("request", "event"):
                before = server.cpu_s()
                units = asyncio.run(run_load(load, server.url, args))
                per_unit_us = (server.cpu_s() - before) / units * 1e6
                if repetition >= 0:
                    samples.setdefault((load, configuration), []).append(per_unit_us)
    return [
        summarise(load, configuration, samples)
        for load, configuration in sorted(samples, reverse=True)
    ]


async def run_load(load: str, url: str, args: argparse.Namespace) -> int:
    """Run one load once; how many units it was."""
    if load == "request":
        return await one_chunk_requests(url, args.requests, args.concurrency)
    return await streams(url, args.streams, args.events, args.rate)


def summarise(load: str, configuration: str, samples: dict[tuple[str, str], list[float]]) -> Result:
    """One row of the table."""
    own, plain = samples[load, configuration], samples[load, "proxy"]
    median = statistics.median(own)
    ratio = statistics.median(a / b for a, b in zip(own, plain, strict=True))
    return Result(load, configuration, median, (max(own) - min(own)) / median, ratio, own)


def wait_until_ready(url: str) -> None:
    """Wait until the gateway has met its workers."""

    async def ready() -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(200):
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)
        raise TimeoutError(f"{url} is not ready")

    asyncio.run(ready())
    time.sleep(0.5)  # both workers of the push arm have introduced themselves by now


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--rate", type=float, default=40.0, help="events per second and stream")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are ended, too
    servers: list[ServerProcess] = []
    try:
        results = measure(start_configurations(servers), args)
    finally:
        for server in servers:
            server.stop()
    print(f"{'load':8} {'configuration':14} {'CPU us':>8} {'spread':>7} {'ratio':>6}")
    for r in results:
        print(f"{r.load:8} {r.configuration:14} {r.median_us:8.1f} {r.spread:7.0%} {r.ratio:6.2f}")
    if args.json:
        setup = {k: v for k, v in vars(args).items() if k != "json"}
        report = {"setup": setup, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def start_configurations(servers: list[ServerProcess]) -> dict[str, ServerProcess]:
    """Start everything; `servers` gets each process as soon as it exists."""

    def start(make_app: MakeApp, *args: object, is_tls: bool = False) -> ServerProcess:
        servers.append(ServerProcess(make_app, *args, is_tls=is_tls))
        return servers[-1]

    configurations: dict[str, ServerProcess] = {}
    for suffix, is_tls in (("", False), ("-tls", True)):
        both, prefill, decode = (
            (start(upstream_app, f"{role}-0", role, is_tls=is_tls).url, role)
            for role in ("both", "prefill", "decode")
        )
        if not is_tls:
            configurations["proxy"] = start(proxy_app, both[0])
        for name, workers in (("colocated", (both,)), ("push", (prefill, decode))):
            configurations[name + suffix] = start(gateway_app, *workers)
            wait_until_ready(configurations[name + suffix].url)
    return configurations


if __name__ == "__main__":
    main()
