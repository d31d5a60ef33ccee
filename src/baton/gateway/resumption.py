"""A stream whose decode worker is lost goes on at another one; its client does not notice.

    embedded engine   prompt and tokens so far are prefilled, and the answer goes on behind them
    vLLM              the same, where its server reports token ids; else the request runs again.
                      Its events begin anew: what the client has is left out (`stream_replay`)

A request that runs again gives the same answer only if tokens are chosen greedily or with a seed.
Workers get a seed from the gateway, for clients that give none. Of embedded engines, number i of an
answer's tokens depends on the seed, on i and on what precedes it, wherever it is computed. vLLM's
servers use it for streams that can only run again, and report that.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Self

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.errors import ReplayDiffersError, UpstreamError, WorkerReportedError
from baton.gateway.metrics import MoveResult, ResumeResult
from baton.gateway.running_streams import count_needed
from baton.gateway.stream_record import END_OF_EVENT, StreamRecord
from baton.gateway.stream_replay import Replay
from baton.protocol.engine_fields import ABSENT
from baton.protocol.request_fields import Resume
from baton.protocol.worker_http import SEED_HEADER, TOKEN_IDS_HEADER, WorkerProtocol
from baton.router.rebalance import MoveCause

if TYPE_CHECKING:
    from types import TracebackType

    from baton.clock import Instant
    from baton.gateway.request import CompletionBody
    from baton.gateway.request_context import RequestContext, Services
    from baton.gateway.running_streams import StreamMovedError
    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, WorkerView
    from baton.router.placement import Placement

SEED_BITS: Final = 63
MOST_NOTES: Final = 32
"""Of one stream's moves that failed."""
NULL: Final = b"null"

_temperature_decoder = msgspec.json.Decoder(float | None)


