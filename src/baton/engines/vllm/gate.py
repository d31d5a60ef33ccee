"""Who may ask a vLLM server that Baton started, and until when: ASGI middleware.

vLLM builds its middleware from an import path, without arguments: hence one `DOOR` a process.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS: Final = frozenset({"/health"})


@dataclass(slots=True)
class Door:
    """One process's door. Owned by the event loop's thread.

    `bearer` is what `authorization` must say on every path but `/health`; None: nobody is asked.
    """

    bearer: bytes | None = None
    num_open: int = 0
    is_closed: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        """Let no more requests in; those inside go on."""
        self.is_closed = True
        if self.num_open == 0:
            self._empty.set()

    async def until_empty(self) -> None:
        """Until the last request that was inside when it closed is answered."""
        await self._empty.wait()

    def enter(self) -> None:
        """One more request is inside."""
        self.num_open += 1

    def leave(self) -> None:
        """One of them is answered, or its client gone."""
        self.num_open -= 1
        if self.is_closed and self.num_open == 0:
            self._empty.set()


DOOR: Final = Door()


class Gate:
    """Refuses strangers, and everybody while the server drains (docs/wire/worker-http.md)."""

    def __init__(self, app: ASGIApp, door: Door = DOOR) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, door = scope["path"], self._door
        if path not in OPEN_PATHS and not _is_authorized(scope["headers"], door.bearer):
            await _refuse(send, 401, _error("a bearer token is needed", "unauthorized"))
        elif door.is_closed and path in OPEN_PATHS:
            await _refuse(send, 503, {"status": "draining"})
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif door.is_closed:
            await _refuse(send, 503, _error("this worker is draining", "draining"))
        else:
            door.enter()
            try:
                await self._app(scope, receive, send)
            finally:
                door.leave()


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
