"""The prefill worker's part of a request, beside the decode worker's.

Its answer is of no interest to the client: the KV reaches the decode worker without us. What
matters is its failure, which the decode worker must learn at once, so that it recomputes instead of
waiting for KV that will not come. In mode pull it is asked before the decode worker is.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from baton.gateway.errors import (
    OK,
    PrefillFailedError,
    StaleTicketError,
    UpstreamError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.fallbacks import FallbackCause
from baton.gateway.metrics import Phase
from baton.gateway.protocol_adapters import (
    PrefillDone,
    PrefillFailed,
    PrefillResult,
    TicketStale,
    read_prefill_result,
)
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES
from baton.record import Record
from baton.router.failover import ABORT_RETRY_DELAYS_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from yarl import URL

    from baton.auth.ticket import Ticket
    from baton.gateway.http_client import Answer
    from baton.gateway.interruptible import Interruptible
    from baton.gateway.request_context import RequestContext, Services
    from baton.gateway.response_forwarder import EarlyFirstToken
    from baton.gateway.stream_record import StreamRecord
    from baton.gateway.workers import Worker
    from baton.protocol.worker_http import FirstToken, WorkerProtocol

log = logging.getLogger(__name__)

REPORT_WAIT_S: Final = 0.25
"""How long a whole answer waits for the number of tokens that prefill had cached."""
NO_ANSWER: Final = "the decode worker's answer did not come"


class Handoff(Record, frozen=True):
    """One ticket, and the two workers that it is for. The prefill worker speaks `protocol`."""

    ticket: Ticket
    protocol: WorkerProtocol
    prefill: Worker
    decode: Worker


class PrefillRequest:
    """Asks the prefill worker, beside the request's task: only failures need a task of their own.

    `attempt` is interrupted when placing the request again is better than recomputing. `record` is
    the stream's, whose usage shows what was cached here. `early` is sent the first token, where by
    the ticket the client gets it from here.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        handoff: Handoff,
        attempt: Interruptible,
        *,
        record: StreamRecord,
        early: EarlyFirstToken | None = None,
    ) -> None:
        self._services, self._context, self._handoff = services, context, handoff
        self._attempt, self._record, self._early = attempt, record, early
        self._task: asyncio.Task[None] | None = None
        self._answer: Answer | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    def start(self, body: bytes, headers: bytes) -> None:
        """Ask."""
        self._answer = self._services.upstream.try_post(self._url, body, headers)
        if self._answer is None:
            self._task = asyncio.create_task(self._run(partial(self._ask, body, headers)))
        else:
            self._answer.on_end = self._take_answer

    async def hold(self, body: bytes, headers: bytes) -> None:
        """Ask, and wait until the KV is computed and held for the decode worker.

        Raises:
            StaleTicketError: the ticket is for another incarnation of the prefill worker.
            PrefillFailedError: no KV is held.
        """
        try:
            with self._handoff.prefill.cancel_scope():
                result = await self._ask(body, headers)
        except asyncio.CancelledError:
            self.release("its request was cancelled")  # its answer may be on its way
            raise
        except UpstreamError as exc:
            self._services.health_monitor.report(self._handoff.prefill, exc)
            self.release(f"its answer did not come: {exc}")
            cause = _CAUSES.get(type(exc), FallbackCause.PREFILL_FAILED)
            raise PrefillFailedError(str(exc), cause=cause) from exc
        match result:
            case PrefillDone(first=first, num_cached=num_cached, computed_s_ago=computed_s_ago):
                self._context.num_cached = self._record.num_cached = num_cached
                if self._context.running is not None:
                    now = self._services.clock.now()
                    self._context.running.prefilled(now - computed_s_ago)
                await self._send_first_token(first)
            case TicketStale():
                raise StaleTicketError(self._handoff.ticket.prefill)
            case PrefillFailed(cause, reason):
                raise PrefillFailedError(f"{self._handoff.prefill.name} {reason}", cause=cause)
            case _:
                assert_never(result)

    def release(self, reason: str) -> None:
        """What is held is wanted no more; its lease would end it, later."""
        urls = self._handoff.prefill.control_urls
        for url in urls:
            self._services.background_tasks.run(self._abort(url, reason))

    def cancel(self) -> None:
        """Close the connection: the worker stops computing for this request."""
        self._cut()
        if self._handoff.ticket.first_token_early:  # it may have answered already
            self.release(NO_ANSWER)

    def give_up(self, reason: str) -> None:
        """No KV is wanted: the worker stops computing, or forgets what it was to hand over."""
        self._cut()
        self.release(reason)

    async def reported(self) -> None:
        """Return once what was cached is known, or after `REPORT_WAIT_S`."""
        if self._answer is not None:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._waiter,), timeout=REPORT_WAIT_S)
        elif self._task is not None:
            await asyncio.wait((self._task,), timeout=REPORT_WAIT_S)

    def cancel_after_grace_period(self) -> None:
        """The answer is complete. Its prefill worker may take a moment more to report it.

        The answer of one token overtakes the prefill worker's own; closing the connection at once
        would cost a new one for the next request.
        """
        if self._answer is None and (self._task is None or self._task.done()):
            return
        timer = asyncio.get_running_loop().call_later(
            self._services.options.prefill_grace_period_s, self._cut
        )
        self._grace_timer = timer
        if self._task is not None:
            self._task.add_done_callback(lambda _: timer.cancel())

    def _cut(self) -> None:
        task, self._task = self._task, None  # its traceback refers to this object
        if task is not None:
            task.cancel()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.release()

    def _take_answer(self) -> None:
        """The answer is here."""
        answer, self._answer = self._answer, None
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        if answer is not None and not self._is_usual(answer):
            self._task = asyncio.create_task(self._run(partial(self._read, answer)))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_usual(self, answer: Answer) -> bool:
        """Whether the KV is computed and nothing else is to be done, which is then noted."""
        if not answer.is_complete or answer.status != OK or self._early is not None:
            return False
        reply = answer.peek()
        result = read_prefill_result(self._handoff.protocol, 200, reply)
        if not isinstance(result, PrefillDone):
            return False
        self._context.num_cached = self._record.num_cached = result.num_cached
        self._services.health_monitor.note_answered(self._handoff.prefill)
        self._context.note_prefilled(self._services.clock.now() - result.computed_s_ago)
        return True

    async def _run(self, ask: Callable[[], Awaitable[PrefillResult]]) -> None:
        try:
            result = await ask()
        except UpstreamError as exc:
            self._services.health_monitor.report(self._handoff.prefill, exc)
            await self._fail(_CAUSES.get(type(exc), FallbackCause.PREFILL_FAILED), str(exc))
            return
        except Exception:
            log.exception("the prefill request of %s failed", self._context.id)
            await self._fail(FallbackCause.PREFILL_FAILED, "internal error in the gateway")
            return
        match result:
            case PrefillDone(first=first, num_cached=num_cached, computed_s_ago=computed_s_ago):
                self._context.num_cached = self._record.num_cached = num_cached
                done_at = self._services.clock.now() - computed_s_ago
                await self._send_first_token(first)
                self._context.note_prefilled(done_at)
            case TicketStale():
                await self._retry_or_fail()
            case PrefillFailed(cause, reason):
                await self._fail(cause, f"{self._handoff.prefill.name} {reason}")
            case _:
                assert_never(result)

    async def _send_first_token(self, first: FirstToken | None) -> None:
        if self._early is not None and first is not None:
            await self._early.send_first_token(self._handoff.decode, self._handoff.ticket, first)

    @property
    def _url(self) -> URL:
        return self._handoff.prefill.completion_urls[self._context.path]

    async def _ask(self, body: bytes, headers: bytes) -> PrefillResult:
        return await self._read(await self._services.upstream.post(self._url, body, headers))

    async def _read(self, answer: Answer) -> PrefillResult:
        try:
            reply = await answer.read_whole(MAX_SMALL_ANSWER_BYTES)
            result = read_prefill_result(self._handoff.protocol, answer.status, reply)
        finally:
            answer.release()
        match result:
            case PrefillDone():
                self._services.health_monitor.note_answered(self._handoff.prefill)
            case PrefillFailed(FallbackCause.PREFILL_FAILED, reason):
                self._services.health_monitor.note_failed(self._handoff.prefill, reason)
            case _:
                pass
        return result

    async def _retry_or_fail(self) -> None:
        stale = StaleTicketError(self._handoff.ticket.prefill)
        if not self._context.has_sent_bytes:
            self._attempt.interrupt(stale)
            return
        await self._fail(FallbackCause.STALE_TICKET, str(stale))

    async def _fail(self, cause: FallbackCause, reason: str) -> None:
        """No KV will come: notify the decode worker, until it answers."""
        if self._context.phase is not Phase.PREFILL:
            return
        self._services.fallbacks.note(self._context, cause, reason)
        if cause is FallbackCause.HANDOFF_FAILED:
            self._services.health_monitor.doubt(self._handoff.decode)
        for pause_s in (*ABORT_RETRY_DELAYS_S, None):
            urls = self._handoff.decode.control_urls
            await asyncio.gather(*(self._abort(url, reason) for url in urls))
            if pause_s is None or self._context.phase is not Phase.PREFILL:
                return
            await asyncio.sleep(pause_s)

    async def _abort(self, url: URL, reason: str) -> None:
        try:
            await self._services.upstream.abort(url, self._handoff.ticket.id, reason)
        except UpstreamError as exc:
            log.warning("could not send an abort to %s: %s", url, exc)


_CAUSES: Final[dict[type[UpstreamError], FallbackCause]] = {
    WorkerUnreachableError: FallbackCause.PREFILL_UNREACHABLE,
    WorkerLostError: FallbackCause.PREFILL_LOST,
}
