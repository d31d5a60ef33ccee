"""Who may ask a vLLM server that Baton started, and until when: ASGI middleware.

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
from baton.protocol.worker_http import MOVE_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS: Final = frozenset({"/health"})
MOVES: Final = (MOVE_HEADER.encode(), b"1")
POLICY_VIOLATION: Final = 1008
"""RFC 6455, section 7.4.1. Before a websocket is accepted, the server answers 403."""


@dataclass(slots=True)
class DrainState:
    """One process's door. Owned by the event loop's thread.

    `bearer` is required in `authorization` on every path but `/health`; None: not checked.
    """

    bearer: bytes | None = None
    num_open: int = 0
    is_draining: bool = False
    _is_drained: asyncio.Event = field(default_factory=asyncio.Event)

    def start_drain(self) -> None:
        """Let no more requests in; those inside go on."""
        self.is_draining = True
        if self.num_open == 0:
            self._is_drained.set()

    async def wait_drained(self) -> None:
        """Until the last request that was inside when it closed is answered."""
        await self._is_drained.wait()

    def request_started(self) -> None:
        """One more request is inside."""
        self.num_open += 1

    def request_finished(self) -> None:
        """One of them is answered, or its client gone."""
        self.num_open -= 1
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
            await _refuse(send, 503, {"status": "draining"})
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif drain_state.is_draining and not (drain_state.num_open and MOVES in scope["headers"]):
            await _refuse(send, 503, _error("this worker is draining", "draining"))
        else:
            drain_state.request_started()
            try:
                await self._app(scope, receive, send)
            finally:
                drain_state.request_finished()


def _is_authorized(headers: Iterable[tuple[bytes, bytes]], bearer: bytes | None) -> bool:
    if bearer is None:
        return True
    given = next((value for name, value in headers if name == b"authorization"), b"")
    return hmac.compare_digest(given, b"Bearer " + bearer)


def _error(message: str, code: str) -> Mapping[str, object]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


async def _refuse(send: Send, status: int, body: Mapping[str, object]) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
