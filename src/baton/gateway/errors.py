"""What clients receive when something goes wrong: status codes and OpenAI's error JSON.

GatewayError
├── BodyTooLargeError       413
├── PathNotFoundError       404
├── MethodNotAllowedError   405
├── UnsupportedMediaTypeError 415
├── UnauthorizedError       401
│   └── ManagementKeyError  browsers then ask for the key
├── ForbiddenError          403
├── QuotaError              429
├── NoWorkerError           503
├── UpstreamError           502: a worker did not give an answer
│   ├── WorkerUnreachableError
│   ├── WorkerLostError
│   ├── WorkerFailedError   it answered with a 5xx, which the client gets if no other can serve
│   ├── ContextTooSmallError it has less room than another worker: the client gets its 400 at last
│   ├── WorkerReportedError its stream ended with an error
│   ├── ReplayDiffersError  it does not give the answer of which the client has a part
│   ├── PrefillFailedError  a prefill worker that was asked first has no KV for decode
│   ├── StreamMovedError    (running_streams.py) never sent: the stream goes on at another worker
│   ├── TicketRefusedError  a worker does not accept the ticket: it computes the prompt itself
│   └── StaleTicketError    a worker is a new incarnation: place the request again
├── UnusableWorkerError     never sent to a client: the worker is not used
├── AnswerError             one of several answers failed: the error that its worker gave
├── DeadlineError           504
├── ShuttingDownError       503
└── ClientLeftError         not sent: the connection is closed
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import (
    UNDECODABLE,
    BatonError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)
from baton.protocol.worker_http import END_OF_STREAM, ErrorBody, ErrorDetail
from baton.router.explanation import NotExplainableError

if TYPE_CHECKING:
    from baton.auth.ticket import WorkerRef
    from baton.gateway.fallbacks import FallbackCause

RETRY_AFTER_NO_WORKER_S = 2.0
CLIENTS_FAULTS: Final = frozenset({"invalid_request_error", "BadRequestError"})
"""Types of errors, Baton's and vLLM's, that the same request would meet again."""

DEADLINE_CODE: Final = "deadline_exceeded"
"""Of errors, this gateway's and Baton workers'."""

# To look a member of HTTPStatus up is a call in Python, of which each request makes many.
OK: Final = HTTPStatus.OK
CLIENT_ERROR: Final = HTTPStatus.BAD_REQUEST
CONFLICT: Final = HTTPStatus.CONFLICT
SERVER_ERROR: Final = HTTPStatus.INTERNAL_SERVER_ERROR
GATEWAY_TIMEOUT: Final = HTTPStatus.GATEWAY_TIMEOUT
UNAVAILABLE: Final = HTTPStatus.SERVICE_UNAVAILABLE


class GatewayError(BatonError):
    """Base of what only a gateway raises."""


class BodyTooLargeError(GatewayError):
    """The request's body exceeds the limit."""


class PathNotFoundError(GatewayError):
    """The path is not on the allow-list."""


class MethodNotAllowedError(GatewayError):
    """The path exists, for another method: `allowed`."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedMediaTypeError(GatewayError):
    """The request's body is not JSON, by its own word."""


class UnauthorizedError(GatewayError):
    """The client shows no key, or none that is good: `code` names which."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ManagementKeyError(UnauthorizedError):
    """A management page needs the management key."""


class ForbiddenError(GatewayError):
    """The request comes from where none may come."""


class QuotaError(GatewayError):
    """The client has used up what its key allows for now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkerError(GatewayError):
    """No worker can serve this now."""


class UpstreamError(GatewayError):
    """A worker did not give the answer that was asked of it."""


