"""The decode worker's bytes to the client; the prefill worker's first token may precede them."""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from baton.clock import Instant
from baton.gateway.asgi import JSON, Header, send_whole
from baton.gateway.cached_tokens import CACHED_TOKENS, USAGE_BYTES, replace_cached_tokens
from baton.gateway.errors import (
    CLIENT_ERROR,
    CONFLICT,
    GATEWAY_TIMEOUT,
    OK,
    SERVER_ERROR,
    ContextTooSmallError,
    DeadlineError,
    ErrorAnswer,
    StaleTicketError,
    TicketRefusedError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerReportedError,
    answer_for,
)
from baton.gateway.protocol_adapters import client_answer, client_error, first_error
from baton.gateway.request_context import RequestContext, Services, note_error
from baton.gateway.running_streams import StreamMovedError
from baton.gateway.stream_record import DONE, ERROR_EVENT, StreamRecord
from baton.gateway.upstream import read_error
from baton.protocol.worker_http import (
    END_OF_STREAM,
    FIRST_TOKEN_AGE_HEADER,
    PROMPT_TOKENS_HEADER,
    REQUEST_ID_HEADER,
    SEED_HEADER,
    TOKEN_IDS_HEADER,
    FirstToken,
    first_token_path,
)
from baton.telemetry.trace import MOST_TOKEN_GAPS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Send

    from baton.auth.ticket import Ticket
    from baton.gateway.http_client import Answer
    from baton.gateway.resumption import Resumption
    from baton.gateway.workers import Worker
    from baton.net.http_exchange import HttpExchange
    from baton.router.fleet import WorkerView


COMMIT_TIMEOUT_S: Final = 1.0
LATE_S: Final = 1.0
"""Before its deadline a request that a worker ends is not tried elsewhere."""

log = logging.getLogger(__name__)


class EarlyFirstToken:
    """One attempt's. Owner: the event loop's thread; two tasks meet here."""

    def __init__(
        self, services: Services, context: RequestContext, record: StreamRecord, send: Send
    ) -> None:
        self._services, self._context, self._send = services, context, send
        self._record = record
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
            self._record.begin(has_ids=True)  # as decode's: both are Baton's workers
            events = self._record.take(self._sent)
            self._services.metrics.early_first_tokens.inc()
            await self._context.start_stream(self._send)
            self._context.note_first_token(self._services.clock.now())
            self._context.tail = events
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

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
        path = url.with_path(first_token_path(ticket.id))
        ask = self._services.upstream.ask
        status, committed = await ask(path, bytes(first.token), COMMIT_TIMEOUT_S)
        token = msgspec.json.decode(first.token)
        return status == OK and msgspec.json.decode(committed) == token


