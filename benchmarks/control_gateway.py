"""Gateways and routers on one core, client and scripted workers on the other.

proxy              the byte copier of plain_proxy.py
baton, 2 workers   `baton gateway` before two workers of both roles: one upstream request
baton, push        `baton gateway` before prefill and decode: two upstream requests and a ticket
baton, …, TLS      the same before workers that speak TLS (the default); the ticket is not signed
vllm-router, sglang-router   before two workers, round-robin
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import subprocess
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop
from bench_burst import read_threads
from completion_client import ServerError, post
from control_figures import PUSH, TLS, GatewaySample
from control_figures import WHOLE as WHOLE_REQUESTS
from control_fleets import pin
from control_load import PATH, run_load, run_streams
from plain_proxy import plain_proxy
from vllm_servers import find_free_port

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.net.http_exchange import EXTENSION
from baton.net.http_limits import WORKER_LIMITS, Connections
from baton.net.http_server import bind, serve_beside
from baton.net.multiplex_server import MULTIPLEX_HANDLERS
from baton.net.tls import ClusterTls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

    from baton.testing.fleet import Fleet

MODEL = "demo"
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
ROLES = ("both", "both", "prefill", "decode")
CONCURRENCY = 32
NUM_STREAMS = 16
EVENT_RATE_HZ = 50.0
KINDS = ("whole", "event")
WHOLE = {"model": MODEL, "prompt": "word " * 12, "max_tokens": 1, "temperature": 0}
PEERS = {"vllm-router": "vllm-router==0.1.17", "sglang-router": "sglang-router==0.3.2"}
PEER_TIMEOUT_S = 60.0


class RouterError(Exception):
    """A peer's router did not start."""


# Workers without an engine ------------------------------------------------------------------------


class _Steps:
    """Steps at EVENT_RATE_HZ, as those of an engine: each gives every stream its next token."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return at the next one."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
            left_s = 1 / EVENT_RATE_HZ - loop.time() % (1 / EVENT_RATE_HZ)
            loop.call_later(left_s, self._step)
        await self._next

    def _step(self) -> None:
        step, self._next = self._next, None
        if step is not None:
            step.set_result(None)


class _Worker:
    """A scripted worker on a Baton worker's HTTP server: answers whole, or a token each step."""

    def __init__(self, info: bytes, role: str, steps: _Steps) -> None:
        self._info, self._role, self._steps = info, role, steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange, path = scope["extensions"][EXTENSION], scope["path"]
        if path in MULTIPLEX_HANDLERS:
            await MULTIPLEX_HANDLERS[path](exchange)
            return
        body, is_whole_body = b"", False
        while not is_whole_body:
            message = await receive()
            body += message.get("body", b"")
            is_whole_body = not message.get("more_body")
        if path == "/baton/v1/info":
            await self._send_whole(send, self._info)
        elif scope["method"] != "POST":
            await self._send_whole(send, b"{}")
        elif self._role == "prefill":
            await self._send_whole(send, b'{"object":"baton.prefill","prompt_tokens":200}')
        else:
            fields = json.loads(body)
            if fields.get("stream"):
                await self._stream(send, int(fields["max_tokens"]))
            else:
                await self._send_whole(send, ANSWER)

    async def _send_whole(self, send: Send, body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send, num_events: int) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(num_events):
            await self._steps.wait()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})


ANSWER = json.dumps({
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL,
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 24, "completion_tokens": 1, "total_tokens": 25},
}).encode()  # fmt: skip