class Resumption:
    """One request's. A context manager: what its record keeps is given back at the end."""

    def __init__(self, services: Services, context: RequestContext) -> None:
        self._services, self._context = services, context
        self.record = StreamRecord(services.stream_records, services.options.max_answer_bytes)
        self._seed: int | None = None
        self._is_seeded = False
        self._num_taken = 0
        self._began: WorkerView | None = None
        self._lost_at: Instant | None = None
        self._result: ResumeResult | None = None
        self._moved: tuple[MoveCause, Instant] | None = None
        self.num_moves, self.moved_at = 0, -inf
        self.num_before = inf
        """Chunks of others before the present worker's stream; inf: that has not begun."""
        self.num_prompt_tokens: int | None = None
        """As its worker counts them; None where it does not report that."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.record.close()
        if self._began is not None and isinstance(exc, UpstreamError):
            self._services.metrics.resumed_streams[self._result or ResumeResult.NO_WORKER].inc()

    @property
    def headers(self) -> str:
        """What workers get so that the stream can go on elsewhere: the same for each of them."""
        if self._seed is None:  # a system call, which whole answers do without
            self._seed = secrets.randbits(SEED_BITS)
        return f"{TOKEN_IDS_HEADER}: 1\r\n{SEED_HEADER}: {self._seed}\r\n"

    def continued(self, body: CompletionBody, placement: Placement) -> CompletionBody:
        """The body for the next attempt: the client may have a part of the answer."""
        workers = (placement.prefill, placement.decode)
        can_all = all(worker is None or worker.resumes_streams for worker in workers)
        if not (self._goes_on and can_all):
            return body
        ids, is_complete = self.record.read_token_ids() or [], self.record.is_finished
        if is_complete and self._protocol == "vllm":  # of which the last token is not known
            body = body.for_end(ids)
        sizes = self.record.read_group_sizes()
        return replace(body, resume=Resume(ids, is_complete=is_complete, group_sizes=sizes))

    def narrow(self, fleet: Fleet, body: CompletionBody, avoid: frozenset[WorkerId]) -> Fleet:
        """The workers that can go on with the stream: those like the one that began it.

        One that does not resume streams, even as prefill worker, has the request run again. One
        with less room may cut the answer: only where no other is available, or to be avoided.
        """
        began, model, num_prompt = self._began, self._context.model, self.num_prompt_tokens
        if began is None:
            return fleet
        must_resume = self._goes_on and not self.record.is_finished and not is_repeatable(body)
        fleet = fleet.like(began, must_resume=must_resume)
        fleet = fleet.with_room(model, (num_prompt or 0) + self.record.num_ids)
        large = fleet.with_room(model, count_needed(body, num_prompt, began) - 1)
        is_there = any(w.available and w.id not in avoid for w in large.models[model].decodes)
        return large if is_there else fleet

    @property
    def needs_no_prompt(self) -> bool:
        """Whether nothing is left to be computed, so that no KV need be handed over."""
        return self._goes_on and self._protocol == "baton" and self.record.is_finished

    def begin_stream(self, protocol: WorkerProtocol, *, has_ids: bool, is_seeded: bool) -> None:
        """A worker's stream begins. `is_seeded`: a vLLM server samples with the gateway's seed."""
        self._is_seeded = is_seeded
        has_events = protocol == "vllm"
        is_replay = self._began is not None and (has_events or not self.record.has_ids)
        replay = Replay(self.record.events) if is_replay else None
        self.record.begin(has_ids=has_ids, has_events=has_events, replay=replay)
        self.num_before = self.record.num_taken

    def note_news(self) -> None:
        """Something that the client had not yet goes to it."""
        if self._moved is not None:
            self._note_moved(*self._moved)
        if self._lost_at is None:
            return
        metrics, now = self._services.metrics, self._services.clock.now()
        metrics.resumed_streams[ResumeResult.RESUMED].inc()
        self._context.metrics.inter_token_latency.observe(now - self._lost_at)
        self._lost_at = None

    def note_move(self, moved: StreamMovedError) -> None:
        """The stream was cut, and goes on at another worker."""
        now, target = self._services.clock.now(), moved.placement.decode
        self._num_taken, self._began = self.record.num_taken, self._began or target
        self._moved = moved.cause, now
        self.num_before = inf
        self.moved_at = now
        self.num_moves += moved.cause is not MoveCause.DRAIN
        num = len(self.record.read_token_ids() or ())
        how = "" if moved.standby is not None else ", without a standby"
        self._context.trace.moves.append(f"to {target.id} after {num} tokens ({moved.cause}){how}")

    def note_stays(self, moved: StreamMovedError) -> None:
        """It was to be cut, and stays: it has ended, or what is kept of it became too long."""
        result, reason = MoveResult.NOT_COPIED, "what the client has is not kept any more"
        if self.record.is_finished:
            result, reason = MoveResult.ENDED, "it has ended"
        self._services.metrics.moved_streams[moved.cause, result].inc()
        if moved.standby is not None:
            moved.standby.release()
        self.note_not_moved(f"not moved to {moved.placement.decode.id} ({moved.cause}): {reason}")

    def note_not_moved(self, why: str) -> None:
        """It was to move, and stays."""
        self.moved_at = self._services.clock.now()
        if len(self._context.trace.moves) < MOST_NOTES:
            self._context.trace.moves.append(why)

    def _note_moved(self, cause: MoveCause, cut_at: Instant) -> None:
        """The first event of the worker to which it was moved is here."""
        metrics, pause_s = self._services.metrics, self._services.clock.now() - cut_at
        metrics.moved_streams[cause, MoveResult.MOVED].inc()
        metrics.move_pause.observe(pause_s)
        self._context.metrics.inter_token_latency.observe(pause_s)
        self._moved = None

    def note_failure(self, error: UpstreamError, decode: WorkerView, body: CompletionBody) -> bool:
        """An attempt failed; whether it had added to the stream."""
        if self._moved is not None:
            cause, self._lost_at = self._moved
            self._services.metrics.moved_streams[cause, MoveResult.LOST].inc()
            self._moved = None
        self.num_before = inf
        has_progressed = self.record.num_taken > self._num_taken
        self._num_taken = self.record.num_taken
        if isinstance(error, WorkerReportedError) and error.is_clients_fault:
            self._result = ResumeResult.REFUSED
        if has_progressed:
            self._began = self._began or decode
        if not self._context.has_sent_bytes:
            return False
        self._lost_at = self._lost_at or self._services.clock.now()
        self._result = self._result or self._why_over(error, body)
        if self._result is None:
            num, what = self._count_known()
            self._context.trace.fallbacks.append(f"the stream goes on after {num} {what}")
            self._services.metrics.resumed_tokens.inc(num)
        return has_progressed

    @property
    def is_over(self) -> bool:
        """Whether no other worker can answer: the client has a part, or is at fault."""
        return self._result is not None

    @property
    def _protocol(self) -> WorkerProtocol | None:
        return None if self._began is None else self._began.protocol

    @property
    def _goes_on(self) -> bool:
        return self._began is not None and self.record.has_ids

    def _count_known(self) -> tuple[int, str]:
        """How much the client has, and of what."""
        record = self.record
        if record.has_ids:
            return len(record.read_token_ids() or ()), "tokens"
        return record.events.count(END_OF_EVENT), "events"

    def _why_over(self, error: UpstreamError, body: CompletionBody) -> ResumeResult | None:
        if isinstance(error, ReplayDiffersError):
            return ResumeResult.DIFFERED
        if not self.record.is_kept or self.record.read_token_ids() is None:
            return ResumeResult.NOT_KEPT
        if not (self.record.has_ids or self._is_seeded or is_repeatable(body)):
            return ResumeResult.SAMPLED
        return None


def is_repeatable(body: CompletionBody) -> bool:
    """Whether every run of a request gives the same tokens."""
    fields = body.fields
    if bytes(fields.get("seed", ABSENT)) != NULL:
        return True
    try:
        temperature: float | None = _temperature_decoder.decode(fields.get("temperature", ABSENT))
    except UNDECODABLE:
        return False
    return temperature == 0