STALE_TICKET: Final = "stale_ticket"
EVENT_STREAM: Final = b"text/event-stream"
CONTEXT_CODE: Final = "context_length_exceeded"
VLLM_CONTEXT_PARAMS: Final = frozenset({"input_tokens", "input_text"})
"""vLLM's codes are HTTP's: by these it names which limit a request exceeds."""
TAIL_BYTES: Final = 32
REFUSALS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""Of who asks: that is the gateway, never its client."""
COMPLETION_TOKENS: Final = re.compile(rb'"completion_tokens": ?([0-9]{1,9})[,}]')
_COUNT: Final = re.compile(rb"[0-9]{1,9}")
_SECONDS: Final = re.compile(rb"[0-9]{1,5}(\.[0-9]{1,9})?")
ANSWER_HEADERS: Final = (b"content-type", b"retry-after")


class ResponseForwarder:
    """One decode worker's answer to one request, of which the client may have a part already."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        decode: WorkerView,
        send: Send,
        *,
        resumption: Resumption,
        early: EarlyFirstToken | None = None,
    ) -> None:
        self._services, self._context, self._decode, self._send = services, context, decode, send
        self._resumption, self._record, self._early = resumption, resumption.record, early

    async def forward(self, response: Answer) -> None:
        """Forward it to the client.

        Raises:
            StaleTicketError: it refuses the ticket. Nothing was sent.
            TicketRefusedError: it believes neither ticket nor gateway. Nothing was sent.
            WorkerFailedError: it is a 5xx, or a stream of vLLM's that begins with one. Of a stream
                its headers may have been sent.
            WorkerLostError: it was cut off. A stream may have been sent in part.
            WorkerReportedError: it is a stream that ends with an error, which was not sent.
            DeadlineError: the worker has seen that its time is over, a little before this gateway.
            ContextTooSmallError: it has no room for the prompt. Nothing was sent.
            ReplayDiffersError: it is another answer than that of which a part was sent.
            UpstreamError: it is too long. Nothing was sent.
        """
        has_begun = self._early is not None and await self._early.close()
        kind = response.headers.get(b"content-type", b"")
        if response.status == OK and is_event_stream(kind):
            if response.multiplexed is not None:
                self._services.metrics.multiplexed_streams.inc()
            await self._context.start_stream(self._send)
            self._resumption.begin_stream(
                self._decode.protocol,
                has_ids=TOKEN_IDS_HEADER.encode() in response.headers,
                is_seeded=SEED_HEADER.encode() in response.headers,
            )
            self._resumption.num_prompt_tokens = _read_prompt_tokens(response)
            lost: UpstreamError | None = None
            try:
                await self._pump(response, has_begun=has_begun)
            except UpstreamError as exc:
                lost = exc
            end = find_missing_end(self._context, self._record)
            if end is None:
                if lost is not None:
                    self._check_moved()
                    raise lost
                raise WorkerLostError(f"{self._decode.id} ended its stream without [DONE]")
            await self._send({"type": "http.response.body", "body": end})
        else:
            await self._forward_whole(response)

    def _check_moved(self) -> None:
        """Raise `StreamMovedError` if that was decided: whatever else happened to the worker."""
        if isinstance(self._record.failure, StreamMovedError) and self._record.is_kept:
            raise self._record.failure

    async def _pump(self, response: Answer, *, has_begun: bool) -> None:
        context, take = self._context, self._record.take
        if has_begun and self._early is not None:
            chunk = await self._early.skip_sent(response.read)
        else:
            chunk = await response.read()
            if chunk.startswith(ERROR_EVENT):
                self._refuse(chunk)
        while not (events := take(chunk)):
            self._check()
            if not (chunk := await response.read()):
                return
        last = self._services.clock.now()
        context.note_first_token(last)
        self._resumption.note_news()
        context.tail = events
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._check()
        if context.exchange is not None:
            await self._pass_on(response, context.exchange, last)
        else:
            await self._send_on(response, last)

    def _check(self) -> None:
        """Raise what the record found in the stream."""
        match self._record.failure:
            case None:
                pass
            case StreamMovedError() as moved if not self._record.can_go_on:
                self._record.failure = None
                self._resumption.note_stays(moved)
            case WorkerReportedError(is_out_of_time=True) as failure if self._is_nearly_over():
                raise DeadlineError(str(failure)) from failure
            case failure:
                raise failure

    async def _pass_on(self, response: Answer, exchange: HttpExchange, last: Instant) -> None:
        """The hot path: whatever is added here is paid for each token of each stream."""
        now, record, write = self._services.clock.now, self._record, exchange.write
        take, context = record.take, self._context
        num_chunks = 1
        observe_interval = context.metrics.inter_token_latency.observe
        gaps = context.open_token_gaps()
        append_gap, most_chunks = gaps.append, MOST_TOKEN_GAPS - len(gaps)

        def forward(chunk: bytes) -> bool:
            nonlocal last, num_chunks
            events = take(chunk)
            if not events:
                return record.failure is None
            at = now()
            gap_s = at - last
            observe_interval(gap_s)
            if num_chunks <= most_chunks:
                append_gap(gap_s)
            last = at
            num_chunks += 1
            is_long = len(events) >= TAIL_BYTES
            context.tail = events if is_long else _join_tail(context.tail, events)
            return write(events) and record.failure is None

        while await response.push_to(forward):
            self._check()
            await exchange.drain()

    async def _send_on(self, response: Answer, last: Instant) -> None:
        """The same to a receiver that has to be awaited: one of several answers."""
        context = self._context
        gaps = context.open_token_gaps()
        while chunk := await response.read():
            if events := self._record.take(chunk):
                at = self._services.clock.now()
                context.metrics.inter_token_latency.observe(at - last)
                if len(gaps) < MOST_TOKEN_GAPS:
                    gaps.append(at - last)
                last = at
                context.tail = _join_tail(context.tail, events)
                await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self._check()

    def _is_nearly_over(self) -> bool:
        """Whether a worker may see already that the request's time is over."""
        return self._context.left_s(self._services.clock.now()) < LATE_S

    def _refuse(self, event: bytes) -> None:
        """An error instead of a first token: vLLM sends its 200 before it knows."""
        if self._decode.protocol == "vllm" and (error := first_error(event)) is not None:
            raise WorkerFailedError(f"{self._decode.id} answered {error.status}", answer=error)

    def _raise_if_refused(self, status: int, body: bytes) -> None:
        if status == CONFLICT and read_error(body).code == STALE_TICKET:
            raise StaleTicketError(self._decode.ref)
        if status in REFUSALS:
            detail = read_error(body).message
            raise TicketRefusedError(f"{self._decode.id} answered {status}: {detail}")
        if status == GATEWAY_TIMEOUT and self._is_nearly_over():
            raise DeadlineError(f"{self._decode.id} answered 504 ({read_error(body)})")
        if status == CLIENT_ERROR and self._is_too_small(body):
            reason = f"the request does not fit the context of {self._decode.id}"
            raise ContextTooSmallError(reason, answer=ErrorAnswer(status, body))

    async def _forward_whole(self, response: Answer) -> None:
        """An answer in one piece is read to its end first, so that a cut can still be a 502."""
        context = self._context
        body = await response.read_whole(self._services.options.max_answer_bytes)
        if response.status >= CLIENT_ERROR:
            self._raise_if_refused(response.status, body)
        headers = _forwarded_headers(response)
        if context.status is not None:
            raise UpstreamError(f"{self._decode.id} answered {response.status} to a second attempt")
        if response.status >= SERVER_ERROR:
            raise self._describe_failure(response.status, body, headers)
        is_error = response.status >= CLIENT_ERROR
        if self._decode.protocol == "vllm":
            body = client_error(response.status, body) if is_error else client_answer(body)
        if is_error:
            note_error(context.trace, read_error(body).message or f"{self._decode.id} refused it")
        context.tail = body[-USAGE_BYTES:]
        first_at = None
        if (age_s := _read_age(response)) is not None:
            first_at = Instant(max(context.received_at, self._services.clock.now() - age_s))
            context.num_streamed = _find_number(COMPLETION_TOKENS, context.tail) or 0
            if context.running is not None:
                context.running.first_token(first_at)
        context.note_first_byte(first_at)
        if not is_error and b'"cached_tokens"' in body:
            body = await self._with_cached_tokens(body)
        own = (REQUEST_ID_HEADER.encode(), context.id.encode())
        context.status = response.status  # not sooner: until here an error can still be sent
        await send_whole(self._send, response.status, body, (*headers, own))

    def _is_too_small(self, body: bytes) -> bool:
        """Whether an error is that the request does not fit, where another worker has more room."""
        error, decode = read_error(body), self._decode
        if error.code != CONTEXT_CODE and error.param not in VLLM_CONTEXT_PARAMS:
            return False
        served = self._services.workers.fleet.models.get(decode.model)
        others = () if served is None else served.decodes
        return any(w.available and w.max_context_tokens > decode.max_context_tokens for w in others)

    def _describe_failure(
        self, status: int, body: bytes, headers: tuple[Header, ...]
    ) -> WorkerFailedError:
        """The worker's own words, unless they are a page of a proxy, or a server's last ones."""
        reason = f"{self._decode.id} answered {status}"
        if read_error(body).message is None:
            answer = answer_for(UpstreamError(reason))
        else:
            others = tuple(header for header in headers if header[0] != JSON[0])
            answer = ErrorAnswer(status, body, others)
        return WorkerFailedError(reason, answer=answer)

    async def _with_cached_tokens(self, body: bytes) -> bytes:
        """With those of its prefill worker, whose answer this one may have overtaken."""
        context = self._context
        if context.num_cached is None and context.prefill_reported is not None:
            await context.prefill_reported()
        if context.num_cached is None:
            return body
        body = replace_cached_tokens(body, context.num_cached)
        context.tail = body[-USAGE_BYTES:]
        return body


