"""The decode worker's bytes to the client: unchanged, and as they come."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.asgi import Header, send_whole
from baton.gateway.errors import (
    ErrorAnswer,
    StaleTicketError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
)
from baton.gateway.metrics import BrokenStreamCause
from baton.gateway.upstream import mapped_errors, read_answer, read_error
from baton.gateway.vllm_adapter import client_answer, first_error

if TYPE_CHECKING:
    import aiohttp
    from starlette.types import Send

    from baton.gateway.early_first_token import EarlyFirstToken
    from baton.gateway.request_context import RequestContext
    from baton.gateway.services import Services
    from baton.router.fleet import WorkerView

STALE_TICKET: Final = "stale_ticket"
EVENT_STREAM: Final = "text/event-stream"
ERROR_EVENT: Final = b'data: {"error"'
DONE: Final = b"data: [DONE]"
TAIL_BYTES: Final = 32
ANSWER_HEADERS: Final = ("content-type", "retry-after")


class ResponseForwarder:
    """One decode worker's answer to one request, whose start the client may have already."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        decode: WorkerView,
        send: Send,
        *,
        early: EarlyFirstToken | None = None,
    ) -> None:
        self._services, self._context, self._decode, self._send = services, context, decode, send
        self._early = early

    async def forward(self, response: aiohttp.ClientResponse) -> None:
        """Forward it to the client.

        Raises:
            StaleTicketError: it refuses the ticket. Nothing was sent.
            WorkerFailedError: it is a 5xx, or a stream of vLLM's that begins with one. Of a stream
                its headers may have been sent.
            WorkerLostError: it was cut off. A stream may have been sent in part.
            UpstreamError: it is too long. Nothing was sent.
        """
        has_begun = self._early is not None and await self._early.close()
        if response.status == HTTPStatus.OK and response.content_type == EVENT_STREAM:
            await self._context.start_stream(self._send)
            try:
                with mapped_errors(response.url):
                    await self._pump(response, has_begun=has_begun)
            except UpstreamError:
                if not self._is_done():  # what comes after the end is of no interest
                    raise
            if not self._is_done():
                raise WorkerLostError(f"{self._decode.id} ended its stream without [DONE]")
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self._forward_whole(response)

    def _is_done(self) -> bool:
        return self._context.tail.rstrip().endswith(DONE)

    async def _pump(self, response: aiohttp.ClientResponse, *, has_begun: bool) -> None:
        """The hot loop: whatever is added here is paid for each token of each stream."""
        context, send = self._context, self._send
        read, now = response.content.readany, self._services.clock.now
        observe_interval = context.metrics.inter_token_latency.observe
        if has_begun and self._early is not None:
            chunk = await self._early.skip_sent(read)
            last = now()
        else:
            chunk = await read()
            last = now()
            if chunk.startswith(ERROR_EVENT):
                self._refuse(chunk)
            if chunk:
                context.note_first_byte(last)
        while chunk:
            if has_error(context.tail, chunk):
                self._services.metrics.broken_streams[BrokenStreamCause.WORKER_REPORTED].inc()
            context.tail = (
                chunk if len(chunk) >= TAIL_BYTES else (context.tail + chunk)[-TAIL_BYTES:]
            )
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if chunk := await read():
                at = now()
                observe_interval(at - last)
                last = at

    def _refuse(self, event: bytes) -> None:
        """An error instead of a first token: vLLM sends its 200 before it knows."""
        if self._decode.protocol == "vllm" and (error := first_error(event)) is not None:
            raise WorkerFailedError(f"{self._decode.id} answered {error.status}", answer=error)

    async def _forward_whole(self, response: aiohttp.ClientResponse) -> None:
        """An answer in one piece is read to its end first, so that a cut can still be a 502."""
        context = self._context
        body = await read_answer(response, self._services.options.max_answer_bytes)
        if response.status == HTTPStatus.CONFLICT and read_error(body).code == STALE_TICKET:
            raise StaleTicketError(self._decode.ref)
        headers = _forwarded_headers(response)
        if context.status is not None:
            raise UpstreamError(f"{self._decode.id} answered {response.status} to a second attempt")
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise WorkerFailedError(
                f"{self._decode.id} answered {response.status}",
                answer=ErrorAnswer(response.status, body, headers),
            )
        if self._decode.protocol == "vllm":
            body = client_answer(body)
        context.status, context.tail = response.status, body[-TAIL_BYTES:]
        context.note_first_byte(self._services.clock.now())
        own = (b"x-request-id", context.id.encode())
        await send_whole(self._send, response.status, body, (*headers, own))


def has_error(tail: bytes, chunk: bytes) -> bool:
    """Whether an error event is in a stream's next chunk, of which `tail` was the end so far.

    Events share a chunk when they come fast, and a chunk may end within one. No token's text looks
    like an error: its quotes are escaped.
    """
    if ERROR_EVENT in chunk:
        return True
    if not tail or chunk.startswith(b"data:"):
        return False
    reach = len(ERROR_EVENT) - 1
    return ERROR_EVENT in tail[-reach:] + chunk[:reach]


def _forwarded_headers(response: aiohttp.ClientResponse) -> tuple[Header, ...]:
    """The headers that a client gets from a worker; anything else is the worker's own business."""
    found = ((name, response.headers.get(name)) for name in ANSWER_HEADERS)
    return tuple((name.encode(), value.encode()) for name, value in found if value is not None)
