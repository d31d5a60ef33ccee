"""The few ASGI messages that the gateway speaks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from baton.gateway.errors import BodyTooLargeError, ClientLeftError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Send

    from baton.gateway.errors import ErrorAnswer

Header = tuple[bytes, bytes]
DISCARD_TIMEOUT_S: Final = 2.0
JSON: Header = (b"content-type", b"application/json")


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Read a whole request body.

    Raises:
        BodyTooLargeError: it is longer than `max_bytes`.
        ClientLeftError: the client left before its end.
    """
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeftError("the client left while sending its request")
        part = message.get("body", b"")
        num_bytes += len(part)
        more = message.get("more_body", False)
        if num_bytes > max_bytes:
            if more:
                await _discard(receive, max_bytes)
            raise BodyTooLargeError(f"the body has more than {max_bytes} bytes")
        if not more:
            return part if not parts else b"".join((*parts, part))
        parts.append(part)


async def _discard(receive: Receive, max_bytes: int) -> None:
    """Let a client that is only a little too long finish.

    Closing a connection on which data still arrives resets it, and the client might lose the
    answer that gives the reason.
    """
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while num_bytes <= max_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


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
