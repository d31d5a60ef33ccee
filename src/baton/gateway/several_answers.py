"""One client request, several answers: a request to the workers for each, merged into one answer.

    n = 1    each prompt is a request like any other: placed, prefilled, handed over
    n > 1    a prompt is prefilled and handed over once, by a request for one token; the decode
             worker then has its KV in its prefix cache, and is asked for every answer

The client's request counts once in quotas and metrics. It ends with the first error of any part.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.answer_merge import AnswerMerger, EventSplitter
from baton.gateway.asgi import JSON, send_whole
from baton.gateway.errors import AnswerError, ErrorAnswer, UpstreamError, answer_for
from baton.gateway.metrics import Phase
from baton.gateway.request import CompletionBody, find_non_disaggregable_field
from baton.gateway.request_proxy import RequestProxy
from baton.gateway.response_forwarder import TAIL_BYTES
from baton.protocol.worker_http import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Send

    from baton.auth.ticket import HandoffMode
    from baton.gateway.answer_plan import AnswerPlan
    from baton.gateway.request_context import RequestContext, Services
    from baton.gateway.request_history import RequestRecord
    from baton.router.fleet import WorkerView

NOT_SHARED: Final[frozenset[HandoffMode]] = frozenset({"reference"})
"""KV that stays at the prefill worker is in no prefix cache on decode."""


class SeveralAnswers:
    """Serves one request of several parts. Owner: the event loop's thread.

    `record` keeps the trace of a part that has ended.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        plan: AnswerPlan,
        send: Send,
        *,
        record: Callable[[RequestRecord], None],
    ) -> None:
        self._services, self._context, self._plan = services, context, plan
        self._send, self._record = send, record
        created = int(services.clock.unix_now())
        self._merger = AnswerMerger(context.path, context.id, created, plan.num_answers)
        self._answers = [b""] * plan.num_total
        self._num_bytes = 0

    async def run(self) -> None:
        """Ask for all answers; forward, or merge and send.

        Raises:
            BatonError: the first part that failed did so; the others are ended.
        """
        plan = self._plan
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(plan.prompts)):
                    group.create_task(self._serve_prompt(prompt, group))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if plan.prompts[0].stream:
            await self._context.start_stream(self._send)
            await self._send({"type": "http.response.body", "body": self._merger.end()})
            return
        context, body = self._context, self._merger.merge(self._answers)
        context.status, context.tail = HTTPStatus.OK, body[-TAIL_BYTES:]
        context.note_first_byte(None)  # each part's own trace has when its first token came
        own = (REQUEST_ID_HEADER.encode(), context.id.encode())
        await send_whole(self._send, HTTPStatus.OK, body, (JSON, own))

    async def _serve_prompt(self, prompt: int, group: asyncio.TaskGroup) -> None:
        plan = self._plan
        body, first = plan.prompts[prompt], prompt * plan.num_answers
        lead_name = f"prompt{prompt}" if plan.num_answers > 1 else str(prompt)
        lead = self._context.part(lead_name if prompt else "", self._services.clock.now())
        if plan.num_answers == 1:
            await self._ask(lead, body, self._receiver(first))
            return
        holder: WorkerView | None = None
        if find_non_disaggregable_field(body) is None:
            prefill = _Receiver(partial(self._note_prefill, prompt))
            await self._ask(lead, body.for_one_token(), prefill, excluded=NOT_SHARED)
            holder = lead.placement.decode if lead.placement is not None else None
        for answer in range(plan.num_answers):
            index = first + answer
            part = self._context.part(str(index), self._services.clock.now())
            asked = plan.body(prompt, answer)
            group.create_task(self._ask(part, asked, self._receiver(index), beside=holder))

    async def _ask(
        self,
        part: RequestContext,
        body: CompletionBody,
        receiver: _Receiver,
        *,
        beside: WorkerView | None = None,
        excluded: frozenset[HandoffMode] = frozenset(),
    ) -> None:
        part.trace.outcome = "error"
        try:
            await RequestProxy(
                self._services, part, body, receiver, beside=beside, excluded_modes=excluded
            ).run()
            part.trace.outcome = "ok"
        except asyncio.CancelledError:
            part.trace.outcome = "cancelled"
            raise
        finally:
            record = part.finish(part.status or 0, self._services.clock.now())
            self._context.trace.fallbacks.extend(part.trace.fallbacks)
            if part.id == self._context.id:
                self._context.trace.ticket = part.trace.ticket
            else:
                self._record(record)

    def _receiver(self, index: int) -> _Receiver:
        return _Receiver(partial(self._take_whole, index), partial(self._take_events, index))

    async def _note_prefill(self, prompt: int, answer: bytes) -> None:
        self._context.phase = Phase.DECODE
        self._merger.note_prefill(prompt, answer)

    async def _take_whole(self, index: int, answer: bytes) -> None:
        self._num_bytes += len(answer)
        if self._num_bytes > self._services.options.max_answer_bytes:
            too_long = "the answers together are longer than gateway.max_answer_bytes"
            # As itself it would be its worker's failure, and another worker would compute it again.
            raise AnswerError(answer_for(UpstreamError(too_long)))
        self._answers[index], self._context.phase = answer, Phase.DECODE

    async def _take_events(self, index: int, events: list[bytes]) -> None:
        chunk = b"".join(self._merger.rewrite(index, event) for event in events)
        if not chunk:
            return
        # Nothing is awaited before it is written: a part whose worker is given up meanwhile, and
        # which goes on elsewhere, would lack it.
        context = self._context
        if not context.has_sent_bytes:
            await context.start_stream(self._send)
            context.note_first_byte(self._services.clock.now())
        context.tail = chunk[-TAIL_BYTES:]
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _no_events(events: list[bytes]) -> None:
    del events


class _Receiver:
    """In place of a client: what a part's request would send to it, as answer or as events."""

    def __init__(
        self,
        take_whole: Callable[[bytes], Awaitable[None]],
        take_events: Callable[[list[bytes]], Awaitable[None]] = _no_events,
    ) -> None:
        self._take_whole, self._take_events = take_whole, take_events
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._splitter = EventSplitter()
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        """See ASGI's `send`."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            kind = dict(self._headers).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif self._is_stream:
            await self._take_events(self._splitter.push(message.get("body", b"")))
        elif self._status == HTTPStatus.OK:
            await self._take_whole(message["body"])
        else:
            kept = tuple(header for header in self._headers if header[0] == b"retry-after")
            raise AnswerError(ErrorAnswer(self._status, message["body"], kept))