def serve_upstreams(ports_out: Connection, core: int, key: str, *, multiplexes: bool) -> None:
    """Body of the process of all scripted workers: a port for each of ROLES, then those of TLS."""
    os.sched_setaffinity(0, {core})
    tls = ClusterTls(Credentials.of(ClusterKey.from_hex(key)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_upstreams(ports_out, (None, tls), multiplexes=multiplexes))


async def _serve_upstreams(
    ports_out: Connection, kinds: Sequence[ClusterTls | None], *, multiplexes: bool
) -> None:
    steps, ports = _Steps(), []
    async with AsyncExitStack() as stack:
        for tls in kinds:
            for number, role in enumerate(ROLES):
                info = json.dumps({
                    "worker": f"{role}-{number}", "epoch": new_epoch(), "role": role, "model": "m",
                    "served_model_name": MODEL, "fingerprint": "f", "max_context_tokens": 4096,
                    "handoff_address": "127.0.0.1:1", "layout": {}, "transports": ["tcp"],
                    "version": "0", "takes_unsigned_tickets": tls is not None,
                    "multiplexes_streams": multiplexes,
                }).encode()  # fmt: skip
                table = Connections(WORKER_LIMITS, MachineClock(), lambda _: None, tls)
                listener = bind("127.0.0.1", 0)
                worker = _Worker(info, role, steps)
                await stack.enter_async_context(serve_beside(worker, table, listener, "127.0.0.1"))
                ports.append(listener.getsockname()[1])
        ports_out.send(ports)
        await asyncio.Event().wait()


class Upstreams(NamedTuple):
    """URLs of the scripted workers, one for each of ROLES, and their process."""

    plain: list[str]
    tls: list[str]
    pid: int


@contextmanager
def upstreams(core: int, key: str, *, multiplexes: bool = True) -> Iterator[Upstreams]:
    """Scripted workers, which send streams over one connection if they are asked and may."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    serve = partial(serve_upstreams, writing, core, key, multiplexes=multiplexes)
    process = context.Process(target=serve, daemon=True)
    process.start()
    assert process.pid is not None
    writing.close()  # a process that ends before it is ready is not waited for
    try:
        ports = reading.recv()
        plain, tls = ports[: len(ROLES)], ports[len(ROLES) :]
        yield Upstreams(
            [f"http://127.0.0.1:{port}" for port in plain],
            [f"https://127.0.0.1:{port}" for port in tls],
            process.pid,
        )
    finally:
        process.terminate()
        process.join(5)


# What is measured ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatewayLoad:
    """Seconds of one load of whole requests, and events of one stream."""

    duration_s: float
    num_events: int

    def measure(self, configuration: str, url: str, pid: int, load: str) -> GatewaySample:
        """One load; `whole`: CPU per request at CONCURRENCY, `event`: CPU per SSE event."""
        before_s = cpu_s_of(pid)
        if load == "whole":
            body = json.dumps(WHOLE).encode()
            done = run_load(url, [body], CONCURRENCY, self.duration_s)
            units = len(done.latencies_s)
        else:
            fields = {**WHOLE, "stream": True, "max_tokens": self.num_events}
            done = run_streams(url, json.dumps(fields).encode(), NUM_STREAMS)
            units = done.num_events
        cpu_s = cpu_s_of(pid) - before_s
        p50_ms, p99_ms = (1e3 * float(q) for q in np.quantile(done.latencies_s, (0.5, 0.99)))
        is_whole_load = load == "whole"
        return GatewaySample(
            configuration=configuration,
            load=load,
            cpu_us=1e6 * cpu_s / units,
            requests_per_s=units / done.wall_s if is_whole_load else None,
            p50_ms=p50_ms if is_whole_load else None,
            p99_ms=p99_ms if is_whole_load else None,
            busy_share=cpu_s / done.wall_s,
        )


def cpu_s_of(pid: int) -> float:
    """CPU time that all threads of a process have taken."""
    return sum(read_threads(pid).values()) / 1e9


@contextmanager
def gateways(
    fleet: Fleet, configurations: Sequence[str], peers: Path | None
) -> Iterator[dict[str, tuple[str, int]]]:
    """URL and process id by name: all on the first core, this process and workers on the last.

    `peers` is a virtual environment with the routers; None leaves them out.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        key = fleet.environment["BATON_CLUSTER_KEY"]
        plain, tls, _ = stack.enter_context(upstreams(cores[-1], key))
        settings: dict[str, dict[str, object]] = {}
        for suffix, kind, urls in (("", "off", plain), (TLS, "control", tls)):
            turns = {"gateway.workers": urls[:2], "router.policy": "round_robin"}  # as the peers do
            pair = {"gateway.prefill": urls[2:3], "gateway.decode": urls[3:]}
            settings[WHOLE_REQUESTS + suffix] = {"security.tls": kind, **turns}
            settings[PUSH + suffix] = {"security.tls": kind, **pair}
        found = {"proxy": stack.enter_context(plain_proxy(plain[0]))}
        for name in configurations:
            gateway = fleet.start_gateway([], [], settings=settings[name])
            found[name] = gateway.url, gateway.pid
        for name in PEERS if peers is not None else ():
            found[name] = stack.enter_context(router(name, peers, plain[:2]))
        time.sleep(1.0)  # both workers of the push configuration have been found by now
        for _, pid in found.values():
            pin(pid, {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        stack.callback(os.sched_setaffinity, 0, set(cores))
        yield found


def answers(url: str, model: str) -> bool:
    """Whether a server answers one request."""
    try:
        post(url, PATH, WHOLE | {"model": model})
    except (ServerError, OSError, http.client.HTTPException):
        return False
    return True


@contextmanager
def router(
    name: str,
    environment: Path,
    urls: list[str],
    *,
    policy: str = "round_robin",
    model: str = MODEL,
) -> Iterator[tuple[str, int]]:
    """A peer's router before these workers: its URL and process id."""
    module, port = name.replace("-", "_"), find_free_port()
    command = [
        str(environment / "bin" / "python"), "-m", f"{module}.launch_router",
        "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
        "--prometheus-port", str(find_free_port()), "--prometheus-host", "127.0.0.1",
        "--worker-urls", *urls,
    ]  # fmt: skip
    silent = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=silent,
    )  # fmt: skip
    try:
        url, deadline_s = f"http://127.0.0.1:{port}", time.perf_counter() + PEER_TIMEOUT_S
        while not answers(url, model):  # it is healthy before it has registered its workers
            if process.poll() is not None or time.perf_counter() > deadline_s:
                raise RouterError(f"{name} did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure_gateways(
    fleet: Fleet,
    load: GatewayLoad,
    rounds: Iterator[int],
    configurations: Sequence[str],
    peers: Path | None,
) -> list[GatewaySample]:
    """Those and the others in turn, in the other order every second round, warmed up before."""
    samples = []
    with gateways(fleet, configurations, peers) as found:
        warm_up = GatewayLoad(load.duration_s / 2, 2)
        for name, served in found.items():
            for kind in KINDS:
                warm_up.measure(name, *served, kind)
        for round_number in rounds:
            order = list(found) if round_number % 2 else list(reversed(found))
            samples += [load.measure(name, *found[name], kind) for name in order for kind in KINDS]
    return samples
