"""Who may ask a vLLM server that Baton started, and until when: ASGI middleware.

It answers gateways that ask for the server's KV events, besides (`event_relay`).
vLLM builds its middleware from an import path, without arguments: hence one `DRAIN_STATE` in
each process.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from baton.engines.vllm.stream_tokens import TokenIdsMiddleware
from baton.events.journal_page import make_page, read_event_number
from baton.net.http_exchange import EXTENSION
from baton.net.multiplex_server import MULTIPLEX_HANDLERS
from baton.net.preemption import describe_plain_drain
from baton.protocol.worker_http import END_OF_STREAM, KV_EVENTS_PREFIX, MOVE_HEADER, Health

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from baton.events.journal import CacheJournal

OPEN_PATHS: Final = frozenset({"/health"})
MOVES: Final = (MOVE_HEADER.encode(), b"1")
FENCED: Final = "fenced"
POLICY_VIOLATION: Final = 1008
"""RFC 6455, section 7.4.1. Before a websocket is accepted, the server answers 403."""


@dataclass(slots=True)
class DrainState:
    """One process's door. Owned by the event loop's thread.

    `bearer` is required in `authorization` on every path but `/health`; None: not checked.
    `describe_drain` is what `/health` answers while it drains.
    `journal`: what is cached, for gateways of other hosts (None: they do not ask).
    `why_fenced`: of a worker that announces itself, why it may serve nothing now (None: it may).
    """

    bearer: bytes | None = None
    describe_drain: Callable[[], Health] = describe_plain_drain
    why_fenced: Callable[[], str | None] | None = None
    journal: CacheJournal | None = None
    num_open: int = 0
    is_draining: bool = False
    _ended: set[asyncio.Task[object]] = field(default_factory=set)
    _inside: set[asyncio.Task[object]] = field(default_factory=set)
    _is_drained: asyncio.Event = field(default_factory=asyncio.Event)

    def start_drain(self) -> None:
        """Let no more requests in; those inside go on."""
        self.is_draining = True
        if self.num_open == 0:
            self._is_drained.set()

    async def wait_drained(self) -> None:
        """Until the last request that was inside when it closed is answered."""
        await self._is_drained.wait()

    def find_fenced(self) -> str | None:
        """Why this worker may serve nothing, now."""
        return None if self.why_fenced is None else self.why_fenced()

    def request_started(self) -> asyncio.Task[object]:
        """One more request is inside, in this task."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a server calls an application in a task
        self.num_open += 1
        self._inside.add(task)
        return task

    def end_requests(self) -> None:
        """Cancel all that are inside: vLLM aborts them."""
        for task in self._inside - self._ended:
            self._ended.add(task)
            task.cancel()

    def was_ended(self, task: asyncio.Task[object]) -> bool:
        """Whether `end_requests` has cancelled it, and nothing else has."""
        return task in self._ended and task.uncancel() == 0

    def request_finished(self, task: asyncio.Task[object]) -> None:
        """One of them is answered, or ended, or its client gone."""
        self.num_open -= 1
        self._inside.discard(task)
        self._ended.discard(task)
        if self.is_draining and self.num_open == 0:
            self._is_drained.set()


DRAIN_STATE: Final = DrainState()


class AccessMiddleware:
    """Refuses unauthenticated peers, and while draining all requests but those that move streams.

    See docs/wire/worker-http.md.
    """

    def __init__(self, app: ASGIApp, drain_state: DrainState = DRAIN_STATE) -> None:
        # vLLM warns of a second --middleware.
        self._app, self._drain_state = TokenIdsMiddleware(app), drain_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: no gateway of Baton's asks for one
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        path, drain_state = scope["path"], self._drain_state
        if path not in OPEN_PATHS and not _is_authorized(scope["headers"], drain_state.bearer):
            await _refuse(send, 401, _error("a bearer token is needed", "unauthorized"))
        elif drain_state.is_draining and path in OPEN_PATHS:
            await _refuse(send, 503, drain_state.describe_drain())
        elif (reason := drain_state.find_fenced()) is not None and path in OPEN_PATHS:
            await _refuse(send, 503, {"status": "fenced", "reason": reason})
        elif scope["method"] == "POST" and path in MULTIPLEX_HANDLERS:
            await MULTIPLEX_HANDLERS[path](scope["extensions"][EXTENSION])
        elif scope["method"] != "POST":
            await self._get(scope, receive, send)
        elif drain_state.is_draining and not (drain_state.num_open and MOVES in scope["headers"]):
            await _refuse(send, 503, _error("this worker is draining", "draining"))
        elif reason is not None:
            await _refuse(send, 503, _error(reason, FENCED))
        else:
            await self._serve(scope, receive, send)

    async def _get(self, scope: Scope, receive: Receive, send: Send) -> None:
        journal, path = self._drain_state.journal, scope["path"]
        after = read_event_number(path.removeprefix(KV_EVENTS_PREFIX))
        if journal is None or after is None or not path.startswith(KV_EVENTS_PREFIX):
            await self._app(scope, receive, send)
            return
        page = await make_page(journal, after, lambda: self._drain_state.is_draining)
        headers = [(b"content-type", b"application/msgpack")]
        headers.append((b"content-length", str(len(page)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain_state = self._drain_state
        answer = send if drain_state.why_fenced is None else _Answer(send)
        task = drain_state.request_started()
        try:
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if not (isinstance(answer, _Answer) and drain_state.was_ended(task)):
                raise
            await answer.end(drain_state.find_fenced() or "this worker was fenced")
        finally:
            drain_state.request_finished(task)


class _Answer:
    """An ASGI `send` of one request, which may have to be ended in the middle."""

    def __init__(self, send: Send) -> None:
        self._send, self._has_started = send, False

    async def __call__(self, message: Message) -> None:
        self._has_started = True
        await self._send(message)

    async def end(self, reason: str) -> None:
        """As embedded workers do: an error, or one as a stream's last event."""
        error = _error(reason, FENCED)
        if not self._has_started:
            await _refuse(self._send, 503, error)
            return
        event = b"data: " + msgspec.json.encode(error) + b"\n\n" + END_OF_STREAM
        await self._send({"type": "http.response.body", "body": event})


def _is_authorized(headers: Iterable[tuple[bytes, bytes]], bearer: bytes | None) -> bool:
    if bearer is None:
        return True
    given = next((value for name, value in headers if name == b"authorization"), b"")
    return hmac.compare_digest(given, b"Bearer " + bearer)


def _error(message: str, code: str) -> Mapping[str, object]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


async def _refuse(send: Send, status: int, body: Mapping[str, object] | Health) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
