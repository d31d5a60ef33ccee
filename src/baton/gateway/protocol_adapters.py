"""What workers are sent and what they reply, in each protocol: Baton's and vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from baton.auth.ticket import Ticket, seal, write_unsigned
from baton.errors import UNDECODABLE, BatonError
from baton.gateway.errors import OK, ErrorAnswer, KVLostError
from baton.gateway.fallbacks import FallbackCause
from baton.gateway.request import TICKET_FIELD, TRANSFER_FIELDS, CompletionBody
from baton.gateway.upstream import Upstream, read_error
from baton.protocol.request_fields import Resume
from baton.protocol.worker_http import (
    ErrorBody,
    ErrorDetail,
    FirstToken,
    PrefillReply,
    WorkerProtocol,
    trace_path,
)
from baton.record import Record
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from yarl import URL

    from baton.auth.credentials import Credentials
    from baton.gateway.workers import Worker
    from baton.router.fleet import WorkerView


MAX_DETAIL_CHARS: Final = 500

_encoder = msgspec.json.Encoder()
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def write_ticket(
    ticket: Ticket, prefill: WorkerView, decode: WorkerView, credentials: Credentials
) -> str:
    """A ticket as text for its two workers: signed, unless both know who sends it without that."""
    if prefill.takes_unsigned_tickets and decode.takes_unsigned_tickets:
        return write_unsigned(ticket)
    return seal(ticket, credentials)


def prefill_body(body: CompletionBody, ticket: str, num_prefix_tokens: int = 0) -> bytes:
    """The body for vLLM as the ticket's prefill worker. `ticket` is base64url text.

    `num_prefix_tokens`: as in the ticket. Its server computes no more of the prompt.
    """
    transfer = _VllmTransfer(
        ticket,
        do_remote_decode=True,
        baton_resume=body.resume,
        baton_prefix_tokens=num_prefix_tokens,
    )
    return _encoder.encode({**body.for_one_token().fields, TICKET_FIELD: transfer})


def decode_body(body: CompletionBody, ticket: str) -> bytes:
    """The body for vLLM as the ticket's decode worker. `ticket` is base64url text."""
    transfer = _VllmTransfer(ticket, do_remote_prefill=True, baton_resume=body.resume)
    return _encoder.encode({**body.fields, TICKET_FIELD: transfer})


