"""Requests wait here, rather than in an engine, until the workers can use them.

Where there is room and no request waits, a request passes with a look at the workers: no task, no
future. Else it is queued (`baton.router.admission`), and leaves the queue when a request before it
ends, when its client leaves, or when it would begin too late.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, OverloadedError
from baton.gateway.errors import QuotaError
from baton.gateway.targets import PRIORITY_HEADER, TTFT_HEADER
from baton.router.admission import AdmissionQueue, QueueLimits, Refusal
from baton.router.fair_queue import QueuedRequest, RefusalCause, lower
from baton.router.load import TYPICAL_ANSWER_TOKENS, FleetLoad
from baton.router.room import UNLIMITED, FleetRoom, Room

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Clock
    from baton.gateway.metrics import GatewayMetrics
    from baton.gateway.options import GatewayOptions
    from baton.gateway.request import CompletionBody
    from baton.gateway.request_context import RequestContext
    from baton.gateway.waiting import WaitingRequests
    from baton.ids import WorkerId
    from baton.router.prefixes import PromptMatch

TICK_S: Final = 0.1
"""While requests wait: how often the workers are looked at though none has ended."""
BEGINS_WITHIN: Final = 0.9
"""Of the time until its deadline: what begins later would hardly be complete."""

_count_decoder = msgspec.json.Decoder(int | None)


class Admission:
    """Owner: the event loop's thread."""

    def __init__(
        self,
        options: GatewayOptions,
        clock: Clock,
        metrics: GatewayMetrics,
        *,
        waiting: WaitingRequests,
        load: FleetLoad,
        room: FleetRoom,
    ) -> None:
        self._options, self._clock, self._metrics = options, clock, metrics.queue
        self._waiting, self._workers = waiting, waiting.workers
        self._load, self._room = load, room
        self.queue = AdmissionQueue(
            QueueLimits(
                options.max_queued_requests,
                options.max_queued_tokens,
                options.max_queued_per_tenant,
            )
        )
        self.num_running: Counter[str] = Counter()
        self._num_admitted: Counter[str] = Counter()  # of them, by a task that has not run since
        self._outcomes: dict[QueuedRequest, asyncio.Future[Refusal | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        metrics.queue.show(self.queue.count)

    async def enter(
        self,
        context: RequestContext,
        body: CompletionBody,
        num_tokens: int,
        match: PromptMatch | None,
    ) -> frozenset[WorkerId]:
        """Return when workers can use a request, and which are full; then `leave` must follow.

        Raises:
            QuotaError: its tenant has more than its share waiting, and there is no room for it, or
                it would begin too late.
            OverloadedError: the same, whoever waits.
        """
        model = context.model
        if not self.queue.is_waiting(model):
            room = self._look(model)
            if room.num_free > self._num_admitted[model]:
                self.num_running[model] += 1
                return room.full
        await self._wait(context, self._make_request(context, body, num_tokens, match))
        return self._look(model).full

    def find_full(self, model: str) -> frozenset[WorkerId]:
        """The workers of a model that have no room for a request more."""
        return self._look(model).full

    def leave(self, model: str) -> None:
        """A request that entered is over."""
        self.num_running[model] -= 1
        if self.queue.is_waiting(model):
            self._admit(model)

    def tpot_s(self, context: RequestContext) -> float | None:
        """What a request is to take for each token; None: nothing is named."""
        named = (context.whole or context).targets.tpot_s
        return named or context.model_targets.tpot_s

    def itl_s(self, context: RequestContext) -> float | None:
        """What the gaps between its tokens are to take at most; None: nothing is named."""
        named = (context.whole or context).targets.itl_s
        return named or context.model_targets.itl_s

    def ttft_left_s(self, context: RequestContext) -> float | None:
        """Until its first token is to come, or a tenth of that; None: nothing is named."""
        ttft_s = self._ttft_s(context)
        if ttft_s is None:
            return None
        elapsed_s = self._clock.now() - (context.whole or context).received_at
        return max(0.1 * ttft_s, ttft_s - elapsed_s)

    def _ttft_s(self, context: RequestContext) -> float | None:
        named = (context.whole or context).targets.ttft_s
        return named or context.model_targets.ttft_s

    def _look(self, model: str) -> Room:
        served = self._workers.fleet.models.get(model)
        if served is None:
            return UNLIMITED
        now, targets = self._clock.now(), self._options.targets_of(model)
        num_running, tpot_s, itl_s = self.num_running[model], targets.tpot_s, targets.itl_s
        return self._room.look(served, now, num_running, tpot_s=tpot_s, itl_s=itl_s)

    def _make_request(
        self,
        context: RequestContext,
        body: CompletionBody,
        num_tokens: int,
        match: PromptMatch | None,
    ) -> QueuedRequest:
        whole = context.whole or context
        client, received_at = whole.client, whole.received_at
        named = whole.targets.priority
        limit_s, target_at = whole.deadline - received_at, inf
        if body.stream:
            limit_s = min(limit_s, self._options.first_byte_timeout_s)
        ttft_s = self._ttft_s(context)
        if ttft_s is not None and (whole is context or whole.placement is None):
            takes_s = self._predict_s(context.model, num_tokens, _count_found(match))
            target_at = received_at + ttft_s - takes_s
        return QueuedRequest(
            context.model,
            client.tenant,
            client.priority if named is None else lower(client.priority, named),
            num_tokens + _expected_answer(body),
            at=self._clock.now(),
            weight=client.weight,
            target_at=target_at,
            deadline_at=received_at + BEGINS_WITHIN * limit_s,
        )

    def _predict_s(self, model: str, num_tokens: int, num_found: int) -> float:
        """What a prompt takes by itself behind what is found of it, as far as that is known."""
        prefill = self._load.costs(model).prefill
        return prefill.predict(num_tokens - num_found, num_found) if prefill.num_seen else 0.0

    async def _wait(self, context: RequestContext, request: QueuedRequest) -> None:
        queue, metrics = self.queue, self._metrics
        displaced = queue.offer(request, request.at)
        if isinstance(displaced, Refusal):
            metrics.refused[displaced.cause].inc()
            raise self._explain(displaced, request)
        self._end(displaced)
        loop = asyncio.get_running_loop()
        outcome = self._outcomes[request] = loop.create_future()
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._tick)
        try:
            refusal = await outcome
        except asyncio.CancelledError:
            if outcome.cancelled():
                queue.leave(request, self._clock.now())
            elif outcome.result() is None:
                self._num_admitted[request.model] -= 1
                self.leave(request.model)
            raise
        finally:
            del self._outcomes[request]
            context.note_waited(self._clock.now() - request.at)
        if refusal is not None:
            raise self._explain(refusal, request)
        self._num_admitted[request.model] -= 1
        metrics.wait[request.priority].observe(context.waited_s)

    def _admit(self, model: str) -> None:
        """Admit those that the workers can use, a few at a time: where they go is not known yet."""
        room, now = self._look(model), self._clock.now()
        served = self._workers.fleet.models.get(model)
        most = self.queue.num_requests if served is None else max(1, len(served.decodes))
        decodes = () if served is None else served.decodes
        num_free = room.num_free
        if decodes and not any(each.available or each.ejected for each in decodes):
            num_free = self._waiting.num_free  # they are to wait there until a worker is back
        num_free = min(num_free - self._num_admitted[model], most)
        num_admitted = 0
        while num_admitted < num_free and (request := self.queue.take(model, now)) is not None:
            outcome = self._outcomes[request]
            if not outcome.done():  # else its client has just left
                outcome.set_result(None)
                num_admitted += 1
        self.num_running[model] += num_admitted
        self._num_admitted[model] += num_admitted
        if num_admitted and self.queue.is_waiting(model):
            # When those that were admitted have begun.
            asyncio.get_running_loop().call_soon(self._admit, model)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._end(self.queue.expire(self._clock.now()))
            for model in self.queue.models():
                self._admit(model)
        finally:
            if self.queue.num_requests:
                self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _end(self, ended: Iterable[tuple[QueuedRequest, Refusal]]) -> None:
        for request, refusal in ended:
            outcome = self._outcomes[request]
            if not outcome.done():
                self._metrics.expired[refusal.cause].inc()
                outcome.set_result(refusal)

    def _explain(self, refusal: Refusal, request: QueuedRequest) -> QuotaError | OverloadedError:
        why = _REASONS[refusal.cause]
        if refusal.wait_s is not None:
            why += f" (a wait of {refusal.wait_s:.1f} s is predicted)"
        if refusal.is_tenants:
            return QuotaError(
                f"{why}, and requests of this client's tenant wait already: send fewer at once, "
                "or try again later",
                retry_after_s=refusal.retry_after_s,
            )
        advice = f"; try again later, or with a larger {TTFT_HEADER}"
        if refusal.cause is not RefusalCause.TARGET:
            advice = "; try again later"
        if request.priority == "low":
            advice += f", or without {PRIORITY_HEADER}"
        return OverloadedError(why + advice, retry_after_s=refusal.retry_after_s)


_REASONS: Final = {
    RefusalCause.QUEUE_FULL: "all workers are busy, and the gateway's queue is full",
    RefusalCause.TENANT_FULL: "all workers are busy, and gateway.max_queued_per_tenant is reached",
    RefusalCause.DISPLACED: "all workers are busy, the queue is full, and others go first",
    RefusalCause.TARGET: "the workers are too busy for a first token within the request's target",
    RefusalCause.DEADLINE: "the workers are too busy to begin before the request's deadline",
}


def _count_found(match: PromptMatch | None) -> int:
    """Tokens of a prompt that some worker has, or can load."""
    if match is None:
        return 0
    return max((*match.cached.values(), *match.stored.values()), default=0)


def _expected_answer(body: CompletionBody) -> int:
    """Tokens of an answer: as many as are usual, unless the client wants fewer."""
    for name in ("max_completion_tokens", "max_tokens"):
        try:
            most: int | None = _count_decoder.decode(body.fields.get(name, b"null"))
        except UNDECODABLE:
            continue  # its worker refuses it
        if most is not None:
            return max(1, min(most, TYPICAL_ANSWER_TOKENS))
    return TYPICAL_ANSWER_TOKENS