def find_missing_end(context: RequestContext, record: StreamRecord) -> bytes | None:
    """What a stream lacks of which the client has the answer; None: more than `[DONE]`."""
    if context.tail.rstrip().endswith(DONE):
        return b""
    return END_OF_STREAM if record.has_usage else None


def _join_tail(tail: bytes, events: bytes) -> bytes:
    """Usage may have been sent before `[DONE]`, which is short."""
    return events if len(events) >= TAIL_BYTES else (tail + events)[-USAGE_BYTES:]


def find_cached_tokens(tail: bytes) -> int | None:
    """The cached tokens in the usage at an answer's end; None where it is not reported."""
    return _find_number(CACHED_TOKENS, tail)


def _find_number(field: re.Pattern[bytes], tail: bytes) -> int | None:
    reported = field.findall(tail)
    return int(reported[-1]) if reported else None


def _read_age(response: Answer) -> float | None:
    """Seconds since the first token of an answer in one piece; None where it is not reported."""
    text = response.headers.get(FIRST_TOKEN_AGE_HEADER.encode())
    if text is None or _SECONDS.fullmatch(text) is None:
        return None
    return float(text)


def _read_prompt_tokens(response: Answer) -> int | None:
    text = response.headers.get(PROMPT_TOKENS_HEADER.encode(), b"")
    return int(text) if _COUNT.fullmatch(text) else None


def is_event_stream(kind: bytes) -> bool:
    """Whether a `content-type` is that of a stream of events."""
    return kind.partition(b";")[0].strip().lower() == EVENT_STREAM


def _forwarded_headers(response: Answer) -> tuple[Header, ...]:
    """The headers that a client gets from a worker; anything else is the worker's own business."""
    headers = response.headers
    return tuple((name, headers[name]) for name in ANSWER_HEADERS if name in headers)
