"""Serves a generating request: admit, wait for the first token, then answer.

Nothing is sent before the first token (or the failure) is there, so that a failure before it has
a real status code. Leaving this code in any way, the client's disconnect included, cancels the
engine's request.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
from msgspec import UNSET

from baton.auth.ticket import hash_tenant
from baton.clock import Clock, Instant
from baton.engines.interface import Colocated, DecodeRequest, GenerationRequest, PrefillRequest
from baton.errors import (
    BatonError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    TicketError,
)
from baton.ids import RequestId, new_span_id
from baton.protocol.worker_http import (
    CREATED_HEADER,
    END_OF_STREAM,
    FIRST_TOKEN_AGE_HEADER,
    MAX_NEXT_TOKENS_BYTES,
    PROMPT_TOKENS_HEADER,
    SEED_HEADER,
    STANDBYS_PREFIX,
    TIMEOUT_HEADER,
    TOKEN_IDS_HEADER,
    TOKENS_SUFFIX,
    FirstToken,
    PrefillReply,
    read_seed,
)
from baton.telemetry.trace import RequestSpan, Stamp, TraceRing
from baton.telemetry.trace_context import TRACEPARENT, parse_traceparent
from baton.worker.errors import BodyTooLargeError, describe
from baton.worker.output_processor import OutputProcessor, TextChunk
from baton.worker.replies import (
    CompleteAnswer,
    EventWriter,
    ReplyHead,
    count_usage,
    error_event,
    token_ids_line,
)
from baton.worker.resumed_answer import KnownTokens, find_known_tokens
from baton.worker.standby import StandbyRequest, Standbys, check_standby, read_next_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import numpy as np
    from numpy.typing import NDArray

    from baton.engines.interface import FinishReason, NewToken, RequestKind
    from baton.tokenizer.tokenizer import Tokenizer
    from baton.worker.engine_client import AnswerStream, EngineClient
    from baton.worker.exchange import WorkerExchange
    from baton.worker.metrics import RequestObserver
    from baton.worker.options import WorkerOptions
    from baton.worker.prompts import Generation
    from baton.worker.replies import ApiAdapter
    from baton.worker.ticket_reader import TicketReader

logger = logging.getLogger(__name__)

MAX_CREATED_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """What serving a request needs. One for each worker."""

    options: WorkerOptions
    max_body_bytes: int
    clock: Clock
    tokenizer: Tokenizer
    tickets: TicketReader
    engine_client: EngineClient
    traces: TraceRing
    observer: RequestObserver


@dataclass(frozen=True, slots=True)
class _Job:
    """One admitted request on its way."""

    exchange: WorkerExchange
    adapter: ApiAdapter
    generation: Generation
    known: KnownTokens
    request: GenerationRequest
    head: ReplyHead


class GenerationService:
    """Answers both generating APIs and prefill requests. Owned by the event loop's thread."""

    def __init__(self, context: GenerationContext) -> None:
        self._context = context
        self._counter = itertools.count()
        self._standbys = Standbys()

    async def feed_standby(self, exchange: WorkerExchange) -> None:
        """`POST /baton/v1/standbys/{standby}/tokens`: what the client got from another worker."""
        self._check_from_gateway(is_from_gateway=exchange.is_from_gateway)
        tokens = read_next_tokens(await exchange.read_body(MAX_NEXT_TOKENS_BYTES))
        name = exchange.path.removeprefix(STANDBYS_PREFIX).removesuffix(TOKENS_SUFFIX)
        await self._standbys.feed(name, tokens)
        await exchange.send_nothing()

    async def serve(self, exchange: WorkerExchange, adapter: ApiAdapter) -> None:
        """Answer one request; the client's disconnect cancels it.

        Raises:
            BatonError: the request failed before anything was sent.
            ClientGoneError: the client left.
        """
        received = self._context.clock.now()
        body = await self._read_body(exchange)
        with exchange.cancelled_when_gone():
            await self._answer(exchange, adapter, body, received)

    async def _read_body(self, exchange: WorkerExchange) -> bytes:
        context = self._context
        try:
            return await exchange.read_body(context.max_body_bytes)
        except BodyTooLargeError as exc:
            if context.max_body_bytes == context.options.max_body_bytes:
                raise
            raise ContextLengthError(
                f"{exc}: no prompt that fits this model's context needs more",
                code="context_length_exceeded",
            ) from exc

    async def _answer(
        self, exchange: WorkerExchange, adapter: ApiAdapter, body: bytes, received: Instant
    ) -> None:
        generation = await adapter.read(body)
        tokenized = self._context.clock.now()
        is_from_gateway = exchange.is_from_gateway
        kind = self._context.tickets.read(generation.ticket, is_from_gateway=is_from_gateway)
        if generation.resume is not None:
            self._check_resume(generation, is_from_gateway=is_from_gateway)
        generation = _seeded(generation, exchange)
        known = await find_known_tokens(generation, self._context.tokenizer)
        request = self._request(exchange, known.to_compute(generation), kind, received)
        request.trace.tokenize_s = tokenized - received
        head = ReplyHead(
            exchange.request_id,
            self._context.options.served_model_name,
            _read_created(exchange) or int(self._context.clock.unix_now()),
        )
        if request.is_standby:
            check_standby(request)
        job = _Job(exchange, adapter, generation, known, request, head)
        if generation.resume is not None and generation.resume.is_complete:
            await self._end_complete(job)
            return
        self._context.traces.add(request.trace)
        with (
            self._context.observer.watch(request.trace),
            self._context.engine_client.open(request) as stream,
        ):
            await self._respond(job, stream)

    def _check_resume(self, generation: Generation, *, is_from_gateway: bool) -> None:
        self._check_from_gateway(is_from_gateway=is_from_gateway)
        if not generation.stream:
            raise InvalidRequestError("only a stream can go on", param="stream")

    def _check_from_gateway(self, *, is_from_gateway: bool) -> None:
        if self._context.options.is_tls and not is_from_gateway:
            raise TicketError("only a gateway can ask to go on with an answer")

    async def _respond(self, job: _Job, stream: AnswerStream) -> None:
        match job.request.kind:
            case PrefillRequest():
                await self._respond_prefill(job, stream)
            case Colocated() | DecodeRequest():
                if job.generation.stream:
                    await self._respond_stream(job, stream)
                else:
                    await self._respond_whole(job, stream)
            case other:
                assert_never(other)

    async def _respond_prefill(self, job: _Job, stream: AnswerStream) -> None:
        (token, *_) = await stream.tokens()
        job.request.trace.outcome, job.request.trace.num_output_tokens = "prefilled", 1
        kind = job.request.kind
        is_early = isinstance(kind, PrefillRequest) and kind.ticket.first_token_early
        reply = PrefillReply(
            request_id=job.exchange.request_id,
            prompt_tokens=len(job.generation.prompt_ids),
            cached_tokens=token.num_cached_tokens,
            computed_s_ago=self._since(job, Stamp.PREFILL_DONE),
            first=self._begin(job, token) if is_early else UNSET,
        )
        await job.exchange.send_json(200, reply)

    def _since(self, job: _Job, stamp: Stamp) -> float:
        now = self._context.clock.now()
        return max(0.0, now - job.request.trace.stamps.get(stamp, now))

    def _begin(self, job: _Job, token: NewToken) -> FirstToken | None:
        """What the decode worker's stream will begin with, if it does not end there as well."""
        chunk = OutputProcessor(job.generation, self._context.tokenizer).push(token)
        if chunk.finish is not None or not job.generation.stream or job.generation.resume:
            return None
        writer = self._writer(job)
        events = writer.opening() + self._events(job, writer, [chunk], [])
        if not events:
            return None
        return FirstToken(msgspec.Raw(msgspec.json.encode(token.token)), events.decode())

    def _writer(self, job: _Job) -> EventWriter:
        include_usage = job.generation.include_usage
        return EventWriter(job.adapter.events, job.head, include_usage=include_usage)

    async def _respond_whole(self, job: _Job, stream: AnswerStream) -> None:
        answer = OutputProcessor(job.generation, self._context.tokenizer)
        chunks = [chunk async for batch in self._chunks(job, answer, stream) for chunk in batch]
        finish = chunks[-1].finish
        if finish is None:
            raise EngineError("the answer ended without a finish reason")
        wants_logprobs = job.generation.sampling.num_logprobs is not None
        whole = CompleteAnswer(
            text="".join(chunk.text for chunk in chunks),
            entries=tuple(e for p in chunks for e in p.entries) if wants_logprobs else None,
            finish=finish,
            usage=count_usage(len(job.generation.prompt_ids), answer),
        )
        age_s = self._since(job, Stamp.FIRST_TOKEN)
        headers = ((FIRST_TOKEN_AGE_HEADER.encode(), f"{age_s:.6f}".encode()),)
        await job.exchange.send_json(200, job.adapter.reply(job.head, whole), headers)

    async def _respond_stream(self, job: _Job, stream: AnswerStream) -> None:
        answer = await job.known.restore(job.generation, self._context.tokenizer)
        writer, pending = self._writer(job), list[int]()
        try:
            if job.request.is_standby:
                job = await self._stand_by(job, answer, stream)
            async for batch in self._chunks(job, answer, stream):
                events = self._events(job, writer, batch, pending)
                if not job.exchange.started:
                    await _start_stream(job)
                    events = (b"" if job.generation.resume else writer.opening()) + events
                if events:
                    await job.exchange.send_events(events)
        except Exception as exc:
            if not job.exchange.started:
                raise
            if not isinstance(exc, BatonError):
                logger.exception("%s failed in mid-stream", job.request.trace.name)
            await job.exchange.end_stream(error_event(describe(exc).body) + END_OF_STREAM)
            job.request.trace.outcome = "failed"
            return
        await self._end_stream(job, writer, answer)

    async def _stand_by(self, job: _Job, answer: OutputProcessor, stream: AnswerStream) -> _Job:
        """Wait for the tokens that another worker samples; the answer's head means ready."""
        resume, context = job.generation.resume, self._context
        if resume is None or resume.standby is None:
            return job
        standby = StandbyRequest(
            job.generation,
            job.request,
            job.known,
            answer=answer,
            stream=stream,
            client=context.engine_client,
            tokenizer=context.tokenizer,
        )
        with self._standbys.open(resume.standby) as orders:
            await standby.wait_ready()
            await _start_stream(job)
            return replace(job, known=await standby.follow(orders))

    async def _end_complete(self, job: _Job) -> None:
        """The client lacks only what ends a stream."""
        answer = await job.known.restore(job.generation, self._context.tokenizer)
        await _start_stream(job)
        await self._end_stream(job, self._writer(job), answer)

    async def _end_stream(self, job: _Job, writer: EventWriter, answer: OutputProcessor) -> None:
        usage = count_usage(len(job.generation.prompt_ids), answer)
        last = writer.usage(usage) if job.generation.include_usage else b""
        await job.exchange.end_stream(last + END_OF_STREAM)

    def _events(
        self, job: _Job, writer: EventWriter, batch: list[TextChunk], pending: list[int]
    ) -> bytes:
        """The events of some pieces, each with its tokens' ids where they are wanted.

        `pending` are tokens that have had no event yet.
        """
        if not _wants_token_ids(job):
            return b"".join(self._event(job, writer, p) for p in batch if not p.is_empty)
        parts: list[bytes] = []
        for chunk in batch:
            pending.append(chunk.token_id)
            if not chunk.is_empty:
                parts.append(token_ids_line(pending))
                parts.append(self._event(job, writer, chunk))
                pending.clear()
        return b"".join(parts)

    def _event(self, job: _Job, writer: EventWriter, chunk: TextChunk) -> bytes:
        wanted = job.generation.sampling.num_logprobs is not None and chunk.entries
        logprobs = job.adapter.logprobs(chunk.entries) if wanted else None
        return writer.text(chunk.text, logprobs, chunk.finish)

    async def _chunks(
        self, job: _Job, answer: OutputProcessor, stream: AnswerStream
    ) -> AsyncGenerator[list[TextChunk]]:
        """Pieces of an answer, as many at a time as are there, until the last one."""
        trace = job.request.trace
        token_clock = self._context.observer.token_clock(trace)
        finish: FinishReason | None = None
        num_again = 0
        while finish is None:
            tokens = await stream.tokens()
            token_clock.arrived(len(tokens))
            if num_again < len(job.known.again):
                num_known = job.known.skip(num_again, tokens)
                _push_all(answer, tokens[:num_known])
                num_again += num_known
                tokens = tokens[num_known:]
                if not tokens:
                    continue
            chunks = _push_all(answer, tokens)
            finish = chunks[-1].finish
            trace.num_output_tokens = answer.num_tokens
            if finish is not None:
                stream.close()  # a stop string ended it: the engine need not go on
                trace.outcome = finish
            yield chunks

    def _request(
        self, exchange: WorkerExchange, generation: Generation, kind: RequestKind, received: Instant
    ) -> GenerationRequest:
        timeout_s = min(_read_timeout_s(exchange), self._context.options.request_timeout_s)
        return GenerationRequest(
            # Two clients may choose the same x-request-id; inside, each request is one.
            id=RequestId(f"{exchange.request_id}~{next(self._counter)}"),
            prompt_ids=_prompt_of(generation, kind),
            sampling=generation.sampling,
            kind=kind,
            tenant_salt=_tenant_salt(generation, kind),
            deadline=Instant(received + timeout_s),
            trace=self._trace(exchange, generation, kind, received),
            is_standby=generation.resume is not None and generation.resume.standby is not None,
        )

    def _trace(
        self, exchange: WorkerExchange, generation: Generation, kind: RequestKind, received: Instant
    ) -> RequestSpan:
        options = self._context.options
        trace = RequestSpan(
            request_id=exchange.request_id,
            worker=options.worker,
            epoch=options.epoch,
            role=_role_of(kind),
            num_prompt_tokens=len(generation.prompt_ids),
        )
        trace.stamp(Stamp.RECEIVED, received)
        parent = parse_traceparent(exchange.header(TRACEPARENT) or b"")
        if parent is not None:
            trace.trace_id, trace.parent_id = parent.trace_id, parent.span_id
            trace.span_id, trace.is_sampled = new_span_id(), parent.is_sampled
        if not isinstance(kind, Colocated):
            ticket = kind.ticket
            peer = ticket.decode if isinstance(kind, PrefillRequest) else ticket.prefill
            trace.ticket, trace.mode, trace.peer = ticket.id.hex(), ticket.mode, peer.worker
            trace.distance = ticket.distance or None
        return trace


