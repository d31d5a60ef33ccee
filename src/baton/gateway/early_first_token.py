"""A stream that begins with the prefill worker's first token, while KV is still on its way.

    prefill: first token and its bytes ──► decode agrees to go on from it ──► the client
    decode:  its whole stream ──► without the bytes that the client has ──► the client

Decode writes the same bytes, for it has the same token, request id and time of creation: what was
sent is compared, not counted. If decode's stream is here first, nothing is sent early.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.gateway.errors import UpstreamError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Send

    from baton.auth.ticket import Ticket
    from baton.gateway.request_context import RequestContext
    from baton.gateway.services import Services
    from baton.gateway.workers import Worker

CREATED_HEADER: Final = "x-baton-created"
"""Unix seconds: what both workers write into the stream as its time of creation."""

COMMIT_TIMEOUT_S: Final = 1.0

log = logging.getLogger(__name__)


class FirstToken(msgspec.Struct, frozen=True):
    """What a prefill worker says early: the token, and the events with which a stream begins."""

    token: msgspec.Raw
    events: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 20)]


class EarlyFirstToken:
    """One attempt's. Owner: the event loop's thread; two tasks meet here."""

    def __init__(self, services: Services, context: RequestContext, send: Send) -> None:
        self._services, self._context, self._send = services, context, send
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._sent = b""

    async def send_first_token(self, decode: Worker, ticket: Ticket, first: FirstToken) -> None:
        """Send the first token to the client, if decode agrees and has not begun itself."""
        try:
            if not await self._commit_first_token(decode, ticket, first):
                return
        except UpstreamError as exc:
            log.info("%s was not asked about a first token: %s", decode, exc)
            return
        async with self._lock:
            if self._is_closed:
                return
            self._sent = first.events.encode()
            self._context.tail = self._sent
            self._services.metrics.early_first_tokens.inc()
            await self._context.start_stream(self._send)
            self._context.note_first_byte(self._services.clock.now())
            await self._send({
                "type": "http.response.body",
                "body": self._sent,
                "more_body": True,
            })

    async def close(self) -> bool:
        """Decode's stream is here: nothing more is sent early. Whether something was."""
        async with self._lock:
            self._is_closed = True
        return bool(self._sent)

    async def skip_sent(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read decode's stream as far as the client has it: what follows that, empty at its end.

        Raises:
            WorkerLostError: it begins otherwise, or ends before.
        """
        chunk = b""
        while len(chunk) <= len(self._sent) and (more := await read()):
            chunk += more
        if not chunk.startswith(self._sent):
            raise WorkerLostError("the decode worker went on from another first token")
        return chunk[len(self._sent) :]

    async def _commit_first_token(self, decode: Worker, ticket: Ticket, first: FirstToken) -> bool:
        (url,) = decode.control_urls
        path = url / "baton/v1/handoffs" / ticket.id.hex() / "first_token"
        ask = self._services.upstream.ask
        status, committed = await ask(path, bytes(first.token), COMMIT_TIMEOUT_S)
        token = msgspec.json.decode(first.token)
        return status == HTTPStatus.OK and msgspec.json.decode(committed) == token
