"""What the parts of a gateway share, and what they record about one request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.clients import EVERYBODY
from baton.gateway.metrics import NO_MODE, NO_MODEL, Phase
from baton.gateway.request import MAX_REQUEST_ID_CHARS
from baton.gateway.request_history import RequestRecord
from baton.gateway.targets import NO_TARGETS
from baton.ids import RequestId, new_span_id
from baton.protocol.worker_http import REQUEST_ID_HEADER
from baton.telemetry.log_limit import LimitedLog
from baton.telemetry.trace import RequestSpan, Stamp, new_token_gaps, pack_token_gaps

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Coroutine

    from starlette.types import Send

    from baton.auth.ticket import TicketIssuer
    from baton.clock import Clock, Instant
    from baton.gateway.admission import Admission
    from baton.gateway.audit import AuditLog
    from baton.gateway.clients import Client, Clients
    from baton.gateway.fallbacks import FallbackCause
    from baton.gateway.health_monitor import HealthMonitor
    from baton.gateway.metrics import GatewayMetrics, ModelMetrics
    from baton.gateway.options import GatewayOptions
    from baton.gateway.prefixes import Prefixes
    from baton.gateway.retries import Retries, Retry
    from baton.gateway.running_streams import RunningStreams
    from baton.gateway.stream_record import RecordBudget
    from baton.gateway.tail_sampling import HeadSampler
    from baton.gateway.targets import Targets
    from baton.gateway.upstream import Upstream
    from baton.gateway.waiting import WaitingRequests
    from baton.gateway.workers import Workers
    from baton.net.http_exchange import HttpExchange
    from baton.router.load import FleetLoad, RunningRequest
    from baton.router.placement import Placement, PlacementPolicy


class BackgroundTasks:
    """Tasks that are not awaited by a request. Owner: the event loop's thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin one; it handles its own failures."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """End what is not done."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


LOG_AGAIN_AFTER_S: Final = 30.0
MAX_OUTCOME_CHARS: Final = 500

log = logging.getLogger(__name__)


def note_error(trace: RequestSpan, reason: object) -> None:
    """What a request ends with, as its trace and the log show it."""
    trace.outcome = f"error: {reason}"[:MAX_OUTCOME_CHARS]


class Fallbacks:
    """Notes that a request is served in another way than intended."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock) -> None:
        self._metrics, self._log = metrics, LimitedLog(log, clock, LOG_AGAIN_AFTER_S)

    def note(self, context: RequestContext, cause: FallbackCause, reason: str) -> None:
        """Note one, for people (`reason`) and for machines (`cause`)."""
        self._metrics.fallbacks[cause].inc()
        context.trace.fallbacks.append(f"{cause}: {reason}")
        self._log.warning(cause, f"falling back ({cause}): {reason} [request {context.trace.name}]")


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway. Owner: the event loop's thread."""

    options: GatewayOptions
    clock: Clock
    metrics: GatewayMetrics
    workers: Workers
    health_monitor: HealthMonitor
    waiting: WaitingRequests
    upstream: Upstream
    placement: PlacementPolicy
    load: FleetLoad
    admission: Admission
    prefixes: Prefixes | None
    fallbacks: Fallbacks
    background_tasks: BackgroundTasks
    ticket_issuer: TicketIssuer
    retries: Retries
    clients: Clients
    audit: AuditLog | None
    stream_records: RecordBudget
    streams: RunningStreams
    head_sampler: HeadSampler | None


STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class RequestContext:
    """One request: where it stands. Owner: the task that serves it.

    `status` is what was sent to the client, None before. `tail` holds the last bytes of the body
    that went to the client, and is empty before the first: of a stream, whole events. `running` is
    the attempt under way, `retry` its place in the retry budget if it is not the first,
    `num_streamed` the parts of its answer that came one by one, or its tokens, `num_predicted` the
    tokens that its worker should have or load, `num_cached` those that a prefill worker had,
    `waited_s` its time in the queue. `targets` are the client's, `model_targets` what the operator
    wants for its model's requests. `adapter` is what the client has named, if that is a LoRA
    adapter of `model`. `prefill_reported` returns once a prefill worker that was asked beside the
    decode worker has reported what was cached, or does not soon. Where this is one part of a
    client's request, `whole` is that; else `exchange` is the client's.
    """

    id: RequestId
    path: str
    received_at: Instant
    deadline: Instant
    forwarded_headers: bytes
    trace: RequestSpan
    metrics: ModelMetrics
    address: str = ""
    client: Client = EVERYBODY
    phase: Phase = Phase.QUEUED
    model: str = NO_MODEL
    adapter: str = ""
    mode: str = NO_MODE
    status: int | None = None
    tail: bytes = b""
    placement: Placement | None = None
    running: RunningRequest | None = None
    retry: Retry | None = None
    num_predicted: int | None = None
    num_cached: int | None = None
    num_streamed: int = 0
    targets: Targets = NO_TARGETS
    model_targets: Targets = NO_TARGETS
    waited_s: float = 0.0
    first_byte_timer: asyncio.TimerHandle | None = None
    whole: RequestContext | None = None
    exchange: HttpExchange | None = None
    token_gaps: array[float] | None = None
    prefill_reported: Callable[[], Awaitable[None]] | None = None

    def part(self, name: str, now: Instant) -> RequestContext:
        """The context of one of several requests that are made of this one; "" is its own id."""
        suffix = f"-{name}" if name else ""
        request_id = RequestId(self.id[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix)
        span = self.trace
        part = RequestContext(
            id=request_id,
            path=self.path,
            received_at=now,
            deadline=self.deadline,
            forwarded_headers=self.forwarded_headers,
            trace=RequestSpan(
                request_id=request_id,
                worker=span.worker,
                epoch=span.epoch,
                role=span.role,
                trace_id=span.trace_id,
                span_id=new_span_id(),
                parent_id=span.span_id,
                is_sampled=span.is_sampled,
            ),
            metrics=self.metrics,
            model=self.model,
            adapter=self.adapter,
            model_targets=self.model_targets,
            whole=self,
        )
        part.trace.stamps[Stamp.RECEIVED] = now
        return part

    @property
    def headers_to_workers(self) -> bytes:
        """The header lines that both workers get."""
        return self.forwarded_headers + f"{REQUEST_ID_HEADER}: {self.id}\r\n".encode("ascii")

    @property
    def has_sent_bytes(self) -> bool:
        """Whether a part of an answer has gone to the client: only the same answer can go on."""
        return bool(self.tail)

    def left_s(self, now: Instant) -> float:
        """Seconds until the deadline; not below 0."""
        return max(0.0, self.deadline - now)

    def begin_attempt(self, placement: Placement, metrics: ModelMetrics) -> None:
        """It was placed, and workers are going to be asked."""
        self.placement, self.metrics, self.mode = placement, metrics, placement.mode
        self.phase = Phase.PREFILL
        self.trace.mode = placement.mode
        prefill, decode = placement.prefill, placement.decode
        self.trace.peer = decode.id if prefill is None else f"{prefill.id} → {decode.id}"
        if self.whole is not None and self.whole.placement is None:
            self.whole.begin_attempt(placement, metrics)

    def note_waited(self, seconds: float) -> None:
        """It is no longer in the queue."""
        self.waited_s = self.trace.waited_s = seconds
        if self.whole is not None:
            self.whole.trace.waited_s = max(seconds, self.whole.trace.waited_s)

    def watch_client(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once if the client leaves, or has left."""
        if self.exchange is not None:
            self.exchange.on_disconnect = on_left
            if self.exchange.disconnected:
                on_left()

    def stop_watching(self) -> None:
        """The client's request is served, or was given up."""
        if self.exchange is not None:
            self.exchange.on_disconnect = None
        if self.first_byte_timer is not None:
            self.first_byte_timer.cancel()

    async def start_stream(self, send: Send) -> None:
        """Send a stream's headers, unless they were sent."""
        if self.status is None:
            self.status = HTTPStatus.OK
            headers = [*STREAM_HEADERS, (REQUEST_ID_HEADER.encode(), self.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def open_token_gaps(self) -> array[float]:
        """Where the first `MOST_TOKEN_GAPS` gaps of its stream are noted, or of the rest of one."""
        if self.token_gaps is None:
            self.token_gaps = new_token_gaps()
        return self.token_gaps

    def finish(self, status: int, now: Instant) -> RequestRecord:
        """It is over: complete its trace. What is remembered of it."""
        trace = self.trace
        trace.stamps[Stamp.FINISHED] = now
        if self.token_gaps:
            trace.token_gaps = pack_token_gaps(self.token_gaps)
        return RequestRecord(
            trace,
            self.placement,
            status,
            now,
            self.adapter or self.model,
            self.num_streamed,
            self.path,
        )

    def note_prefilled(self, done_at: float) -> None:
        """The prefill worker has computed the prompt."""
        self.phase = Phase.DECODE
        if self.running is not None:
            self.running.prefilled(done_at)

    def end_retry(self, *, has_failed: bool = False) -> None:
        """Its attempt counts no longer as a retry, if it was one."""
        if self.retry is not None:
            self.retry.end(has_failed=has_failed)
            self.retry = None

    def note_first_token(self, now: Instant) -> None:
        """The first byte of a stream is here, or of the rest of one that is resumed."""
        if self.retry is not None:
            self.end_retry()
        if self.running is not None:
            self.running.first_token(now)
        if not self.has_sent_bytes:
            self.note_first_byte(now)

    def note_first_byte(self, first_at: Instant | None) -> None:
        """The answer is here, or begins: with a token of `first_at`; None: that is not known."""
        self.phase = Phase.DECODE
        if first_at is not None:
            self.trace.stamps.setdefault(Stamp.FIRST_TOKEN, first_at)
            if self.whole is None:
                self.metrics.time_to_first_token.observe(first_at - self.received_at)
        if self.first_byte_timer is not None:
            self.first_byte_timer.cancel()
