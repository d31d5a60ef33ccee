"""One completion request, from its arrival to its last byte: admission, deadlines, accounting."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from baton.clock import Instant, UnixTime
from baton.errors import BatonError, OverloadedError
from baton.gateway.answer_plan import AnswerPlan, plan_answers
from baton.gateway.asgi import BodyBudget, BodyLimit, HeldBody, read_body, send_error
from baton.gateway.audit import AuditRecord
from baton.gateway.errors import (
    CLIENT_ERROR,
    UNAVAILABLE,
    AnswerError,
    ClientLeftError,
    DeadlineError,
    ShuttingDownError,
    UpstreamError,
    WorkerReportedError,
    answer_for,
)
from baton.gateway.interruptible import Interruptible
from baton.gateway.metrics import (
    CLIENT_LEFT_CODE,
    NO_MODE,
    NO_MODEL,
    BrokenStreamCause,
)
from baton.gateway.placing import find_base
from baton.gateway.request import (
    check_content_type,
    parse_body,
    request_id_from,
)
from baton.gateway.request_context import RequestContext, Services, note_error
from baton.gateway.request_proxy import RequestProxy
from baton.gateway.several_answers import SeveralAnswers
from baton.gateway.targets import NO_TARGETS, read_targets
from baton.ids import new_epoch
from baton.net.http_exchange import EXTENSION
from baton.protocol.worker_http import REQUEST_ID_HEADER
from baton.telemetry.log_limit import LimitedLog
from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.trace_context import begin_span, read_context

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from baton.gateway.clients import Client
    from baton.gateway.request_history import RequestHistory

RELEASE_TIMEOUT_S: Final = 5.0
"""How long a client that does not read may delay the error event that ends its stream."""

"""A message may quote what a client sent, and outcomes are kept."""

log = logging.getLogger(__name__)


class Completions:
    """Serves completion requests, up to a number at once. Owner: the event loop's thread.

    `num_inflight` are being served; of several answers each counts.
    """

    def __init__(self, services: Services, records: RequestHistory) -> None:
        self._services, self._records = services, records
        self.num_inflight = 0
        self._log = LimitedLog(log, services.clock)
        self._bodies = BodyBudget(services.options.max_total_body_bytes)
        self._body_limit = BodyLimit(services.options.max_body_bytes, self._context_bytes)
        self._epoch = new_epoch()
        self._any_targets = services.options.targets_of(NO_MODEL)
        services.metrics.inflight.set_function(lambda: self.num_inflight)

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever happens to it."""
        context = self._make_context(path, scope)
        code: int = UNAVAILABLE  # unless the gateway's end cuts it short
        try:
            code = await self._answer(context, scope, receive, send)
        finally:
            self._account(context, code)

    async def _answer(
        self, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Serve, or answer with the error; the status to count."""
        try:
            context.client = self._services.clients.authenticate(scope["headers"])
            context.targets = read_targets(scope["headers"])
            check_content_type(scope["headers"])
            with self._services.clients.admit(context.client):
                await self._within_limits(context, receive, send)
        except ClientLeftError:
            self._services.metrics.disconnects[context.phase].inc()
            context.trace.outcome = f"client left ({context.phase})"
            return CLIENT_LEFT_CODE
        except asyncio.CancelledError:
            await self._send_failure(
                context, ShuttingDownError("the gateway is shutting down"), send
            )
            raise
        except BatonError as exc:
            return await self._send_failure(context, exc, send)
        except Exception as exc:
            log.exception("request %s failed", context.trace.name)
            return await self._send_failure(context, exc, send)
        if context.trace.outcome is None:  # else a worker's refusal was passed on
            context.trace.outcome = "ok"
        return context.status or 0

    async def _within_limits(self, context: RequestContext, receive: Receive, send: Send) -> None:
        self._check_room(context.client)
        whole_s = self._services.options.request_timeout_s
        with Interruptible() as scope, self._bodies.hold() as held:
            timer = asyncio.get_running_loop().call_later(
                whole_s, _expire, scope, context, "complete", whole_s
            )
            try:
                plan = await self._read(context, receive, held)
                await self._serve_plan(context, plan, scope, send)
            finally:
                timer.cancel()
                context.stop_watching()

    async def _read(self, context: RequestContext, receive: Receive, held: HeldBody) -> AnswerPlan:
        whole = await read_body(receive, self._body_limit, held)
        parsed = parse_body(whole, context.client.tenant, context.path)
        body = find_base(self._services.workers, parsed)
        max_answers = min(self._services.options.max_answers, self._limit(context.client))
        plan = plan_answers(body, max_answers)
        if plan.num_total > 1:
            held.take(max(0, plan.num_bytes - held.num_bytes))
        return plan

    async def _serve_plan(
        self, context: RequestContext, plan: AnswerPlan, scope: Interruptible, send: Send
    ) -> None:
        services, body, num_answers = self._services, plan.prompts[0], plan.num_total
        self._check_room(context.client, num_answers)
        self.num_inflight += num_answers  # only now: a slow client takes none
        try:
            context.watch_client(lambda: scope.interrupt(ClientLeftError("the client left")))
            if body.stream:
                first_s = services.options.first_byte_timeout_s
                context.first_byte_timer = asyncio.get_running_loop().call_later(
                    first_s, _expire, scope, context, "begun", first_s
                )
            context.model, context.adapter = body.model, body.adapter
            context.model_targets = services.options.targets_of(body.model)
            context.trace.stamps[Stamp.ADMITTED] = services.clock.now()
            if num_answers == 1:
                await RequestProxy(services, context, body, send).run()
            else:
                await SeveralAnswers(services, context, plan, send, record=self._records.add).run()
        finally:
            self.num_inflight -= num_answers

    def _context_bytes(self) -> int:
        """Of the longest context of a worker, whether it is up or not; none known: any length."""
        options, infos = self._services.options, [w.info for w in self._services.workers.all]
        known = [info.max_context_tokens for info in infos if info is not None]
        return max(known) * options.max_body_bytes_per_token if known else options.max_body_bytes

    def _limit(self, client: Client) -> int:
        return max(1, int(self._services.options.max_inflight_requests * client.share))

    def _check_room(self, client: Client, num: int = 1) -> None:
        limit = self._limit(client)
        if self.num_inflight + num > limit:
            raise OverloadedError(f"this gateway serves {limit} requests at once already")

    async def _send_failure(self, context: RequestContext, error: Exception, send: Send) -> int:
        """Report the error to the client: as a response, or as the last event of its stream."""
        answer = answer_for(error)
        note_error(context.trace, error)
        own = (REQUEST_ID_HEADER.encode(), context.id.encode())
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                if context.status is None:
                    context.status = answer.status
                    await send_error(send, answer, (own,))
                else:
                    self._services.metrics.broken_streams[_cause_of(error)].inc()
                    await send({"type": "http.response.body", "body": answer.event})
        except TimeoutError:
            log.warning("request %s: its client does not read; closing", context.trace.name)
        return answer.status

    def _make_context(self, path: str, scope: Scope) -> RequestContext:
        now = self._services.clock.now()
        headers = scope["headers"]
        request_id = request_id_from(headers)
        incoming, sampler = read_context(headers), self._services.head_sampler
        if incoming.is_ignored:
            self._services.metrics.traces.invalid_contexts.inc()
        span = begin_span(incoming, is_sampled=sampler is not None and sampler.next())
        context = RequestContext(
            id=request_id,
            path=path,
            received_at=now,
            deadline=Instant(now + self._services.options.request_timeout_s),
            forwarded_headers=span.headers,
            trace=RequestSpan(
                request_id=request_id,
                worker="gateway",
                epoch=self._epoch,
                role="gateway",
                trace_id=span.trace_id,
                span_id=span.span_id,
                parent_id=span.parent_id,
                is_sampled=span.is_sampled,
            ),
            metrics=self._services.metrics.of(NO_MODEL, NO_MODE),
            address=scope["client"][0] if scope.get("client") else "",
            model_targets=self._any_targets,
            exchange=scope["extensions"][EXTENSION],
        )
        context.trace.stamps[Stamp.RECEIVED] = now
        return context

    def _account(self, context: RequestContext, code: int) -> None:
        now = self._services.clock.now()
        record = context.finish(code, now)
        context.metrics.count(code)
        if code >= CLIENT_ERROR and code != CLIENT_LEFT_CODE:
            address = context.address or "a client"
            trace = context.trace
            self._log.warning(
                str(code),
                f"answered {address} with {code}: {trace.outcome} [request {trace.name}]",
            )
        context.metrics.duration.observe(now - context.received_at)
        if context.model_targets is not NO_TARGETS:
            # While no worker is there a model's name is whatever clients send.
            targets, models = self._services.metrics.targets, self._services.workers.fleet.models
            is_known = context.model in models or targets.knows(context.model)
            targets.ended(context, context.model if is_known else NO_MODEL, code, now)
        self._records.add(record)
        if self._services.audit is not None:
            self._services.audit.add(_audit(context, code, now, self._services.clock.unix_now()))


def _audit(context: RequestContext, code: int, now: Instant, at: UnixTime) -> AuditRecord:
    return AuditRecord(
        at=at,
        request_id=context.id,
        client=context.client.id,
        tenant=context.client.tenant,
        address=context.address,
        path=context.path,
        model=context.adapter or context.model,
        mode=context.mode,
        status=code,
        duration_s=now - context.received_at,
    )


def _expire(scope: Interruptible, context: RequestContext, what: str, limit_s: float) -> None:
    asked = context.trace.peer or "no worker yet"
    scope.interrupt(
        DeadlineError(f"not {what} within {limit_s:g} s (stage: {context.phase}, asked: {asked})")
    )


def _cause_of(error: Exception) -> BrokenStreamCause:
    match error:
        case DeadlineError():
            return BrokenStreamCause.DEADLINE
        case WorkerReportedError() | AnswerError():
            return BrokenStreamCause.WORKER_REPORTED
        case UpstreamError():
            return BrokenStreamCause.WORKER_LOST
        case _:
            return BrokenStreamCause.INTERNAL
