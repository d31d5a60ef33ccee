"""What ends a worker's request, and how each error is answered: status and OpenAI's error body."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

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
from baton.protocol.worker_http import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from collections.abc import Sequence

Headers: TypeAlias = "Sequence[tuple[bytes, bytes]]"


class ClientGoneError(Exception):
    """The client closed its connection: no answer can be sent."""


class BodyTooLargeError(InvalidRequestError):
    """The request's body has more bytes than this worker reads."""


class StaleTicketError(BatonError):
    """A ticket for another incarnation of this worker, or one that was used already."""


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
