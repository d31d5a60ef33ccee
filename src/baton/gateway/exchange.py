"""One request and its two legs: placed, asked at once, and placed again if that can still help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.authority.ticket import Ticket, name_tenant, seal
from baton.gateway.answer import Answer
from baton.gateway.errors import (
    NoWorkerError,
    StaleTicketError,
    UpstreamError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.interrupt import Interruptible
from baton.gateway.leg_bodies import leg_bodies
from baton.gateway.metrics import NO_MODE, FallbackCause
from baton.gateway.prefill_leg import Handoff, PrefillLeg
from baton.gateway.undivided import undivided_field
from baton.ids import new_ticket_id
from baton.router.placement import Placement, PlacementRequest, Unplaceable

if TYPE_CHECKING:
    from multidict import CIMultiDict
    from starlette.types import Send

    from baton.gateway.call import Call
    from baton.gateway.request import CompletionBody
    from baton.gateway.services import Services
    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView

MAX_ATTEMPTS: Final = 2


class Exchange:
    """Serves one parsed request. Once a part of an answer has left, nothing is tried again."""

    def __init__(self, services: Services, call: Call, body: CompletionBody, send: Send) -> None:
        self._services, self._call, self._body, self._send = services, call, body, send

    async def run(self) -> None:
        """Place, ask, forward.

        Raises:
            ModelNotFoundError: no worker serves that model.
            NoWorkerError: none of those that do is available.
            UpstreamError: the workers that were asked failed.
        """
        failed: UpstreamError | None = None
        avoid: frozenset[WorkerId] = frozenset()
        for _ in range(MAX_ATTEMPTS):
            placement = self._place(avoid, failed)
            try:
                await self._attempt(placement)
            except StaleTicketError as exc:
                failed = exc
                await self._services.watch.refresh(exc.worker)
            except UpstreamError as exc:
                failed = exc
                avoid |= {placement.decode.id}
            else:
                return
            if self._call.answering:
                break
        if failed is not None:
            raise failed

    def _place(self, avoid: frozenset[WorkerId], failed: UpstreamError | None) -> Placement:
        call, services = self._call, self._services
        fleet = services.workers.fleet
        if call.model not in fleet.models:
            raise services.workers.why_not_served(call.model)
        call.metrics = services.metrics.of(call.model, NO_MODE)
        speaks_vllm = "vllm" in fleet.models[call.model].decode_dialects
        undivided = undivided_field(self._body) if speaks_vllm else None
        request = PlacementRequest(call.model, avoid, undivided)
        placement = services.placement.place(fleet, request)
        if isinstance(placement, Unplaceable):
            raise failed or NoWorkerError(placement.reason)
        if failed is not None:
            services.fallbacks.note(call, _cause_of(failed), str(failed))
        if placement.undivided is not None:
            services.metrics.undivided[placement.undivided].inc()
        elif placement.reasons:
            reasons = "; ".join(placement.reasons)
            services.fallbacks.note(call, FallbackCause.PREFILL_UNAVAILABLE, reasons)
        call.begin_attempt(placement, services.metrics.of(call.model, placement.mode))
        return placement

    async def _attempt(self, placement: Placement) -> None:
        if placement.prefill is None:
            await self._decode_leg(placement.decode, self._body.encode())
            return
        prefill, decode = placement.prefill, placement.decode
        handoff = self._authorise(prefill, decode)
        sealed = seal(handoff.ticket, self._services.options.cluster_key)
        bodies = leg_bodies(self._body, sealed, prefill=prefill.dialect, decode=decode.dialect)
        with Interruptible() as attempt:
            prefill_leg = PrefillLeg(self._services, self._call, handoff, attempt)
            prefill_leg.start(bodies.prefill, self._headers())
            try:
                await self._decode_leg(decode, bodies.decode)
            except BaseException:
                prefill_leg.cancel()
                raise
            prefill_leg.linger()

    async def _decode_leg(self, decode: WorkerView, body: bytes) -> None:
        services, call = self._services, self._call
        worker = services.workers.of(decode)
        try:
            with worker.attended():
                response = await services.upstream.post(
                    worker.completion_urls[call.path], body, self._headers()
                )
                try:
                    await Answer(services, call, decode, self._send).forward(response)
                finally:
                    response.release()
        except UpstreamError as exc:
            services.watch.report(worker, exc)
            raise

    def _authorise(self, prefill: WorkerView, decode: WorkerView) -> Handoff:
        services, call = self._services, self._call
        ticket = Ticket(
            id=new_ticket_id(),
            request_id=call.id,
            prefill=prefill.ref,
            decode=decode.ref,
            mode="push",
            expires_at=services.clock.unix_now() + call.left_s(services.clock.now()),
            tenant_salt=name_tenant(self._body.cache_salt),
        )
        call.trace.ticket = ticket.id.hex()
        workers = services.workers
        return Handoff(ticket, prefill.dialect, workers.of(prefill), workers.of(decode))

    def _headers(self) -> CIMultiDict[str]:
        headers = self._services.upstream.headers()
        headers.update(self._call.forwarded_headers)
        headers["x-request-id"] = self._call.id
        headers["x-baton-timeout-s"] = f"{self._call.left_s(self._services.clock.now()):.3f}"
        return headers


_CAUSES: Final[dict[type[UpstreamError], FallbackCause]] = {
    StaleTicketError: FallbackCause.STALE_TICKET,
    WorkerUnreachableError: FallbackCause.DECODE_UNREACHABLE,
    WorkerLostError: FallbackCause.DECODE_LOST,
}


def _cause_of(error: UpstreamError) -> FallbackCause:
    return _CAUSES.get(type(error), FallbackCause.DECODE_FAILED)
