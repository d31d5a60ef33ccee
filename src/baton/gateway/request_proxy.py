"""One request and its two legs: placed, asked, and placed again if that can still help.

Both legs are asked at once, but in modes pull and pool: there the KV waits at the prefill worker,
or in the store, until the decode worker, asked second, has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, get_args

from baton.auth.ticket import HandoffMode, Ticket, hash_tenant, seal
from baton.gateway.early_first_token import CREATED_HEADER, EarlyFirstToken
from baton.gateway.errors import (
    KVLostError,
    NoWorkerError,
    PrefillFailedError,
    StaleTicketError,
    UpstreamError,
    WorkerFailedError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.interruptible import Interruptible
from baton.gateway.kv_load_failure import find_kv_load_failure
from baton.gateway.metrics import NO_MODE, FallbackCause
from baton.gateway.non_disaggregable import find_non_disaggregable_field
from baton.gateway.prefill_request import Handoff, PrefillRequest
from baton.gateway.prompt_estimate import estimate_prompt_tokens
from baton.gateway.request_bodies import request_bodies
from baton.gateway.response_forwarder import ResponseForwarder
from baton.ids import new_ticket_id
from baton.router.placement import Placement, PlacementRequest, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from multidict import CIMultiDict
    from starlette.types import Send

    from baton.gateway.request import CompletionBody
    from baton.gateway.request_context import RequestContext
    from baton.gateway.services import Services
    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView

MAX_ATTEMPTS: Final = 2
MAX_PREFILL_FAILURES: Final = 2
"""Of prefill workers that are asked first: then decode computes the prompt."""

_PREFILL_FIRST: Final[frozenset[HandoffMode]] = frozenset({"pull", "pool"})
"""Decode is asked once KV is held for it, or kept in the store: until then it needs no blocks."""

EVERY_MODE: Final[frozenset[HandoffMode]] = frozenset(get_args(HandoffMode))


@dataclass(slots=True)
class _FailoverState:
    """What was tried for one request, and failed."""

    failed: UpstreamError | None = None
    num_left: int = MAX_ATTEMPTS
    num_prefill_failures: int = 0
    avoid: frozenset[WorkerId] = frozenset()
    failed_modes: frozenset[HandoffMode] = frozenset()

    def note(self, placement: Placement, error: UpstreamError) -> None:
        """An attempt failed: do not repeat what made it fail."""
        self.failed = error
        match error:
            case PrefillFailedError(cause=cause):
                self._note_prefill(placement, cause)
            case StaleTicketError():
                self.num_left -= 1
            case KVLostError():  # the same worker may compute it all
                self.num_left -= 1
                self.failed_modes = EVERY_MODE
            case _:
                self.num_left -= 1
                self.avoid |= {placement.decode.id}

    def _note_prefill(self, placement: Placement, cause: FallbackCause) -> None:
        self.num_prefill_failures += 1
        if self.num_prefill_failures >= MAX_PREFILL_FAILURES or cause is _REJECTED:
            self.failed_modes = EVERY_MODE
        elif cause in _EXCLUDES_MODE:
            self.failed_modes |= {placement.handoff}
        elif placement.prefill is not None:
            self.avoid |= {placement.prefill.id}


class RequestProxy:
    """Serves one parsed request. Once a part of an answer has left, nothing is tried again."""

    def __init__(
        self, services: Services, context: RequestContext, body: CompletionBody, send: Send
    ) -> None:
        self._services, self._context, self._body, self._send = services, context, body, send
        self._created = str(int(services.clock.unix_now()))

    async def run(self) -> None:
        """Place, ask, forward.

        Raises:
            ModelNotFoundError: no worker serves that model.
            NoWorkerError: none of those that do is available.
            UpstreamError: the workers that were asked failed.
        """
        failover = _FailoverState()
        while failover.num_left and not self._context.has_sent_bytes:
            placement = self._place(failover)
            try:
                await self._attempt(placement)
            except UpstreamError as exc:
                failover.note(placement, exc)
                if isinstance(exc, StaleTicketError):
                    await self._services.health_monitor.refresh(exc.worker)
            else:
                return
        if failover.failed is not None:
            raise failover.failed

    def _place(self, failover: _FailoverState) -> Placement:
        context, services, failed = self._context, self._services, failover.failed
        fleet = services.workers.fleet
        if context.model not in fleet.models:
            raise services.workers.why_not_served(context.model)
        context.metrics = services.metrics.of(context.model, NO_MODE)
        speaks_vllm = "vllm" in fleet.models[context.model].decode_protocols
        non_disaggregable = find_non_disaggregable_field(self._body) if speaks_vllm else None
        request = PlacementRequest(
            context.model,
            failover.avoid,
            non_disaggregable,
            num_prompt_tokens=estimate_prompt_tokens(self._body),
            failed_modes=failover.failed_modes,
        )
        placement = services.placement.place(fleet, request)
        if isinstance(placement, Unplaceable):
            raise failed or NoWorkerError(placement.reason)
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

    async def _attempt(self, placement: Placement) -> None:
        if placement.prefill is None:
            await self._send_decode_request(placement.decode, self._body.encode())
            return
        prefill, decode = placement.prefill, placement.decode
        handoff = self._issue_ticket(prefill, decode, placement.handoff)
        sealed = seal(handoff.ticket, self._services.options.cluster_key)
        bodies = request_bodies(
            self._body, sealed, prefill=prefill.protocol, decode=decode.protocol
        )
        early = EarlyFirstToken(self._services, self._context, self._send)
        wanted = early if handoff.ticket.first_token_early else None
        send_decode = partial(self._decode_with_kv, handoff, decode, bodies.decode, wanted)
        with Interruptible() as attempt:
            prefill_request = PrefillRequest(
                self._services, self._context, handoff, attempt, early=wanted
            )
            if placement.handoff in _PREFILL_FIRST:
                await self._pull(prefill_request, bodies.prefill, send_decode)
            else:
                await self._push(prefill_request, bodies.prefill, send_decode)

    async def _push(
        self,
        prefill_request: PrefillRequest,
        body: bytes,
        send_decode: Callable[[], Awaitable[None]],
    ) -> None:
        prefill_request.start(body, self._headers())
        try:
            await send_decode()
        except BaseException:
            prefill_request.cancel()
            raise
        prefill_request.cancel_after_grace_period()

    async def _pull(
        self,
        prefill_request: PrefillRequest,
        body: bytes,
        send_decode: Callable[[], Awaitable[None]],
    ) -> None:
        await prefill_request.hold(body, self._headers())
        try:
            await send_decode()
        except BaseException:
            prefill_request.release("the decode worker's answer did not come")
            raise

    async def _decode_with_kv(
        self, handoff: Handoff, decode: WorkerView, body: bytes, early: EarlyFirstToken | None
    ) -> None:
        try:
            await self._send_decode_request(decode, body, early)
        except WorkerFailedError as exc:
            if decode.protocol == "vllm":
                lost = await find_kv_load_failure(
                    self._services.upstream, handoff.decode, handoff.ticket
                )
                if lost is not None:
                    raise lost from exc
            raise

    async def _send_decode_request(
        self, decode: WorkerView, body: bytes, early: EarlyFirstToken | None = None
    ) -> None:
        services, context = self._services, self._context
        worker = services.workers.of(decode)
        try:
            with worker.cancel_scope():
                response = await services.upstream.post(
                    worker.completion_urls[context.path], body, self._headers()
                )
                try:
                    answer = ResponseForwarder(services, context, decode, self._send, early=early)
                    await answer.forward(response)
                finally:
                    response.release()
        except UpstreamError as exc:
            services.health_monitor.report(worker, exc)
            raise

    def _issue_ticket(self, prefill: WorkerView, decode: WorkerView, mode: HandoffMode) -> Handoff:
        services, context = self._services, self._context
        ticket = Ticket(
            id=new_ticket_id(),
            request_id=context.id,
            prefill=prefill.ref,
            decode=decode.ref,
            mode=mode,
            expires_at=services.clock.unix_now() + context.left_s(services.clock.now()),
            first_token_early=self._wants_early(prefill, decode),
            tenant_salt=hash_tenant(self._body.cache_salt),
        )
        context.trace.ticket = ticket.id.hex()
        workers = services.workers
        return Handoff(ticket, prefill.protocol, workers.of(prefill), workers.of(decode))

    def _wants_early(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Only between Baton workers: of vLLM nobody can demand that it go on from a token."""
        both_ours = prefill.protocol == decode.protocol == "baton"
        return self._services.options.first_token_early and self._body.stream and both_ours

    def _headers(self) -> CIMultiDict[str]:
        headers = self._services.upstream.headers()
        headers.update(self._context.forwarded_headers)
        headers["x-request-id"] = self._context.id
        headers[CREATED_HEADER] = self._created
        headers["x-baton-timeout-s"] = f"{self._context.left_s(self._services.clock.now()):.3f}"
        return headers


_CAUSES: Final[dict[type[UpstreamError], FallbackCause]] = {
    StaleTicketError: FallbackCause.STALE_TICKET,
    KVLostError: FallbackCause.HANDOFF_FAILED,
    WorkerUnreachableError: FallbackCause.DECODE_UNREACHABLE,
    WorkerLostError: FallbackCause.DECODE_LOST,
}


_REJECTED: Final = FallbackCause.PREFILL_REJECTED
_EXCLUDES_MODE: Final = {FallbackCause.PREFILL_OVERLOADED, FallbackCause.HANDOFF_FAILED}


def _cause_of(error: UpstreamError) -> FallbackCause:
    if isinstance(error, PrefillFailedError):
        return error.cause
    return _CAUSES.get(type(error), FallbackCause.DECODE_FAILED)
