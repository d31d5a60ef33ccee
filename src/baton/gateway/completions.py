"""One completion request, from its arrival to its last byte: admission, deadlines, accounting."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.errors import BatonError, OverloadedError
from baton.gateway.asgi import read_body, send_error
from baton.gateway.call import Call
from baton.gateway.errors import (
    ClientLeftError,
    DeadlineError,
    ShuttingDownError,
    UpstreamError,
    answer_for,
)
from baton.gateway.exchange import Exchange
from baton.gateway.interrupt import Interruptible
from baton.gateway.metrics import (
    CLIENT_LEFT_CODE,
    NO_MODE,
    NO_MODEL,
    BrokenStreamCause,
)
from baton.gateway.records import Record, Records
from baton.gateway.request import forwarded_headers_from, parse_body, request_id_from
from baton.ids import new_epoch
from baton.telemetry.trace import LegTrace, Stamp

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from baton.gateway.services import Services

FAREWELL_TIMEOUT_S: Final = 5.0
"""How long a client that does not read may keep us from telling it that its stream is broken."""

log = logging.getLogger(__name__)


class Completions:
    """Serves completion requests, up to a number at once. Owner: the event loop's thread."""

    def __init__(self, services: Services, records: Records) -> None:
        self._services, self._records = services, records
        self._num_inflight = 0
        self._epoch = new_epoch()
        services.metrics.inflight.set_function(lambda: self._num_inflight)

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever happens to it."""
        call = self._begin(path, scope)
        self._num_inflight += 1
        code: int = HTTPStatus.SERVICE_UNAVAILABLE  # unless the gateway's end cuts it short
        try:
            code = await self._answer(call, receive, send)
        finally:
            self._num_inflight -= 1
            self._end(call, code)

    async def _answer(self, call: Call, receive: Receive, send: Send) -> int:
        """Serve, or say why not; the status that counts."""
        try:
            await self._within_limits(call, receive, send)
        except ClientLeftError:
            self._services.metrics.disconnects[call.phase].inc()
            call.trace.outcome = f"client left ({call.phase})"
            return CLIENT_LEFT_CODE
        except asyncio.CancelledError:
            await self._tell(call, ShuttingDownError("the gateway is shutting down"), send)
            raise
        except BatonError as exc:
            return await self._tell(call, exc, send)
        except Exception as exc:
            log.exception("request %s failed", call.id)
            return await self._tell(call, exc, send)
        call.trace.outcome = "ok"
        return call.status or 0

    async def _within_limits(self, call: Call, receive: Receive, send: Send) -> None:
        options = self._services.options
        if self._num_inflight > options.max_inflight_requests:
            raise OverloadedError(
                f"this gateway serves {options.max_inflight_requests} requests at once already"
            )
        loop = asyncio.get_running_loop()
        with Interruptible() as life, ExitStack() as at_end:
            whole_s, first_s = options.request_timeout_s, options.first_byte_timeout_s
            timer = loop.call_later(whole_s, _run_out, life, call, "complete", whole_s)
            at_end.callback(timer.cancel)
            body = parse_body(await read_body(receive, options.max_body_bytes))
            at_end.callback(loop.create_task(_watch_client(receive, life)).cancel)
            if body.stream:
                timer = loop.call_later(first_s, _run_out, life, call, "begun", first_s)
                at_end.callback(timer.cancel)
                call.first_byte_timer = timer
            call.model = body.model
            call.trace.stamp(Stamp.ADMITTED, self._services.clock.now())
            await Exchange(self._services, call, body, send).run()

    async def _tell(self, call: Call, error: Exception, send: Send) -> int:
        """Tell the client what went wrong: as a response, or as the last event of its stream."""
        answer = answer_for(error)
        call.trace.outcome = f"error: {error}"
        own = (b"x-request-id", call.id.encode())
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                if call.status is None:
                    call.status = answer.status
                    await send_error(send, answer, (own,))
                else:
                    self._services.metrics.broken_streams[_cause_of(error)].inc()
                    lead = b"" if call.tail.endswith(b"\n\n") or not call.tail else b"\n\n"
                    await send({"type": "http.response.body", "body": lead + answer.event})
        except TimeoutError:
            log.warning("request %s: its client does not read; closing", call.id)
        return answer.status

    def _begin(self, path: str, scope: Scope) -> Call:
        now = self._services.clock.now()
        headers = scope["headers"]
        request_id = request_id_from(headers)
        call = Call(
            id=request_id,
            path=path,
            received_at=now,
            deadline=Instant(now + self._services.options.request_timeout_s),
            forwarded_headers=forwarded_headers_from(headers),
            trace=LegTrace(
                request_id=request_id, worker="gateway", epoch=self._epoch, leg="gateway"
            ),
            metrics=self._services.metrics.of(NO_MODEL, NO_MODE),
        )
        call.trace.stamp(Stamp.RECEIVED, now)
        return call

    def _end(self, call: Call, code: int) -> None:
        now = self._services.clock.now()
        call.trace.stamp(Stamp.FINISHED, now)
        call.metrics.count(code)
        call.metrics.duration.observe(now - call.received_at)
        self._records.add(Record(call.trace, call.placement, code))


async def _watch_client(receive: Receive, life: Interruptible) -> None:
    """From here to the end of the answer, a client says one thing only: that it left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    life.interrupt(ClientLeftError("the client left"))


def _run_out(life: Interruptible, call: Call, what: str, limit_s: float) -> None:
    asked = call.trace.peer or "no worker yet"
    life.interrupt(
        DeadlineError(f"not {what} within {limit_s:g} s (stage: {call.phase}, asked: {asked})")
    )


def _cause_of(error: Exception) -> BrokenStreamCause:
    match error:
        case DeadlineError():
            return BrokenStreamCause.DEADLINE
        case UpstreamError():
            return BrokenStreamCause.WORKER_LOST
        case _:
            return BrokenStreamCause.INTERNAL
