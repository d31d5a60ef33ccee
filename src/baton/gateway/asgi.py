"""The few ASGI messages that the gateway speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.gateway.errors import BodyTooLargeError, ClientLeftError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from baton.gateway.errors import ErrorAnswer

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Read a whole request body.

    Raises:
        BodyTooLargeError: it is longer than `max_bytes`, or says that it is.
        ClientLeftError: the client left before its end.
    """
    headers: Iterable[Header] = scope["headers"]
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise BodyTooLargeError(f"the body has {int(value)} bytes, at most {max_bytes} fit")
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeftError("the client left while sending its request")
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BodyTooLargeError(f"the body has more than {max_bytes} bytes")
        if not message.get("more_body", False):
            return part if not parts else b"".join((*parts, part))
        parts.append(part)


async def send_whole(
    send: Send, status: int, body: bytes, headers: Iterable[Header] = (JSON,)
) -> None:
    """Send a response whose body is at hand."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, answer: ErrorAnswer, headers: Iterable[Header] = ()) -> None:
    """Send an error as a response."""
    await send_whole(send, answer.status, answer.body, (JSON, *answer.headers, *headers))