class _VllmTransfer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kv_transfer_params` for vLLM."""

    baton_ticket: str
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    baton_resume: Resume | None = None
    baton_prefix_tokens: int = 0


def client_answer(answer: bytes) -> bytes:
    """An answer in one piece without its connector's fields; unchanged if it is not JSON."""
    try:
        fields = _fields_decoder.decode(answer)
    except UNDECODABLE:
        return answer
    for name in TRANSFER_FIELDS:
        fields.pop(name, None)
    return _encoder.encode(fields)


def client_error(status: int, answer: bytes) -> bytes:
    """An error of vLLM's server in OpenAI's form: most of them are, its web framework's are not."""
    if read_error(answer).message is not None:
        return answer
    try:
        detail = _framework_error_decoder.decode(answer).detail
    except UNDECODABLE:
        detail = answer.decode(errors="replace") or f"the worker answered {status}"
    error = ErrorDetail(detail[:MAX_DETAIL_CHARS], "invalid_request_error", code=status)
    return _encoder.encode(ErrorBody(error))


class _FrameworkError(msgspec.Struct, frozen=True):
    """FastAPI's."""

    detail: str


_framework_error_decoder = msgspec.json.Decoder(_FrameworkError)


def first_error(event: bytes) -> ErrorAnswer | None:
    """A stream's first event as the whole answer that it stands for; None if it is no 5xx."""
    text = event.partition(b"\n")[0].removeprefix(b"data: ")
    try:
        status = _error_decoder.decode(text).error.code
    except UNDECODABLE:
        return None
    return ErrorAnswer(status, text, ((b"content-type", b"application/json"),))


class _Error(msgspec.Struct, frozen=True):
    """`code` is the status that it would have answered with."""

    code: Annotated[int, msgspec.Meta(ge=500, le=599)]


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


_error_decoder = msgspec.json.Decoder(_ErrorBody)


class RequestBodies(Record, frozen=True):
    """JSON, ready to be sent."""

    prefill: bytes
    decode: bytes


def request_bodies(
    body: CompletionBody,
    ticket: str,
    *,
    prefill: WorkerProtocol,
    decode: WorkerProtocol,
    num_prefix_tokens: int = 0,
    reports_cached: bool = False,
) -> RequestBodies:
    """Write both bodies. Between two Baton workers they are one and the same, written once.

    Baton's workers read `num_prefix_tokens` from the ticket. `reports_cached`: vLLM as the prefill
    worker is asked to report what it has cached. As the decode worker it may wait for the KV, and
    would report in each step.
    """
    if prefill == decode == "baton":
        ticketed = body.encode_with_ticket(ticket)
        return RequestBodies(ticketed, ticketed)
    return RequestBodies(
        prefill_body(body.for_report() if reports_cached else body, ticket, num_prefix_tokens)
        if prefill == "vllm"
        else body.encode_with_ticket(ticket),
        decode_body(body, ticket) if decode == "vllm" else body.encode_with_ticket(ticket),
    )


def copy_bodies(
    body: CompletionBody, ids: list[int], ticket: str, protocol: WorkerProtocol
) -> RequestBodies:
    """Write what hands over the KV of a prompt and of its answer's first tokens."""
    if protocol == "baton":
        copied = body.for_copy(ids)
    else:  # without a stream, its server counts these tokens to the prompt
        copied = replace(body.for_one_token(), resume=Resume(ids))
    return request_bodies(copied, ticket, prefill=protocol, decode=protocol)


class PrefillDone(Record, frozen=True):
    """Decode has the KV, can fetch it, or wants none. `first` is what the client may have now.

    `num_cached` tokens of the prompt were cached; None where that is not reported.
    `computed_s_ago`: since when its KV is computed, where the answer waited for more.
    """

    first: FirstToken | None = None
    num_cached: int | None = None
    computed_s_ago: float = 0.0


@dataclass(frozen=True, slots=True)
class TicketStale:
    """The ticket is for another incarnation of the prefill worker. Nothing was handed over."""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """No KV will come. `reason` continues a sentence that begins with the worker's name."""

    cause: FallbackCause
    reason: str


PrefillResult: TypeAlias = PrefillDone | TicketStale | PrefillFailed


def read_prefill_result(protocol: WorkerProtocol, status: int, answer: bytes) -> PrefillResult:
    """Classify the answer to a prefill request."""
    if status != OK:
        return _of_error(status, answer)
    return _of_vllm(answer) if protocol == "vllm" else _of_baton(answer)


_prefill_reply_decoder = msgspec.json.Decoder(PrefillReply)


def _of_baton(answer: bytes) -> PrefillResult:
    try:
        reply = _prefill_reply_decoder.decode(answer)
        return PrefillDone(reply.first or None, reply.cached_tokens, reply.computed_s_ago)
    except UNDECODABLE as exc:
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
        case _ if status in {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}:
            cause = FallbackCause.PREFILL_OVERLOADED
        case _ if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            cause = FallbackCause.PREFILL_REJECTED
        case _:
            cause = FallbackCause.PREFILL_FAILED
    return PrefillFailed(cause, f"answered {status} ({error})")


class _ConnectorStatus(msgspec.Struct, frozen=True):
    """What Baton's connector reports at the end of a prefill request."""

    status: str
    code: str | None = None
    reason: str = ""


class _Params(msgspec.Struct, frozen=True):
    baton: _ConnectorStatus | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _PromptDetails | None = None


class _Completion(msgspec.Struct, frozen=True):
    kv_transfer_params: _Params | None = None
    usage: _Usage | None = None

    @property
    def num_cached(self) -> int | None:
        """None where its server does not report it (`--enable-prompt-tokens-details`)."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


_completion_decoder = msgspec.json.Decoder(_Completion)

_REFUSALS: Final = {
    "invalid_ticket": FallbackCause.PREFILL_REJECTED,
    "replayed_ticket": FallbackCause.PREFILL_REJECTED,
    "unsupported_request": FallbackCause.PREFILL_REJECTED,
    "handoff_failed": FallbackCause.HANDOFF_FAILED,
    "overloaded": FallbackCause.PREFILL_OVERLOADED,
}


def _of_vllm(answer: bytes) -> PrefillResult:
    try:
        completion = _completion_decoder.decode(answer)
    except UNDECODABLE as exc:
        return PrefillFailed(FallbackCause.PREFILL_FAILED, f"answered what does not decode: {exc}")
    params = completion.kv_transfer_params
    offer = None if params is None else params.baton
    if offer is None:
        return PrefillFailed(
            FallbackCause.PREFILL_FAILED, "answered without a word from its connector"
        )
    match offer:
        case _ConnectorStatus(status="offered"):
            return PrefillDone(num_cached=completion.num_cached)
        case _ConnectorStatus(code="stale_ticket"):
            return TicketStale()
        case _:
            cause = _REFUSALS.get(offer.code or "", FallbackCause.PREFILL_FAILED)
            return PrefillFailed(
                cause, f"{offer.status} the handoff ({offer.code}): {offer.reason}"
            )


TIMEOUT_S: Final = 2.0

_decoder = msgspec.json.Decoder(RequestSpan)


async def find_kv_load_failure(
    upstream: Upstream, decode: Worker, ticket: Ticket
) -> KVLostError | None:
    """Why the KV of a ticket did not arrive; None if it did, or the reason is unknown."""
    for url in decode.control_urls:
        reasons = await _read_failures(upstream, url, ticket)
        if reasons:
            return KVLostError(f"{decode.name} ended the request without its KV: {reasons[0]}")
    return None


async def _read_failures(upstream: Upstream, url: URL, ticket: Ticket) -> list[str]:
    path = trace_path(ticket.request_id)
    try:
        status, body = await upstream.get(url.with_path(path, encoded=True), TIMEOUT_S)
        if status != OK:
            return []
        trace = _decoder.decode(body)
    except (BatonError, *UNDECODABLE):
        return []
    return trace.fallbacks if trace.ticket == ticket.id.hex() else []