class WorkerUnreachableError(UpstreamError):
    """No connection to the worker could be made, or no answer came in time.

    `is_refused`: nothing listens there. `is_late`: only the time was over, or this host
    lacked what a connection takes. `is_untrusted`: what listens there is not of this cluster.
    """

    def __init__(
        self,
        message: str,
        *,
        is_refused: bool = False,
        is_late: bool = False,
        is_untrusted: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_refused, self.is_late, self.is_untrusted = is_refused, is_late, is_untrusted


class WorkerLostError(UpstreamError):
    """The worker was there, and is gone before its answer was complete."""


class WorkerFailedError(UpstreamError):
    """The worker answered with a 5xx: `answer`."""

    def __init__(self, message: str, *, answer: ErrorAnswer) -> None:
        super().__init__(message)
        self.answer = answer


class ContextTooSmallError(UpstreamError):
    """The prompt does not fit the worker's context, and another one's is larger: `answer`."""

    def __init__(self, message: str, *, answer: ErrorAnswer) -> None:
        super().__init__(message)
        self.answer = answer


class WorkerReportedError(UpstreamError):
    """A stream ended with an error's event, of which `event` is the JSON."""

    def __init__(self, event: bytes) -> None:
        detail = _read_detail(event)
        super().__init__(f"the worker ended its stream with an error ({detail})")
        self.answer = ErrorAnswer(HTTPStatus.BAD_GATEWAY, event)
        self.is_clients_fault = detail.type in CLIENTS_FAULTS
        self.is_out_of_time = detail.code == DEADLINE_CODE


class ReplayDiffersError(UpstreamError):
    """A worker that was to go on with a stream gives another answer."""

    def __init__(self) -> None:
        super().__init__(
            "the worker of this stream was lost, and the one that took its place computed another "
            "answer, which the part that was sent does not fit; send the request again"
        )


class AnswerError(GatewayError):
    """One of several answers ended with an error: `answer`."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(f"one of the answers is an error, {answer.status}")
        self.answer = answer


class KVLostError(UpstreamError):
    """The worker was to go on from KV that did not arrive, and does not compute it itself."""


class PrefillFailedError(UpstreamError):
    """No KV is held for the decode worker, which was not asked yet: `cause` is what to avoid."""

    def __init__(self, message: str, *, cause: FallbackCause) -> None:
        super().__init__(message)
        self.cause = cause


class StaleTicketError(UpstreamError):
    """A worker refused a ticket made for its previous incarnation. Nothing was computed."""

    def __init__(self, worker: WorkerRef) -> None:
        super().__init__(f"{worker.worker} refused the ticket: it is for an earlier process of it")
        self.worker = worker


class TicketRefusedError(UpstreamError):
    """A worker does not accept the ticket, or the gateway. Nothing was computed."""


class UnusableWorkerError(GatewayError):
    """An address on the operator's list cannot be used as it was started."""


class DeadlineError(GatewayError):
    """The request took longer than the operator allows."""


class ShuttingDownError(GatewayError):
    """The gateway ends before the request does."""


class ClientLeftError(GatewayError):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error, ready to be sent: as a response or, after the headers, as an event."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def event(self) -> bytes:
        """The last two events of a stream that broke."""
        return b"data: " + self.body + b"\n\n" + END_OF_STREAM


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str


_KINDS: tuple[tuple[type[BatonError], _Kind], ...] = (
    (ModelNotFoundError, _Kind(404, "invalid_request_error", "model_not_found")),
    (InvalidRequestError, _Kind(400, "invalid_request_error", "invalid_request")),
    (BodyTooLargeError, _Kind(413, "invalid_request_error", "request_too_large")),
    (PathNotFoundError, _Kind(404, "invalid_request_error", "not_found")),
    (MethodNotAllowedError, _Kind(405, "invalid_request_error", "method_not_allowed")),
    (UnsupportedMediaTypeError, _Kind(415, "invalid_request_error", "unsupported_media_type")),
    (UnauthorizedError, _Kind(401, "authentication_error", "invalid_api_key")),
    (ForbiddenError, _Kind(403, "permission_error", "forbidden")),
    (QuotaError, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (OverloadedError, _Kind(503, "server_error", "overloaded")),
    (NoWorkerError, _Kind(503, "server_error", "no_worker")),
    (KVLostError, _Kind(502, "server_error", "handoff_failed")),
    (UpstreamError, _Kind(502, "server_error", "worker_failed")),
    (ShuttingDownError, _Kind(503, "server_error", "shutting_down")),
    (NotExplainableError, _Kind(501, "server_error", "not_explainable")),
    (DeadlineError, _Kind(504, "server_error", DEADLINE_CODE)),
)
_WITH_ANSWER: Final = (WorkerFailedError, ContextTooSmallError, WorkerReportedError, AnswerError)
_INTERNAL = _Kind(500, "server_error", "internal_error")


def answer_for(error: Exception) -> ErrorAnswer:
    """What the client receives. The text of errors that are not ours goes to the log only."""
    if isinstance(error, _WITH_ANSWER):
        return error.answer
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), _INTERNAL)
    message = "internal error; see the gateway's log" if kind is _INTERNAL else str(error)
    param, code = None, kind.code
    if isinstance(error, InvalidRequestError):
        param, code = error.param, error.code or kind.code
    elif isinstance(error, UnauthorizedError):
        code = error.code
    body = msgspec.json.encode(ErrorBody(ErrorDetail(message, kind.type, param, code)))
    return ErrorAnswer(kind.status, body, _headers(error))


_body_decoder = msgspec.json.Decoder(ErrorBody)


def _read_detail(event: bytes) -> ErrorDetail:
    try:
        return _body_decoder.decode(event).error
    except UNDECODABLE:
        return ErrorDetail()


def _headers(error: Exception) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, ManagementKeyError):
        return ((b"www-authenticate", b'Basic realm="Baton management", charset="UTF-8"'),)
    if isinstance(error, UnauthorizedError):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, OverloadedError | QuotaError):
        return ((b"retry-after", b"%d" % math.ceil(error.retry_after_s)),)
    if isinstance(error, NoWorkerError):
        return ((b"retry-after", b"%d" % math.ceil(RETRY_AFTER_NO_WORKER_S)),)
    if isinstance(error, MethodNotAllowedError):
        return ((b"allow", error.allowed.encode()),)
    if isinstance(error, BodyTooLargeError):
        return ((b"connection", b"close"),)  # the rest of the body is not going to be read
    return ()
