"""The decode worker's bytes to the client: unchanged, and as they come."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.asgi import Header, send_whole
from baton.gateway.errors import (
    ErrorAnswer,
    StaleTicketError,
    WorkerFailedError,
    WorkerLostError,
)
from baton.gateway.metrics import BrokenStreamCause
from baton.gateway.upstream import is_stale_ticket, mapped_errors, read_answer

if TYPE_CHECKING:
    import aiohttp
    from starlette.types import Send

    from baton.clock import Clock
    from baton.gateway.call import Call
    from baton.gateway.services import Services
    from baton.router.fleet import WorkerView

EVENT_STREAM: Final = "text/event-stream"
ERROR_EVENT: Final = b'data: {"error"'
DONE: Final = b"[DONE]"
TAIL_BYTES: Final = 32
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
FORWARDED_HEADERS: Final = ("content-type", "retry-after")


async def forward(
    response: aiohttp.ClientResponse, call: Call, decode: WorkerView, services: Services, send: Send
) -> None:
    """Forward a decode worker's answer.

    Raises:
        StaleTicketError: it refused the ticket. Nothing was sent.
        WorkerFailedError: it is a 5xx. Nothing was sent.
        WorkerLostError: it was cut off. A stream may have been sent in part.
        UpstreamError: it is too long, or an error that comes too late for a status.
    """
    if response.status == HTTPStatus.OK and response.content_type == EVENT_STREAM:
        await _Pump(call, decode, services, send).run(response)
        return
    body = await read_answer(response, services.options.max_answer_bytes)
    if is_stale_ticket(response.status, body):
        raise StaleTicketError(decode.ref)
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or call.status is not None:
        raise WorkerFailedError(
            f"{decode.id} answered {response.status}",
            answer=ErrorAnswer(response.status, body.strip(), _headers(response, FORWARDED_HEADERS)),
        )
    call.status, call.tail = response.status, body[-TAIL_BYTES:]
    call.note_first_byte(services.clock.now())
    own = (b"x-request-id", call.id.encode())
    await send_whole(send, response.status, body, (*_headers(response, FORWARDED_HEADERS), own))


class _Pump:
    """Copies one event stream, chunk by chunk."""

    def __init__(self, call: Call, decode: WorkerView, services: Services, send: Send) -> None:
        self._call, self._decode, self._send = call, decode, send
        self._clock: Clock = services.clock
        self._broken = services.metrics.broken_streams[BrokenStreamCause.WORKER_REPORTED]

    async def run(self, response: aiohttp.ClientResponse) -> None:
        call, send = self._call, self._send
        await self._start()
        read, now = response.content.readany, self._clock.now
        observe_gap = call.metrics.inter_token_latency.observe
        with mapped_errors(response.url):
            chunk = await read()
            last = now()
            if chunk:
                call.note_first_byte(last)
            while chunk:
                if chunk.startswith(ERROR_EVENT):
                    self._broken.inc()
                call.tail = (call.tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await read()
                at = now()
                observe_gap(at - last)
                last = at
        if DONE not in call.tail:
            raise WorkerLostError(f"{self._decode.id} ended its stream without [DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self) -> None:
        """Send the headers, unless a previous attempt has sent them."""
        if self._call.status is not None:
            return
        self._call.status = HTTPStatus.OK
        headers: list[Header] = [*STREAM_HEADERS, (b"x-request-id", self._call.id.encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


def _headers(response: aiohttp.ClientResponse, names: tuple[str, ...]) -> tuple[Header, ...]:
    """The headers that a client gets from a worker; anything else is the worker's own business."""
    found = ((name, response.headers.get(name)) for name in names)
    return tuple((name.encode(), value.encode()) for name, value in found if value is not None)
