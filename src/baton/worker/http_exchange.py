"""One HTTP request and its answer, on raw ASGI. Owned by the event loop, by one task at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.errors import InvalidRequestError
from baton.ids import RequestId, new_request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

Headers: TypeAlias = "Sequence[tuple[bytes, bytes]]"

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_encoder: Final = msgspec.json.Encoder()

JSON: Final = b"application/json"
TEXT: Final = b"text/plain; charset=utf-8"
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client closed its connection: there is nobody to answer."""


class BodyTooLargeError(InvalidRequestError):
    """The request's body has more bytes than this worker reads."""


class HttpExchange:
    """Reads the request, sends the answer, and knows whether the answer has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
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

    async def wait_until_gone(self) -> None:
        """Return when the client has left. Only after `read_body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, status: int, value: object, headers: Headers = ()) -> None:
        """OutputProcessor with one JSON value."""
        await self.send_bytes(status, _encoder.encode(value), JSON, headers)

    async def send_bytes(
        self, status: int, body: bytes, content_type: bytes, headers: Headers = ()
    ) -> None:
        """OutputProcessor with bytes."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, ((b"content-type", content_type), length, *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def send_nothing(self) -> None:
        """OutputProcessor 204: done, and there is nothing to say."""
        await self._start(204, ())
        await self._send({"type": "http.response.body", "body": b""})

    async def start_stream(self) -> None:
        """Send status 200 and the headers of an event stream."""
        await self._start(200, STREAM_HEADERS)

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
            "headers": [*headers, (b"x-request-id", self.request_id.encode())],
        })

    def _read_request_id(self) -> RequestId:
        text = self._headers.get(b"x-request-id", b"").decode("latin-1")
        return RequestId(text) if _REQUEST_ID.fullmatch(text) else new_request_id()


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {num_bytes} bytes or more, this worker reads at most {max_bytes}",
        code="body_too_large",
    )