def _push_all(answer: OutputProcessor, tokens: list[NewToken]) -> list[TextChunk]:
    """Pieces of `tokens`, up to the last one of the answer."""
    chunks: list[TextChunk] = []
    for token in tokens:
        chunks.append(answer.push(token))
        if chunks[-1].finish is not None:
            break
    return chunks


async def _start_stream(job: _Job) -> None:
    """Send the head of a stream: with what a gateway needs to have it go on elsewhere."""
    if not _wants_token_ids(job):
        await job.exchange.start_stream()
        return
    num_prompt_tokens = str(len(job.generation.prompt_ids)).encode()
    await job.exchange.start_stream((
        (TOKEN_IDS_HEADER.encode(), b"1"),
        (PROMPT_TOKENS_HEADER.encode(), num_prompt_tokens),
    ))


def _wants_token_ids(job: _Job) -> bool:
    return job.exchange.header(TOKEN_IDS_HEADER.encode()) is not None


def _prompt_of(generation: Generation, kind: RequestKind) -> NDArray[np.int32]:
    """The tokens to compute: of a prefill request those that it hands over."""
    prompt_ids = generation.prompt_ids
    if isinstance(kind, PrefillRequest):
        return prompt_ids[: kind.ticket.count_handed_over(len(prompt_ids))]
    return prompt_ids


