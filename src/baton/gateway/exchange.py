"""One request and its two legs: placed, asked, and placed again if that can still help.

Both legs are asked at once, but in modes pull and pool: there the KV waits at the prefill worker,
or in the store, until the decode worker, asked second, has room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, get_args

from baton.authority.ticket import HandoffMode, Ticket, name_tenant, seal
from baton.gateway.answer import Answer
from baton.gateway.early_start import CREATED_HEADER, EarlyStart
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
from baton.gateway.interrupt import Interruptible
from baton.gateway.leg_bodies import leg_bodies
from baton.gateway.lost_kv import find_lost_kv
from baton.gateway.metrics import NO_MODE, FallbackCause
from baton.gateway.prefill_leg import Handoff, PrefillLeg
from baton.gateway.prompt_size import estimate_prompt_tokens
from baton.gateway.undivided import undivided_field
from baton.ids import new_ticket_id
from baton.router.placement import Placement, PlacementRequest, Unplaceable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from multidict import CIMultiDict
    from starlette.types import Send

    from baton.gateway.call import Call
    from baton.gateway.request import CompletionBody
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
class _History:
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
        elif cause in _SPOILS_THE_MODE:
            self.failed_modes |= {placement.handoff}
        elif placement.prefill is not None:
            self.avoid |= {placement.prefill.id}


class Exchange:
    """Serves one parsed request. Once a part of an answer has left, nothing is tried again."""

    def __init__(self, services: Services, call: Call, body: CompletionBody, send: Send) -> None:
        self._services, self._call, self._body, self._send = services, call, body, send
        self._created = str(int(services.clock.unix_now()))

    async def run(self) -> None:
        """Place, ask, forward.

        Raises:
            ModelNotFoundError: no worker serves that model.
            NoWorkerError: none of those that do is available.
            UpstreamError: the workers that were asked failed.
        """
        history = _History()
        while history.num_left and not self._call.answering:
            placement = self._place(history)
            try:
                await self._attempt(placement)
            except UpstreamError as exc:
                history.note(placement, exc)
                if isinstance(exc, StaleTicketError):
                    await self._services.watch.refresh(exc.worker)
            else:
                return
        if history.failed is not None:
            raise history.failed

    def _place(self, history: _History) -> Placement:
        call, services, failed = self._call, self._services, history.failed
        fleet = services.workers.fleet
        if call.model not in fleet.models:
            raise services.workers.why_not_served(call.model)
        call.metrics = services.metrics.of(call.model, NO_MODE)
        speaks_vllm = "vllm" in fleet.models[call.model].decode_dialects
        undivided = undivided_field(self._body) if speaks_vllm else None
        request = PlacementRequest(
            call.model,
            history.avoid,
            undivided,
            num_prompt_tokens=estimate_prompt_tokens(self._body),
            failed_modes=history.failed_modes,
        )
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
        if placement.is_degraded:
            services.fallbacks.note(call, FallbackCause.MODE_UNUSABLE, "; ".join(placement.why))
        call.begin_attempt(placement, services.metrics.of(call.model, placement.mode))
        return placement

    async def _attempt(self, placement: Placement) -> None:
        if placement.prefill is None:
            await self._decode_leg(placement.decode, self._body.encode())
            return
        prefill, decode = placement.prefill, placement.decode
        handoff = self._authorise(prefill, decode, placement.handoff)
        sealed = seal(handoff.ticket, self._services.options.cluster_key)
        bodies = leg_bodies(self._body, sealed, prefill=prefill.dialect, decode=decode.dialect)
        early = EarlyStart(self._services, self._call, self._send)
        wanted = early if handoff.ticket.first_token_early else None
        answering = partial(self._decode_with_kv, handoff, decode, bodies.decode, wanted)
        with Interruptible() as attempt:
            leg = PrefillLeg(self._services, self._call, handoff, attempt, early=wanted)
            if placement.handoff in _PREFILL_FIRST:
                await self._pull(leg, bodies.prefill, answering)
            else:
                await self._push(leg, bodies.prefill, answering)

    async def _push(
        self, prefill_leg: PrefillLeg, body: bytes, answering: Callable[[], Awaitable[None]]
    ) -> None:
        prefill_leg.start(body, self._headers())
        try:
            await answering()
        except BaseException:
            prefill_leg.cancel()
            raise
        prefill_leg.linger()

    async def _pull(
        self, prefill_leg: PrefillLeg, body: bytes, answering: Callable[[], Awaitable[None]]
    ) -> None:
        await prefill_leg.hold(body, self._headers())
        try:
            await answering()
        except BaseException:
            prefill_leg.release("the decode worker's answer did not come")
            raise

    async def _decode_with_kv(
        self, handoff: Handoff, decode: WorkerView, body: bytes, early: EarlyStart | None
    ) -> None:
        try:
            await self._decode_leg(decode, body, early)
        except WorkerFailedError as exc:
            if decode.dialect == "vllm":
                lost = await find_lost_kv(self._services.upstream, handoff.decode, handoff.ticket)
                if lost is not None:
                    raise lost from exc
            raise

    async def _decode_leg(
        self, decode: WorkerView, body: bytes, early: EarlyStart | None = None
    ) -> None:
        services, call = self._services, self._call
        worker = services.workers.of(decode)
        try:
            with worker.attended():
                response = await services.upstream.post(
                    worker.completion_urls[call.path], body, self._headers()
                )
                try:
                    answer = Answer(services, call, decode, self._send, early=early)
                    await answer.forward(response)
                finally:
                    response.release()
        except UpstreamError as exc:
            services.watch.report(worker, exc)
            raise

    def _authorise(self, prefill: WorkerView, decode: WorkerView, mode: HandoffMode) -> Handoff:
        services, call = self._services, self._call
        ticket = Ticket(
            id=new_ticket_id(),
            request_id=call.id,
            prefill=prefill.ref,
            decode=decode.ref,
            mode=mode,
            expires_at=services.clock.unix_now() + call.left_s(services.clock.now()),
            first_token_early=self._wants_early(prefill, decode),
            tenant_salt=name_tenant(self._body.cache_salt),
        )
        call.trace.ticket = ticket.id.hex()
        workers = services.workers
        return Handoff(ticket, prefill.dialect, workers.of(prefill), workers.of(decode))

    def _wants_early(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Only between Baton workers: of vLLM nobody can demand that it go on from a token."""
        both_ours = prefill.dialect == decode.dialect == "baton"
        return self._services.options.first_token_early and self._body.stream and both_ours

    def _headers(self) -> CIMultiDict[str]:
        headers = self._services.upstream.headers()
        headers.update(self._call.forwarded_headers)
        headers["x-request-id"] = self._call.id
        headers[CREATED_HEADER] = self._created
        headers["x-baton-timeout-s"] = f"{self._call.left_s(self._services.clock.now()):.3f}"
        return headers


_CAUSES: Final[dict[type[UpstreamError], FallbackCause]] = {
    StaleTicketError: FallbackCause.STALE_TICKET,
    KVLostError: FallbackCause.HANDOFF_FAILED,
    WorkerUnreachableError: FallbackCause.DECODE_UNREACHABLE,
    WorkerLostError: FallbackCause.DECODE_LOST,
}


_REJECTED: Final = FallbackCause.PREFILL_REJECTED
_SPOILS_THE_MODE: Final = {FallbackCause.PREFILL_OVERLOADED, FallbackCause.HANDOFF_FAILED}


def _cause_of(error: UpstreamError) -> FallbackCause:
    if isinstance(error, PrefillFailedError):
        return error.cause
    return _CAUSES.get(type(error), FallbackCause.DECODE_FAILED)
