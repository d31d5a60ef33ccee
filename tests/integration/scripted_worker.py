"""Workers without an engine, for tests of the gateway: docs/wire/worker-http.md, scripted.

Real HTTP servers on loopback, in the test's own event loop. What a worker answers to a completion
is an async function of a `Visit`; what it saw is kept for the test to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, unseal
from baton.ids import new_epoch

KEY = Credentials.of(ClusterKey(b"k" * 32))
MODEL = "demo"

Message = dict[str, Any]


@dataclass
class Visit:
    """One completion request at a worker."""

    worker: ScriptedWorker
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    ticket: Ticket | None
    send: Callable[[Message], Awaitable[None]]
    arrived_at: float = field(default_factory=time.monotonic)
    left_at: float | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def start_stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def token(self, text: str) -> None:
        chunk = {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
        await self.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def done(self) -> None:
        await self.write(b"data: [DONE]\n\n")
        await self.send({"type": "http.response.body", "body": b""})

    async def answer(self, status: int, body: object, *headers: tuple[bytes, bytes]) -> None:
        data = b"" if status == 204 else json.dumps(body).encode()
        start = [(b"content-type", b"application/json"), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": start})
        await self.send({"type": "http.response.body", "body": data})

    async def fail(self, status: int, code: str) -> None:
        error = {"message": f"scripted {code}", "type": "server_error", "code": code, "param": None}
        await self.answer(status, {"error": error})


Script = Callable[[Visit], Awaitable[None]]


async def prefill_at_once(visit: Visit) -> None:
    await visit.answer(200, {"object": "baton.prefill", "prompt_tokens": 3, "cached_tokens": 0})


async def say_abc(visit: Visit) -> None:
    if visit.body.get("stream"):
        await visit.start_stream()
        for text in "abc":
            await visit.token(text)
        await visit.done()
    else:
        await visit.answer(200, {"id": "x", "choices": [{"index": 0, "text": "abc"}]})


async def never_answer(visit: Visit) -> None:
    await asyncio.Event().wait()


async def start_and_wait(visit: Visit) -> None:
    await visit.start_stream()
    await asyncio.Event().wait()


async def one_token_and_wait(visit: Visit) -> None:
    await visit.start_stream()
    await visit.token("a")
    await asyncio.Event().wait()


async def recompute_when_aborted(visit: Visit) -> None:
    """A decode worker whose KV never comes: only an abort lets it go on."""
    await visit.start_stream()
    await visit.aborted.wait()
    await say_rest(visit)


async def say_rest(visit: Visit) -> None:
    for text in "abc":
        await visit.token(text)
    await visit.done()


class ScriptedWorker:
    """One worker. Change `script`, `health_status` or `epoch` at any time."""

    def __init__(self, name: str, role: str, script: Script, **info: object) -> None:
        self.name, self.role, self.script = name, role, script
        self.listed_as = role
        self.epoch = new_epoch()
        self.health_status = 200
        self.trace: dict[str, Any] | None = None
        self.extra_info = info
        self.visits: list[Visit] = []
        self.aborts: list[tuple[str, str]] = []
        self.num_info_reads = self.num_health_reads = 0
        self.load: dict[str, int] | None = None
        self.read_clock: Callable[[], dict[str, Any]] | None = None
        self.why_no_handoffs: str | None = None
        self.links: list[dict[str, Any]] | None = None
        self.transfers: bytes | None = None
        self.agreed: dict[str, dict[str, Any]] = {}
        self.agrees_on: dict[str, Any] | None = None
        self.feeds: list[tuple[str, dict[str, Any]]] = []
        self.feed_status = 204
        self.on_feed: Callable[[dict[str, Any]], None] = lambda _: None
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None

    def info(self) -> dict[str, Any]:
        return {
            "worker": self.name,
            "epoch": self.epoch,
            "role": self.role,
            "model": "/models/demo",
            "served_model_name": MODEL,
            "fingerprint": "f" * 32,
            "max_context_tokens": 4096,
            "handoff_address": f"127.0.0.1:{self.port + 1}",
            "layout": {},
            "transports": ["shared", "tcp"],
            "version": "0.1.0",
            **self.extra_info,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        path = scope["path"]
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        if path != "/health" and headers.get("authorization") != "Bearer " + token():
            await Visit(self, path, headers, {}, None, send).fail(401, "unauthorized")
        elif path.startswith("/v1/"):
            await self._complete(path, headers, body, receive, send)
        else:
            await self._describe(path, body, Visit(self, path, headers, {}, None, send))

    async def _describe(self, path: str, body: bytes, visit: Visit) -> None:
        if path == "/health":
            self.num_health_reads += 1
            extra = {} if self.load is None else {"load": self.load}
            if self.read_clock is not None:
                extra["clock"] = self.read_clock()
            if self.why_no_handoffs is not None:
                extra["why_no_handoffs"] = self.why_no_handoffs
            await visit.answer(self.health_status, {"status": "ok", **extra})
        elif path == "/baton/v1/info":
            self.num_info_reads += 1
            await visit.answer(200, self.info())
        elif path == "/baton/v1/links" and self.links is not None:
            await visit.answer(200, {"links": self.links})
        elif path == "/baton/v1/transfers" and self.transfers is not None:
            await visit.answer(200, json.loads(self.transfers))
        elif path.startswith("/baton/v1/traces/") and self.trace is not None:
            await visit.answer(200, self.trace)
        elif path.endswith("/first_token"):
            ticket, token = path.split("/")[-2], json.loads(body)
            agreed = self.agreed.setdefault(ticket, self.agrees_on or token)
            await visit.answer(200, agreed)
        elif path.startswith("/baton/v1/standbys/"):
            fields = json.loads(body)
            self.feeds.append((path.split("/")[-2], fields))
            self.on_feed(fields)
            if self.feed_status == 204:
                await visit.answer(204, {})
            else:
                await visit.fail(self.feed_status, "no_standby")
        elif path.endswith("/abort"):
            ticket = path.split("/")[-2]
            self.aborts.append((ticket, json.loads(body)["reason"]))
            self.wake(ticket)
            await visit.answer(204, {})
        else:
            await visit.fail(404, "not_found")

    def wake(self, ticket: str) -> None:
        """Tell the requests with this ticket (its id in hex) that its KV will not come."""
        for visit in self.visits:
            if visit.ticket is not None and visit.ticket.id.hex() == ticket:
                visit.aborted.set()

    def refuses(self, ticket: Ticket) -> bool:
        """Whether a ticket is for another life of this worker."""
        return self.epoch not in {ticket.prefill.epoch, ticket.decode.epoch}

    async def _complete(
        self, path: str, headers: dict[str, str], body: bytes, receive: Any, send: Any
    ) -> None:
        fields = json.loads(body)
        sealed = (fields.get("kv_transfer_params") or {}).get("baton_ticket")
        ticket = unseal(sealed, KEY) if sealed else None
        visit = Visit(self, path, headers, fields, ticket, send)
        self.visits.append(visit)
        if ticket is not None and self.refuses(ticket):
            await visit.fail(409, "stale_ticket")
            return
        script = asyncio.create_task(self.script(visit))
        watcher = asyncio.create_task(receive())
        await asyncio.wait({script, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not script.done():
            visit.left_at = time.monotonic()
            script.cancel()
        watcher.cancel()
        await asyncio.gather(script, watcher, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[ScriptedWorker]:
        async with serving(self, self._sock) as self._server:
            yield self

    def kill(self) -> None:
        """Die as a killed process does: every socket is gone at once."""
        assert self._server is not None
        close_at_once(self._server)


@contextlib.asynccontextmanager
async def serving(
    app: Any, sock: socket.socket, http: Any = "httptools"
) -> AsyncGenerator[uvicorn.Server]:
    """Serve an ASGI application on a bound socket."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, http=http, ws="none", lifespan="off", log_config=None,
        )
    )  # fmt: skip
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[sock])
    try:
        yield server
    finally:  # not uvicorn's own shutdown, which takes its time
        close_at_once(server)
        while is_open(server):
            await asyncio.sleep(0.002)


def close_at_once(server: uvicorn.Server) -> None:
    """Cut every connection and take no more; the port is closed within three turns of the loop."""
    loop = asyncio.get_running_loop()
    for listener in server.servers:
        for sock in listener.sockets:
            loop.remove_reader(sock)

    # A connection accepted in this turn gets its transport in the next one, which needs an open
    # listener (asyncio leaks it otherwise), and its protocol in the one after that.
    def cut(turns: int) -> None:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        if turns == 2:
            for listener in server.servers:
                listener.close()
        if turns:
            loop.call_soon(cut, turns - 1)

    cut(3)


def is_open(server: uvicorn.Server) -> bool:
    state = server.server_state
    return bool(state.tasks or state.connections or any(x.sockets for x in server.servers))


async def read_body(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def token() -> str:
    return KEY.key.sign("http", b"worker").hex()