def _role_of(kind: RequestKind) -> str:
    match kind:
        case Colocated():
            return "colocated"
        case PrefillRequest():
            return "prefill"
        case DecodeRequest():
            return "decode"
        case _:
            assert_never(kind)


def _tenant_salt(generation: Generation, kind: RequestKind) -> str:
    if isinstance(kind, Colocated):
        return hash_tenant(generation.cache_salt)  # as in tickets: KV that came by one is found
    return kind.ticket.tenant_salt


def _read_created(exchange: WorkerExchange) -> int | None:
    """When the answer was created by the gateway's clock, the same for prefill and decode."""
    text = exchange.header(CREATED_HEADER.encode()) or b""
    return int(text) if text.isdigit() and len(text) <= MAX_CREATED_DIGITS else None


def _seeded(generation: Generation, exchange: WorkerExchange) -> Generation:
    """With the gateway's seed, where the client gave none: another worker can go on with it."""
    seed = read_seed(exchange.header(SEED_HEADER.encode()) or b"")
    if generation.sampling.seed is not None or seed is None:
        return generation
    return replace(generation, sampling=msgspec.structs.replace(generation.sampling, seed=seed))


def _read_timeout_s(exchange: WorkerExchange) -> float:
    """Seconds that the gateway leaves for this request; infinite if it sets none."""
    text = exchange.header(TIMEOUT_HEADER.encode())
    if text is None:
        return math.inf
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is not a number of seconds above 0", code="invalid_value"
        )
    return timeout_s
