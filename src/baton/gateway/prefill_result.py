"""What a prefill leg's answer says about its KV, in either protocol."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.gateway.early_first_token import FirstToken
from baton.gateway.metrics import FallbackCause
from baton.gateway.upstream import read_error

if TYPE_CHECKING:
    from baton.router.fleet import WorkerProtocol


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """Decode has the KV, can fetch it, or wants none. `first` is what the client may have now."""

    first: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class TicketStale:
    """The ticket was made for another life of the prefill worker. Nothing was handed over."""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """No KV will come. `reason` continues a sentence that begins with the worker's name."""

    cause: FallbackCause
    reason: str


PrefillResult: TypeAlias = PrefillDone | TicketStale | PrefillFailed


def read_prefill_result(protocol: WorkerProtocol, status: int, answer: bytes) -> PrefillResult:
    """Judge the answer of a prefill leg."""
    if status != HTTPStatus.OK:
        return _of_error(status, answer)
    return _of_vllm(answer) if protocol == "vllm" else _of_baton(answer)


class _PrefillReply(msgspec.Struct, frozen=True):
    """What a Baton worker says at the end of a prefill leg, as far as a gateway cares."""

    first: FirstToken | None = None


_prefill_reply_decoder = msgspec.json.Decoder(_PrefillReply)


def _of_baton(answer: bytes) -> PrefillResult:
    try:
        return PrefillDone(_prefill_reply_decoder.decode(answer).first)
    except msgspec.MsgspecError as exc:
        return PrefillFailed(FallbackCause.PREFILL_FAILED, f"answered what does not decode: {exc}")


def _of_error(status: int, answer: bytes) -> PrefillResult:
    error = read_error(answer)
    match error.code:
        case "stale_ticket":
            return TicketStale()
        case "handoff_declined":
            return PrefillDone()  # decode had all it needs in its own cache
        case "handoff_failed":
            cause = FallbackCause.HANDOFF_FAILED
        case _ if status == HTTPStatus.SERVICE_UNAVAILABLE:
            cause = FallbackCause.PREFILL_OVERLOADED
        case _ if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            cause = FallbackCause.PREFILL_REJECTED
        case _:
            cause = FallbackCause.PREFILL_FAILED
    return PrefillFailed(cause, f"answered {status} ({error})")


class _ConnectorStatus(msgspec.Struct, frozen=True):
    """What Baton's connector says at the end of a prefill leg."""

    status: str
    code: str | None = None
    reason: str = ""


class _Params(msgspec.Struct, frozen=True):
    baton: _ConnectorStatus | None = None


class _Completion(msgspec.Struct, frozen=True):
    kv_transfer_params: _Params | None = None


_completion_decoder = msgspec.json.Decoder(_Completion)

_REFUSALS: Final = {
    "invalid_ticket": FallbackCause.PREFILL_REJECTED,
    "replayed_ticket": FallbackCause.PREFILL_REJECTED,
    "not_a_producer": FallbackCause.PREFILL_REJECTED,
    "unsupported_request": FallbackCause.PREFILL_REJECTED,
    "handoff_failed": FallbackCause.HANDOFF_FAILED,
    "overloaded": FallbackCause.PREFILL_OVERLOADED,
}


def _of_vllm(answer: bytes) -> PrefillResult:
    try:
        params = _completion_decoder.decode(answer).kv_transfer_params
    except msgspec.MsgspecError as exc:
        return PrefillFailed(FallbackCause.PREFILL_FAILED, f"answered what does not decode: {exc}")
    offer = None if params is None else params.baton
    if offer is None:
        return PrefillFailed(
            FallbackCause.PREFILL_FAILED, "answered without a word from its connector"
        )
    match offer:
        case _ConnectorStatus(status="offered"):
            return PrefillDone()
        case _ConnectorStatus(code="stale_ticket"):
            return TicketStale()
        case _:
            cause = _REFUSALS.get(offer.code or "", FallbackCause.PREFILL_FAILED)
            return PrefillFailed(
                cause, f"{offer.status} the handoff ({offer.code}): {offer.reason}"
            )
