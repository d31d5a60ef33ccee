"""One HTTP request and its response; errors as status and OpenAI's error body."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.errors import (
    BatonError,
    ContextLengthError,
    EngineError,
    HandoffError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    TicketError,
)
from baton.handoff.interface import DECLINED_STAGE
from baton.ids import RequestId, new_request_id
from baton.net.http_exchange import EXTENSION
from baton.net.http_exchange import HttpExchange as Connection
from baton.protocol.worker_http import REQUEST_ID_HEADER, ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from starlette.types import Receive, Scope, Send

Headers: TypeAlias = "Sequence[tuple[bytes, bytes]]"

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_encoder: Final = msgspec.json.Encoder()

JSON: Final = b"application/json"
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client closed its connection: no answer can be sent."""


class BodyTooLargeError(InvalidRequestError):
    """The request's body has more bytes than this worker reads."""


class HttpExchange:
    """Reads the request, sends the answer, and knows whether the answer has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._connection: Connection = scope["extensions"][EXTENSION]
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

    async def hand_to(self, serve: Callable[[Connection], Awaitable[None]]) -> None:
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


class StaleTicketError(BatonError):
    """A ticket for another life of this worker, or one that was used already."""


class StandbyError(BatonError):
    """The standby request is not there any more, or has other tokens than the gateway thinks."""


class DrainingError(BatonError):
    """This worker is ending and takes no more requests."""


class FencedError(BatonError):
    """No gateway has accepted this worker's announcements in time: it serves nothing."""


class DeadlineError(BatonError):
    """The request's time was over before its answer."""


class UnknownPathError(BatonError):
    """No such path."""


class WrongMethodError(BatonError):
    """The path exists, for other methods."""

    def __init__(self, method: str, path: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{method} is not allowed on {path}; use {', '.join(allowed)}")
        self.allowed = allowed


class UnauthorizedError(BatonError):
    """The request does not prove that it comes from this cluster."""


@dataclass(frozen=True, slots=True)
class _ErrorStatus:
    status: int
    type: str
    code: str | None = None


_ERROR_STATUSES: Final[tuple[tuple[type[BatonError], _ErrorStatus], ...]] = (
    (ModelNotFoundError, _ErrorStatus(404, "invalid_request_error", "model_not_found")),
    (BodyTooLargeError, _ErrorStatus(413, "invalid_request_error", "body_too_large")),
    (ContextLengthError, _ErrorStatus(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequestError, _ErrorStatus(400, "invalid_request_error")),
    (UnauthorizedError, _ErrorStatus(401, "authentication_error", "unauthorized")),
    (TicketError, _ErrorStatus(403, "permission_error", "invalid_ticket")),
    (UnknownPathError, _ErrorStatus(404, "invalid_request_error", "unknown_path")),
    (WrongMethodError, _ErrorStatus(405, "invalid_request_error", "method_not_allowed")),
    (StandbyError, _ErrorStatus(409, "conflict_error", "no_standby")),
    (StaleTicketError, _ErrorStatus(409, "conflict_error", "stale_ticket")),
    (HandoffError, _ErrorStatus(502, "upstream_error", "handoff_failed")),
    (OverloadedError, _ErrorStatus(503, "overloaded_error", "overloaded")),
    (DrainingError, _ErrorStatus(503, "overloaded_error", "draining")),
    (FencedError, _ErrorStatus(503, "overloaded_error", "fenced")),
    (DeadlineError, _ErrorStatus(504, "timeout_error", "deadline_exceeded")),
    (EngineError, _ErrorStatus(500, "engine_error", "engine_failed")),
)
_DECLINED: Final = _ErrorStatus(502, "upstream_error", "handoff_declined")
_OTHER: Final = _ErrorStatus(500, "internal_error", "internal_error")


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """What a client receives about an error."""

    status: int
    body: ErrorBody
    headers: Headers


def was_declined(error: BaseException) -> bool:
    """Whether a prefill request ended because the decode worker had everything cached."""
    return isinstance(error, HandoffError) and error.stage == DECLINED_STAGE


def describe(error: Exception) -> ErrorResponse:
    """How to answer an error; what is not a `BatonError` is not described to clients."""
    if not isinstance(error, BatonError):
        detail = ErrorDetail(
            "the worker met an unexpected error; its log has the details",
            _OTHER.type,
            None,
            _OTHER.code,
        )
        return ErrorResponse(_OTHER.status, ErrorBody(detail), ())
    answer = next((a for kind, a in _ERROR_STATUSES if isinstance(error, kind)), _OTHER)
    if was_declined(error):
        answer = _DECLINED
    param, code = None, answer.code
    if isinstance(error, InvalidRequestError):
        param, code = error.param, error.code or answer.code
    detail = ErrorDetail(str(error), answer.type, param, code)
    return ErrorResponse(answer.status, ErrorBody(detail), _headers(error))


def _headers(error: BatonError) -> Headers:
    match error:
        case OverloadedError(retry_after_s=seconds):
            return ((b"retry-after", str(max(1, math.ceil(seconds))).encode()),)
        case DrainingError() | FencedError():
            return ((b"retry-after", b"1"),)
        case WrongMethodError(allowed=allowed):
            return ((b"allow", ", ".join(allowed).encode()),)
        case UnauthorizedError():
            return ((b"www-authenticate", b"Bearer"),)
        case _:
            return ()
