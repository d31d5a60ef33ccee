"""One HTTP request and its response."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from baton.ids import RequestId, new_request_id
from baton.net.http_exchange import EXTENSION
from baton.protocol.worker_http import REQUEST_ID_HEADER
from baton.worker.errors import BodyTooLargeError, ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from starlette.types import Receive, Scope, Send

    from baton.net.http_exchange import HttpExchange
    from baton.worker.errors import Headers

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_encoder: Final = msgspec.json.Encoder()

JSON: Final = b"application/json"
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class WorkerExchange:
    """Reads the request, sends the answer, and knows whether the answer has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._connection: HttpExchange = scope["extensions"][EXTENSION]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = self._read_request_id()
        self.started = False

    def header(self, name: bytes) -> bytes | None:
        """The last value of a header; `name` in lower case."""
        return self._headers.get(name)

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body.

        Raises:
            BodyTooLargeError: more than `max_bytes`; what was announced counts.
            ClientGoneError: the client left before the end.
        """
        announced = self._headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > max_bytes:
            raise _too_large(int(announced), max_bytes)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(len(body), max_bytes)
            if not message.get("more_body", False):
                return bytes(body)

    @contextmanager
    def cancelled_when_gone(self) -> Generator[None]:
        """What this task does within is cancelled once the client leaves. Only after `read_body`.

        Raises:
            ClientGoneError: the client left.
        """
        task, connection = asyncio.current_task(), self._connection
        if task is None:
            raise AssertionError("a request is served by a task")

        def leave() -> None:
            task.cancel()

        if self._has_client_left():
            raise ClientGoneError
        connection.on_disconnect = leave
        try:
            yield
        except asyncio.CancelledError:
            if self._has_client_left() and not task.uncancel():
                raise ClientGoneError from None
            raise
        finally:
            connection.on_disconnect = None

    @property
    def is_from_gateway(self) -> bool:
        """Whether it came over a connection on which a gateway has proved what it is."""
        return self._connection.is_gateway

    def _has_client_left(self) -> bool:
        return self._connection.disconnected

    async def send_json(self, status: int, value: object, headers: Headers = ()) -> None:
        """Respond with one JSON value."""
        await self.send_bytes(status, _encoder.encode(value), JSON, headers)

    async def send_bytes(
        self, status: int, body: bytes, content_type: bytes, headers: Headers = ()
    ) -> None:
        """Respond with bytes."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, ((b"content-type", content_type), length, *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def hand_to(self, serve: Callable[[HttpExchange], Awaitable[None]]) -> None:
        """Have it answered by what serves its connection's exchange."""
        self.started = True
        await serve(self._connection)

    async def send_nothing(self) -> None:
        """Respond with 204."""
        await self._start(204, ())
        await self._send({"type": "http.response.body", "body": b""})

    async def start_stream(self, headers: Headers = ()) -> None:
        """Send status 200 and the headers of an event stream, besides `headers`."""
        await self._start(200, (*STREAM_HEADERS, *headers))

    async def send_events(self, events: bytes) -> None:
        """Send events of a started stream; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        """Send the last events and end the answer."""
        await self._send({"type": "http.response.body", "body": events})

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (REQUEST_ID_HEADER.encode(), self.request_id.encode())],
        })

    def _read_request_id(self) -> RequestId:
        text = self._headers.get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
        return RequestId(text) if _REQUEST_ID.fullmatch(text) else new_request_id()


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {num_bytes} bytes or more, this worker reads at most {max_bytes}",
        code="body_too_large",
    )
