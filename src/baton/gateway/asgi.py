"""The few ASGI messages that the gateway speaks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from baton.errors import OverloadedError
from baton.gateway.errors import BodyTooLargeError, ClientLeftError, ErrorAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import Message, Receive, Send

Header = tuple[bytes, bytes]
DISCARD_TIMEOUT_S: Final = 2.0
ALWAYS_READ_BYTES: Final = 1 << 20
"""Reading it into fields takes the event loop 3 ms, which others wait."""
JSON: Header = (b"content-type", b"application/json")
SHARED_HEADERS: Final = (
    (b"vary", b"origin"),
    (b"access-control-expose-headers", b"x-request-id, retry-after"),
)
PREFLIGHT_HEADERS: Final = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
)


class BodyBudget:
    """Bytes of request bodies that are held at once. Owner: the event loop's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def hold(self) -> HeldBody:
        """One request's share: taken part by part, given back at the end of a `with` block."""
        return HeldBody(self)

    def take(self, num_bytes: int) -> None:
        """Take some more.

        Raises:
            OverloadedError: so much is not there.
        """
        if self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"the bodies of the requests that are being served have {self._max_bytes} bytes"
            )
        self.num_bytes += num_bytes


class HeldBody:
    """What one request holds of a `BodyBudget`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.num_bytes = budget, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.num_bytes -= self.num_bytes

    def take(self, num_bytes: int) -> None:
        """See `BodyBudget.take`."""
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """At most `max_bytes`; what is longer than `ALWAYS_READ_BYTES`, also `context_bytes()`."""

    max_bytes: int
    context_bytes: Callable[[], int]

    def is_passed(self, num_bytes: int) -> bool:
        """Whether a body of so many bytes is too long."""
        return num_bytes > self.max_bytes or (
            num_bytes > ALWAYS_READ_BYTES and num_bytes > self.context_bytes()
        )

    def explain(self) -> BodyTooLargeError:
        """The error, which names the bound that was passed."""
        by_context = max(ALWAYS_READ_BYTES, self.context_bytes())
        if self.max_bytes <= by_context:
            return BodyTooLargeError(f"the body has more than {self.max_bytes} bytes")
        return BodyTooLargeError(
            f"the body has more than {by_context} bytes, for which no model here has the context"
        )


async def read_body(receive: Receive, limit: BodyLimit, held: HeldBody) -> bytes:
    """Read a whole request body.

    Raises:
        BodyTooLargeError: it is longer than the limit.
        OverloadedError: all bodies together are too long.
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
        if limit.is_passed(num_bytes):
            if more:
                await _discard(receive, limit.max_bytes)
            raise limit.explain()
        held.take(len(part))
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


def share_with(origin: bytes, send: Send) -> Send:
    """A `send` whose answers pages of `origin` may read in a browser."""
    headers = ((b"access-control-allow-origin", origin), *SHARED_HEADERS)

    async def send_shared(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_shared


async def send_preflight(send: Send, headers: Iterable[Header]) -> None:
    """Answer a browser that asks what a page may send: the headers that it names, too.

    Clients for browsers send headers of their own; what they mean is for the gateway to check.
    """
    named = [value for name, value in headers if name == b"access-control-request-headers"]
    allowed = [*PREFLIGHT_HEADERS, *((b"access-control-allow-headers", value) for value in named)]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
