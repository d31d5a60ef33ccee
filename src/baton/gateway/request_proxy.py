"""One request, sent to prefill and decode: placed, and placed again if that can still help.

Both workers are asked at once, but in modes pull and pool: there the KV waits at the prefill
worker, or in the store, until the decode worker, asked second, has room for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from baton.auth.ticket import HandoffMode, Ticket, hash_tenant
from baton.gateway.errors import (
    CLIENT_ERROR,
    ContextTooSmallError,
    KVLostError,
    NoWorkerError,
    PrefillFailedError,
    StaleTicketError,
    TicketRefusedError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.fallbacks import FallbackCause
from baton.gateway.interruptible import Interruptible
from baton.gateway.metrics import NO_MODE
from baton.gateway.placing import find_base, find_prompt, find_serving, find_sole_field
from baton.gateway.prefill_request import NO_ANSWER, Handoff, PrefillRequest
from baton.gateway.protocol_adapters import find_kv_load_failure, request_bodies, write_ticket
from baton.gateway.request import CompletionBody, estimate_prompt_tokens, find_vllm_field
from baton.gateway.response_forwarder import (
    COMPLETION_TOKENS,
    EarlyFirstToken,
    ResponseForwarder,
    find_cached_tokens,
    find_missing_end,
)
from baton.gateway.resumption import Resumption
from baton.gateway.running_streams import REST_TOKENS, RunningStream, StreamMovedError
from baton.gateway.workers import find_not_asked
from baton.ids import WorkerId, new_ticket_id
from baton.protocol.worker_http import CREATED_HEADER, TIMEOUT_HEADER
from baton.router.failover import EVERY_MODE, PREFILL_FIRST, Attempt, Failover, Failure
from baton.router.load import RunningRequest, find_itl
from baton.router.placement import Placement, PlacementRequest, Unplaceable
from baton.router.topology import name_distance
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Send
    from yarl import URL

    from baton.clock import Instant
    from baton.gateway.http_client import Answer
    from baton.gateway.request_context import RequestContext, Services
    from baton.gateway.standby import Standby
    from baton.router.fleet import Fleet, WorkerView
    from baton.router.prefixes import PromptMatch

REFUSED: Final = "the decode worker refused the request"
NOT_EXPECTED: Final = "none is expected back"


class RequestProxy:
    """Serves one parsed request. A stream of which a part has left goes on where it can.

    `beside` is a worker that holds the prompt's KV: it is asked first, without a handoff.
    `excluded_modes` are not used.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        body: CompletionBody,
        send: Send,
        *,
        beside: WorkerView | None = None,
        excluded_modes: frozenset[HandoffMode] = frozenset(),
    ) -> None:
        self._services, self._context, self._body, self._send = services, context, body, send
        self._beside, self._excluded_modes = beside, excluded_modes
        self._created = str(int(services.clock.unix_now()))
        self._num_tokens = estimate_prompt_tokens(body)
        self._num_known = 0  # of the prompt's tokens: what it has at least
        self._match: PromptMatch | None = None
        self._resumption = Resumption(services, context)
        self._wait_ends_at: Instant | None = None
        self._full: frozenset[WorkerId] = frozenset()
        self._standby: Standby | None = None
        self._is_given_up = False

    async def run(self) -> None:
        """Place, ask, forward.

        Raises:
            ModelNotFoundError: no worker serves that model.
            NoWorkerError: none of those that do is available.
            QuotaError, OverloadedError: see `Admission.enter`.
            UpstreamError: the workers that were asked failed.
        """
        admission = self._services.admission
        stamps, now = self._context.trace.stamps, self._services.clock.now
        await self._check_prompt()
        stamps[Stamp.TOKENIZED] = now()
        full = await admission.enter(self._context, self._body, self._num_tokens, self._match)
        stamps[Stamp.DEQUEUED] = now()
        self._full = full
        budget = self._services.retries.budget
        budget.add_request()
        try:
            with self._resumption:
                await self._try_workers()
        finally:
            budget.num_requests -= 1
            if self._context.retry is not None:
                self._context.end_retry()
            admission.leave(self._context.model)
            if self._standby is not None:
                self._release_standby()

    async def _try_workers(self) -> None:
        services, resumption = self._services, self._resumption
        failover, failed = Failover(failed_modes=self._excluded_modes), None
        moved: Placement | None = None
        while failover.may_retry and not resumption.is_over:
            if failed is not None and not await self._begin_retry():
                break
            placement = moved or await self._place_in_time(failover, failed)
            num_before = self._context.num_streamed = resumption.record.num_taken
            running = self._begin_moved(moved) if moved else self._begin(placement)
            services.health_monitor.begin(placement)
            num_output_tokens = 0
            try:
                await self._attempt(placement)
            except StreamMovedError as exc:
                failed, moved, self._standby = None, exc.placement, exc.standby
                resumption.note_move(exc)
                failover.restart()
            except UpstreamError as exc:
                failed, moved = exc, None
                self._context.end_retry(has_failed=True)
                await self._note_failed(exc, placement, failover)
            else:
                num_output_tokens = self._note_answered(placement)
                return
            finally:
                running.end(
                    services.clock.now(),
                    self._context.num_streamed - num_before,
                    None if running.itl_s is None else find_itl(self._context.token_gaps),
                    num_output_tokens,
                )
                services.health_monitor.end(placement)
        if failed is not None:
            raise failed

    def _release_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.release()

    async def _begin_retry(self) -> bool:
        self._context.retry = await self._services.retries.begin()
        return self._context.retry is not None

    async def _note_failed(
        self, error: UpstreamError, placement: Placement, failover: Failover
    ) -> None:
        self._release_standby()  # it waits at the worker of this attempt, not of the next
        monitor, decode = self._services.health_monitor, placement.decode
        monitor.report(self._services.workers.with_id(decode.id), error)
        has_progressed = self._resumption.note_failure(error, decode, self._body)
        failover.record(_attempt_at(placement), _failure_of(error), has_progressed=has_progressed)
        if has_progressed:
            self._wait_ends_at = None
        if isinstance(error, ContextTooSmallError):
            self._num_known = max(self._num_known, int(decode.max_context_tokens))
        if isinstance(error, StaleTicketError):
            await monitor.refresh(error.worker)

    async def _place_in_time(self, failover: Failover, failed: UpstreamError | None) -> Placement:
        """Place it, if need be once a worker is back."""
        if failed is not None or self._context.waited_s:
            self._look_again()
        placement = self._place(failover, failed)
        while isinstance(placement, Unplaceable):
            why_not = await self._wait_for_decode(failover)
            if why_not is not None:
                self._context.end_retry(has_failed=True)
                is_final = why_not == NOT_EXPECTED or self._context.has_sent_bytes
                if failed is not None and is_final:
                    raise failed
                raise NoWorkerError(f"{placement.reason}; {why_not}") from failed
            self._look_again()
            placement = self._place(failover, failed)
        return placement

    async def _wait_for_decode(self, failover: Failover) -> str | None:
        """Wait for one of those that are away, or for one that a source may list; or why not."""
        known = self._decodes_in(self._services.workers.fleet, failover.avoid)
        away = frozenset(w.id for w in known if not w.available and not w.ejected)
        if not away and (known or not self._services.options.members):
            return NOT_EXPECTED
        failover.forgive(away)

        def is_served(fleet: Fleet) -> bool:
            decodes = self._decodes_in(fleet, failover.avoid)
            return any(w.available and w.id not in failover.avoid for w in decodes)

        return await self._wait(is_served)

    def _decodes_in(self, fleet: Fleet, avoid: frozenset[WorkerId]) -> tuple[WorkerView, ...]:
        """The workers that may answer it, available or not."""
        model = self._context.model
        served = fleet.models.get(model)
        if served is None:
            return ()
        if find_vllm_field(self._body) is not None and "vllm" not in served.decode_protocols:
            return ()
        return self._usable(fleet, avoid).models[model].decodes

    async def _wait(self, is_served: Callable[[Fleet], bool]) -> str | None:
        waiting = self._services.waiting
        if self._wait_ends_at is None:
            self._wait_ends_at = waiting.ends_at()
        return await waiting.wait(is_served, self._wait_ends_at)

    def _note_answered(self, placement: Placement) -> int:
        """What an answer shows of its worker and of caches; how many tokens it has."""
        status, workers = self._context.status or 0, self._services.workers
        worker = workers.with_id(placement.decode.id)
        is_well = status < CLIENT_ERROR and not self._is_given_up  # 4xx: the request's own fault
        if is_well and worker is not None:
            self._services.health_monitor.note_answered(worker)
        if self._body.stream:
            self._context.num_streamed = self._resumption.record.num_taken
        self._note_cached(placement)
        tail, num_streamed = self._context.tail, self._context.num_streamed
        reported = COMPLETION_TOKENS.findall(tail) if b'"completion_tokens"' in tail else None
        return int(reported[-1]) if reported else num_streamed

    def _place(self, failover: Failover, failed: UpstreamError | None) -> Placement | Unplaceable:
        context, services = self._context, self._services
        context.metrics = services.metrics.of(context.model, NO_MODE)
        fleet = services.workers.fleet
        if context.model not in fleet.models:  # its last worker came back as something else
            return Unplaceable(f"the model {context.model!r} is not served any more")
        fleet = self._usable(fleet, failover.avoid)
        request = PlacementRequest(
            context.model,
            failover.avoid,
            find_sole_field(fleet, self._body),
            num_prompt_tokens=self._num_tokens,
            at=services.clock.now(),
            cached={} if self._match is None else self._match.cached,
            stored={} if self._match is None else self._match.stored,
            failed_modes=EVERY_MODE if self._resumption.needs_no_prompt else failover.failed_modes,
            full=self._full,
            ttft_s=services.admission.ttft_left_s(context),
            tpot_s=services.admission.tpot_s(context),
            itl_s=services.admission.itl_s(context),
            is_tokenized=self._match is not None,
        )
        held = self._place_beside(fleet) if failed is None else None
        placement = held or services.placement.place(fleet, request, services.load)
        if isinstance(placement, Unplaceable):
            return placement
        if failed is not None:
            services.fallbacks.note(context, _cause_of(failed), str(failed))
        if placement.non_disaggregable is not None:
            services.metrics.non_disaggregable[placement.non_disaggregable].inc()
        elif placement.reasons:
            reasons = "; ".join(placement.reasons)
            services.fallbacks.note(context, FallbackCause.PREFILL_UNAVAILABLE, reasons)
        if placement.is_degraded:
            services.fallbacks.note(context, FallbackCause.MODE_UNUSABLE, "; ".join(placement.why))
        context.begin_attempt(placement, services.metrics.of(context.model, placement.mode))
        return placement

    async def _check_prompt(self) -> None:
        """Refuse a prompt that is certainly too long; find who has how much of it cached."""
        if self._body.model not in self._services.workers.fleet.models:
            await self._wait_for_model()
        self._match = await find_prompt(self._services, self._body)
        if self._match is not None:
            self._num_tokens = self._num_known = self._match.num_tokens

    async def _wait_for_model(self) -> None:
        """No worker serves it: wait while some are asked for the first time what they serve."""
        workers, model = self._services.workers, self._body.model

        def is_known(fleet: Fleet) -> bool:
            is_served = model in fleet.models or model in fleet.adapters
            return is_served or bool(fleet.models and not find_not_asked(workers.all))

        may_wait = not workers.fleet.models or self._services.waiting.has_much_room
        if may_wait and not is_known(workers.fleet):
            await self._wait(is_known)
            body = self._body = find_base(workers, self._body)
            self._context.model, self._context.adapter = body.model, body.adapter

    def _look_again(self) -> None:
        """Caches and loads have changed since it was admitted: it has waited, or was under way."""
        self._full = self._services.admission.find_full(self._context.model)
        if self._match is not None and self._services.prefixes is not None:
            self._match = self._services.prefixes.find_again(self._body, self._match)

    def _begin(self, placement: Placement) -> RunningRequest:
        """Count a placement in."""
        services, context, match = self._services, self._context, self._match
        context.num_cached = self._resumption.record.num_cached = None
        now, num_tokens, num_handed = services.clock.now(), self._num_tokens, self._num_tokens
        if match is not None and services.prefixes is not None:
            num_cached = match.cached.get(placement.computing.id, 0)
            num_found = num_cached + placement.num_stored_tokens
            # Of a prefix that comes from elsewhere the workers report nothing.
            context.num_predicted = None if placement.num_prefix_tokens else num_found
            num_tokens -= max(num_found, placement.num_prefix_tokens)
            num_handed = (placement.num_prefix_tokens or num_handed) - match.cached.get(
                placement.decode.id, 0
            )
            services.prefixes.expect(context.model, match, placement)
        context.running = services.load.begin(
            placement,
            num_tokens,
            now,
            num_handed,
            num_cached=self._num_tokens - num_tokens - placement.num_stored_tokens,
            waited_s=context.waited_s,
            before=context.running,
        )
        if (itl_s := services.admission.itl_s(context)) is not None:
            context.running.limit_gaps(itl_s)
        context.trace.predicted = context.running.predicted
        context.trace.stamps[Stamp.PLACED] = now  # of the last attempt, as the prediction is
        return context.running

    def _begin_moved(self, placement: Placement) -> RunningRequest:
        """Count in a stream whose KV is there already."""
        services, context = self._services, self._context
        if self._match is not None and services.prefixes is not None:
            services.prefixes.expect(context.model, self._match, placement)
        context.begin_attempt(placement, services.metrics.of(context.model, placement.mode))
        context.num_predicted = None
        context.running = services.load.begin(
            placement, REST_TOKENS, services.clock.now(), 0, before=context.running
        )
        if (itl_s := services.admission.itl_s(context)) is not None:
            context.running.limit_gaps(itl_s)
        return context.running

    def _note_cached(self, placement: Placement) -> None:
        """Compare what was predicted to be cached with what the workers have reported."""
        prefixes, context = self._services.prefixes, self._context
        if prefixes is None or context.num_predicted is None:
            return
        alone = placement.prefill is None
        actual = find_cached_tokens(context.tail) if alone else context.num_cached
        if actual is not None:
            prefixes.note_actual(context.num_predicted, actual)

    def _usable(self, fleet: Fleet, avoid: frozenset[WorkerId]) -> Fleet:
        """Without the workers that cannot serve the request, or go on with its stream."""
        serving = find_serving(fleet, self._body, self._num_known)
        return self._resumption.narrow(serving, self._body, avoid)

    def _place_beside(self, fleet: Fleet) -> Placement | None:
        wanted = self._beside
        if wanted is None:
            return None
        decodes = fleet.models[self._context.model].decodes
        for decode in decodes:
            if decode.available and decode.ref == wanted.ref:
                return Placement(None, decode, why=(f"{decode.id} holds the prompt's KV",))
        return None

    async def _attempt(self, placement: Placement) -> None:
        body = self._with_ids(self._resumption.continued(self._body, placement), placement)
        match, reports_cached = self._match, False
        if match is not None and match.incomplete:
            reports_cached = match.may_have_more((placement.prefill or placement.decode).id)
        if placement.prefill is None:
            body = body.for_report() if reports_cached else body
            headers = self._headers(self._context)
            await self._send_decode_request(placement.decode, body.encode(), headers)
            return
        prefill, decode = placement.prefill, placement.decode
        handoff = self._issue_ticket(prefill, placement)
        sealed = write_ticket(handoff.ticket, prefill, decode, self._services.options.credentials)
        bodies = request_bodies(
            body,
            sealed,
            prefill=prefill.protocol,
            decode=decode.protocol,
            num_prefix_tokens=placement.num_prefix_tokens,
            reports_cached=reports_cached,
        )
        wanted = None
        record = self._resumption.record
        if handoff.ticket.first_token_early:
            wanted = EarlyFirstToken(self._services, self._context, record, self._send)
        send_decode = partial(self._decode_with_kv, handoff, decode, bodies.decode, early=wanted)
        with Interruptible() as attempt:
            prefill_request = PrefillRequest(
                self._services, self._context, handoff, attempt, record=record, early=wanted
            )
            if placement.handoff in PREFILL_FIRST:
                await self._pull(prefill_request, bodies.prefill, send_decode)
            else:
                await self._push(prefill_request, bodies.prefill, send_decode)

    def _with_ids(self, body: CompletionBody, placement: Placement) -> CompletionBody:
        """With the token ids of a text, where all its workers would get the same ones."""
        match = self._match
        if match is None or match.token_ids is None or body.gives_ids:
            return body
        workers = (placement.prefill, placement.decode)
        if any(each is not None and each.tokenizer != match.tokenizer for each in workers):
            return body
        return replace(body, prompt_ids=msgspec.Raw(msgspec.json.encode(match.token_ids.tolist())))

    async def _push(
        self,
        prefill_request: PrefillRequest,
        body: bytes,
        send_decode: Callable[[bytes], Awaitable[None]],
    ) -> None:
        headers = self._headers(self._context)
        prefill_request.start(body, headers)
        self._context.prefill_reported = prefill_request.reported
        try:
            await send_decode(headers)
        except BaseException:
            if self._context.status is None:  # the KV may be held for nothing
                prefill_request.give_up(NO_ANSWER)
            else:
                prefill_request.cancel()
            raise
        finally:
            self._context.prefill_reported = None
        if (self._context.status or 0) >= CLIENT_ERROR:  # an answer without KV
            prefill_request.give_up(REFUSED)
        else:
            prefill_request.cancel_after_grace_period()

    async def _pull(
        self,
        prefill_request: PrefillRequest,
        body: bytes,
        send_decode: Callable[[bytes], Awaitable[None]],
    ) -> None:
        await prefill_request.hold(body, self._headers(self._context))
        try:
            await send_decode(self._headers(self._context))  # there is less time left
        except BaseException:
            prefill_request.release(NO_ANSWER)
            raise
        if (self._context.status or 0) >= CLIENT_ERROR:  # an answer without KV
            prefill_request.release(REFUSED)

    async def _decode_with_kv(
        self,
        handoff: Handoff,
        decode: WorkerView,
        body: bytes,
        headers: bytes,
        *,
        early: EarlyFirstToken | None,
    ) -> None:
        try:
            await self._send_decode_request(decode, body, headers, early)
        except WorkerFailedError as exc:
            if decode.protocol == "vllm":
                lost = await find_kv_load_failure(
                    self._services.upstream, handoff.decode, handoff.ticket
                )
                if lost is not None:
                    raise lost from exc
            raise

    async def _send_decode_request(
        self,
        decode: WorkerView,
        body: bytes,
        headers: bytes,
        early: EarlyFirstToken | None = None,
    ) -> None:
        services, context = self._services, self._context
        try:
            worker = services.workers.of(decode)
        except KeyError:  # it left after the request was placed
            raise WorkerUnreachableError(f"{decode.id} is gone") from None
        answer = ResponseForwarder(
            services, context, decode, self._send, resumption=self._resumption, early=early
        )
        url = worker.completion_urls[context.path]
        if not self._body.stream:
            with worker.cancel_scope():
                await self._forward(answer, url, body, headers)
            return
        stream = RunningStream(
            context,
            self._body,
            self._resumption,
            decode,
            self._num_tokens,
            self._match,
            self._headers,
        )
        try:
            with worker.cancel_scope(), services.streams.hold(stream):
                multiplexes = worker.multiplexes_streams
                await self._forward(answer, url, body, headers, multiplexes=multiplexes)
        except UpstreamError:
            end = find_missing_end(context, self._resumption.record)
            if end is None:
                raise
            self._is_given_up = True  # while the client takes the end of its stream
            await self._send({"type": "http.response.body", "body": end})

    async def _forward(
        self,
        answer: ResponseForwarder,
        url: URL,
        body: bytes,
        headers: bytes,
        *,
        multiplexes: bool = False,
    ) -> None:
        waiting = None if self._standby is None else await self._find_waiting()
        post = self._services.upstream.post
        response = waiting or await post(url, body, headers, multiplexes=multiplexes)
        try:
            await answer.forward(response)
        finally:
            response.release()

    async def _find_waiting(self) -> Answer | None:
        """The answer of the request that waits at this worker for the stream."""
        standby, self._standby = self._standby, None
        if standby is None:
            return None
        answer = await standby.generate()
        if answer is None:
            self._context.trace.moves.append("its standby could not be used")
        return answer

    def _issue_ticket(self, prefill: WorkerView, placement: Placement) -> Handoff:
        services, context, decode = self._services, self._context, placement.decode
        num_prefix_tokens = placement.num_prefix_tokens
        ticket = Ticket(
            id=new_ticket_id(),
            request_id=context.id,
            prefill=prefill.ref,
            decode=decode.ref,
            mode=placement.handoff,
            issue=services.ticket_issuer.issue(context.left_s(services.clock.now())),
            first_token_early=not num_prefix_tokens and self._wants_early(prefill, decode),
            tenant_salt=hash_tenant(self._body.cache_salt),
            num_prefix_tokens=num_prefix_tokens,
            distance=name_distance(prefill.topology, decode.topology),
        )
        context.trace.ticket, context.trace.distance = ticket.id.hex(), ticket.distance or None
        if placement.num_split_tokens:
            services.metrics.split_prompts.inc()
        workers = services.workers
        return Handoff(ticket, prefill.protocol, workers.of(prefill), workers.of(decode))

    def _wants_early(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Only between Baton workers: vLLM agrees on no first token."""
        both_ours = prefill.protocol == decode.protocol == "baton"
        is_wanted = self._body.stream and not self._context.has_sent_bytes
        return self._services.options.first_token_early and is_wanted and both_ours

    def _headers(self, context: RequestContext) -> bytes:
        """What is the request's own, or a part's, in the head of workers' requests."""
        left_s = context.left_s(self._services.clock.now())
        own = f"{CREATED_HEADER}: {self._created}\r\n{TIMEOUT_HEADER}: {left_s:.3f}\r\n"
        if self._body.stream:
            own += self._resumption.headers
        return context.headers_to_workers + own.encode("ascii")


_CAUSES: Final[dict[type[UpstreamError], FallbackCause]] = {
    StaleTicketError: FallbackCause.STALE_TICKET,
    KVLostError: FallbackCause.HANDOFF_FAILED,
    TicketRefusedError: FallbackCause.TICKET_REFUSED,
    ContextTooSmallError: FallbackCause.CONTEXT_TOO_SMALL,
    WorkerUnreachableError: FallbackCause.DECODE_UNREACHABLE,
    WorkerLostError: FallbackCause.DECODE_LOST,
}


_MODE_FAILURES: Final = frozenset({
    FallbackCause.PREFILL_OVERLOADED,
    FallbackCause.HANDOFF_FAILED,
})


def _failure_of(error: UpstreamError) -> Failure:
    """What failover must know of an error."""
    match error:
        case PrefillFailedError(cause=FallbackCause.PREFILL_REJECTED):
            return Failure.PREFILL_REJECTED
        case PrefillFailedError(cause=cause) if cause in _MODE_FAILURES:
            return Failure.MODE_FAILED
        case PrefillFailedError():
            return Failure.PREFILL_FAILED
        case StaleTicketError():
            return Failure.STALE_TICKET
        case TicketRefusedError():
            return Failure.TICKET_REFUSED
        case KVLostError():
            return Failure.KV_LOST
        case _:
            return Failure.DECODE_FAILED


def _attempt_at(placement: Placement) -> Attempt:
    prefill = placement.prefill
    if prefill is None:
        return Attempt(placement.decode.id)
    return Attempt(placement.decode.id, prefill.id, placement.handoff)


def _cause_of(error: UpstreamError) -> FallbackCause:
    if isinstance(error, PrefillFailedError):
        return error.cause
    return _CAUSES.get(type(error), FallbackCause.DECODE_FAILED)
