"""Moves streams from one decode worker to another while they go on; their clients do not notice.

    A │ generates ─────────────────────────────┐ cut behind a whole event
      │ whole blocks so far: a handoff         │
    B └──► a standby request follows ──────────┴─► one step, and its stream begins

`standby` has B's part. Where B takes no standby request, the whole blocks are handed over into B's
cache: B's request ends after a token of which nothing is used. Where many tokens came meanwhile,
they are handed over as well. Until the cut whatever fails costs the stream nothing. From then on
it is a stream that goes on elsewhere (`resumption`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Final

from baton.auth.ticket import Ticket, hash_tenant
from baton.clock import Instant
from baton.errors import BatonError
from baton.gateway.errors import ErrorAnswer, PrefillFailedError, UpstreamError, WorkerFailedError
from baton.gateway.fallbacks import FallbackCause
from baton.gateway.metrics import MoveResult
from baton.gateway.protocol_adapters import (
    PrefillDone,
    copy_bodies,
    read_prefill_result,
    write_ticket,
)
from baton.gateway.request_context import LOG_AGAIN_AFTER_S, RequestContext, Services
from baton.gateway.running_streams import REST_TOKENS, RunningStream, StreamMovedError
from baton.gateway.standby import Standby, find_standby_worker
from baton.gateway.stream_record import ERROR_EVENT
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES
from baton.gateway.workers import Draining, Worker
from baton.ids import WorkerId, new_ticket_id
from baton.protocol.worker_http import MOVE_HEADER
from baton.router.cost import CostPolicy
from baton.router.failover import EVERY_MODE
from baton.router.fleet import Fleet, ModelWorkers, WorkerView
from baton.router.placement import Placement, PlacementRequest
from baton.router.rebalance import MoveCause, Rebalancer, WorkerPace
from baton.router.room import LACKS_BLOCKS, LEAST_SEEN
from baton.router.topology import name_distance
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.gateway.request_history import RequestHistory
    from baton.router.load import FleetLoad

LOOK_S: Final = 0.1
"""How often the workers and streams are looked at, while there are streams."""
MAX_COPIES: Final = 3
"""Handoffs of one move: each but the first is of what was generated during the one before it."""
BALANCE_S: Final = 0.5
"""How often the workers of a model are compared."""
MOST_AT_ONCE: Final = 8
"""Moves from one worker to another, while the one drains."""
COPY_TIMEOUT_S: Final = 60.0
"""Of a move until its cut. Moves from one worker share its link: those that begin while others are
under way are to need no longer with them."""
BLOCK_END_S: Final = 5.0
"""The end of a block is waited for so long: of vLLM's blocks on CPUs, of 128 tokens of 40 ms."""
MOVES: Final = f"{MOVE_HEADER}: 1\r\n".encode()
POLL_S: Final = 0.005
AGAIN_AFTER_S: Final = 1.0
"""A move failed: when the stream may be moved the next time."""
MOST_AGAIN_AFTER_S: Final = 8.0
"""The same after several that took too long: little beside what each took. The end of a worker that
drains may come before the next one, and is not known here."""

log = logging.getLogger(__name__)


class StreamMoves:
    """Decides which streams move, and moves them. Owner: the event loop's thread.

    `records` keeps the trace of each handoff.
    """

    def __init__(self, services: Services, records: RequestHistory) -> None:
        self._services, self._records = services, records
        self._num_moving: Counter[tuple[WorkerId, WorkerId]] = Counter()
        self._leaving_s: dict[RunningStream, float] = {}  # of moves under way, as predicted
        self._rebalancers: dict[str, Rebalancer] = {}
        self._next_balance_at = Instant(0.0)
        self._log = LimitedLog(log, services.clock, LOG_AGAIN_AFTER_S)

    async def run(self) -> None:
        """Look at workers and streams, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S if self._services.streams.all() else BALANCE_S)
            try:
                self._look()
            except Exception:
                log.exception("the streams could not be looked at")

    def _look(self) -> None:
        now, options = self._services.clock.now(), self._services.options
        setting = "never" if options.mode == "colocated" else options.move_streams
        if setting != "never":
            self._drain(now)
        placement = self._services.placement
        is_due = now >= self._next_balance_at
        if setting == "auto" and isinstance(placement, CostPolicy) and is_due:
            self._next_balance_at = Instant(now + BALANCE_S)
            streams: dict[str, list[RunningStream]] = {}
            for stream in self._services.streams.all():
                streams.setdefault(stream.context.model, []).append(stream)
            for model, served in self._services.workers.fleet.models.items():
                if len(served.decodes) > 1:
                    self._rebalance(served, streams.get(model, []), placement, now)

    def _drain(self, now: Instant) -> None:
        services = self._services
        leaving = {
            worker.state.info.worker: find_end(worker)
            for worker in services.workers.all
            if isinstance(worker.state, Draining)
        }
        if not leaving:
            return
        due = [s for s in services.streams.all() if s.decode.id in leaving and s.is_due(now)]
        for stream in sorted(due, key=lambda s: (leaving[s.decode.id], -s.num_left)):
            target = self._choose_target(stream, now)
            left_s = min(COPY_TIMEOUT_S, leaving[stream.decode.id] - now)
            if target is not None and self._fits(stream, target, left_s):
                self._begin(stream, target, MoveCause.DRAIN)

    def _fits(self, stream: RunningStream, target: WorkerView, left_s: float) -> bool:
        """Whether what leaves its worker is there in time with this stream, too; one always is."""
        source = stream.decode.id
        others = [s for each, s in self._leaving_s.items() if each.decode.id == source]
        return not others or sum(others) + self._predict_s(stream, target) <= left_s

    def _predict_s(self, stream: RunningStream, target: WorkerView) -> float:
        """How long its handoff takes; of one that was not done in time it is not known."""
        handoffs = self._services.load.costs(target.model).handoffs
        predicted = handoffs.cost_of(stream.decode, target).predict(stream.num_tokens)
        return COPY_TIMEOUT_S if stream.num_too_slow else predicted

    def _rebalance(
        self,
        served: ModelWorkers,
        streams: Iterable[RunningStream],
        policy: CostPolicy,
        now: Instant,
    ) -> None:
        services, model = self._services, served.decodes[0].model
        views = {w.id: w for w in served.decodes if w.resumes_streams}
        due = [stream for stream in streams if stream.decode.id in views and stream.is_due(now)]
        full, seen = services.admission.find_full(model), measure_paces(due, now)
        paces = {
            view.id: find_pace(
                view, services.load, now, seen_s=seen.get(view.id), is_full=view.id in full
            )
            for view in views.values()
        }
        tpot_s, itl_s = services.admission.tpot_s, services.admission.itl_s
        limits = [
            (tpot_s(stream.context) or policy.tpot_limit_s, itl_s(stream.context) or inf)
            for stream in due
        ]
        loads = []
        # Mostly no worker is to be left: then it does not matter how long each stream is.
        if any(pace.lacks_blocks for pace in paces.values()) or any(
            paces[stream.decode.id].exceeds(*limit)
            for stream, limit in zip(due, limits, strict=True)
        ):
            loads = [
                stream.load(key, *limit, served=served)
                for key, (stream, limit) in enumerate(zip(due, limits, strict=True))
            ]

        def cost_s(source: WorkerId, target: WorkerId, num_tokens: int) -> float:
            one, other = views[source], views[target]
            if one.protocol != other.protocol or other.why_not_from(one) is not None:
                return inf
            handoffs = services.load.costs(model).handoffs
            return handoffs.cost_of(views[source], views[target]).predict(num_tokens)

        rebalancer = self._rebalancers.setdefault(model, Rebalancer())
        for move in rebalancer.find_moves(loads, list(paces.values()), cost_s, now):
            stream, target = due[move.key], views[move.target]
            if not self._num_moving[stream.decode.id, target.id]:
                self._begin(stream, target, move.cause)

    def _choose_target(self, stream: RunningStream, now: Instant) -> WorkerView | None:
        """Where the policy would place it, of the workers that can take its KV now."""
        services, context, decode = self._services, stream.context, stream.decode
        served = services.workers.fleet.models.get(context.model)
        if served is None:
            return None
        able = [
            worker
            for worker in served.decodes
            if worker.id != decode.id
            and worker.available
            and stream.can_go_to(worker)
            and worker.why_not_from(decode) is None
            and self._num_moving[decode.id, worker.id] < MOST_AT_ONCE
        ]
        if not able:
            return None
        request = PlacementRequest(
            context.model,
            avoid=frozenset({decode.id}),
            num_prompt_tokens=stream.num_tokens,
            failed_modes=EVERY_MODE,
            at=now,
            cached={} if stream.match is None else stream.match.cached,
            full=services.admission.find_full(context.model),
            tpot_s=services.admission.tpot_s(context),
            itl_s=services.admission.itl_s(context),
        )
        # A part of the fleet, for which no labour is divided.
        fleet = Fleet({context.model: ModelWorkers.of(able, is_part=True)})
        placed = services.placement.place(fleet, request, services.load)
        return placed.decode if isinstance(placed, Placement) else None

    def _begin(self, stream: RunningStream, target: WorkerView, cause: MoveCause) -> None:
        pair = stream.decode.id, target.id
        self._num_moving[pair] += 1
        self._leaving_s[stream] = self._predict_s(stream, target)
        stream.move_task = self._services.background_tasks.run(self._move(stream, target, cause))
        stream.move_task.add_done_callback(lambda _: self._end(stream, pair))

    def _end(self, stream: RunningStream, pair: tuple[WorkerId, WorkerId]) -> None:
        del self._leaving_s[stream]
        self._num_moving[pair] -= 1
        if not self._num_moving[pair]:
            del self._num_moving[pair]

    async def _move(self, stream: RunningStream, target: WorkerView, cause: MoveCause) -> None:
        results = self._services.metrics.moved_streams
        standby = stream.standby = self._plan_standby(stream, target)
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                if standby is None:
                    await self._copy_all(stream, target, cause)
                else:
                    await self._copy(stream, target, standby.ids, cause, standby=standby)
                    await standby.follow()
            self._check_there(target)
        except asyncio.CancelledError:  # the stream has ended, in whatever way
            if standby is not None:  # the stream has released it, perhaps before its answer came
                standby.release()
            results[cause, MoveResult.ENDED].inc()
            raise
        except (BatonError, TimeoutError) as exc:
            results[cause, MoveResult.NOT_COPIED].inc()
            reason = str(exc) or f"it took more than {COPY_TIMEOUT_S:g} s"
            why = f"not moved to {target.id} ({cause}): {reason}"
            self._log.warning(cause, f"{stream.decode.id}, {stream.context.id}: {why}")
            stream.resumption.note_not_moved(why)
            stream.note_not_moved(was_too_slow=isinstance(exc, TimeoutError))
            stream.not_before = self._find_next_time(stream)
            if standby is not None:  # not by way of the stream, which may have ended meanwhile
                standby.release()
            return
        why_there = f"moved from {stream.decode.id} ({cause})"
        placement = Placement(None, target, why=(why_there,))
        stream.cut(StreamMovedError(placement, cause, standby))

    def _find_next_time(self, stream: RunningStream) -> Instant:
        now, worker = self._services.clock.now(), self._services.workers.with_id(stream.decode.id)
        left_s = inf if worker is None else find_end(worker) - now
        return Instant(now + compute_pause_s(stream.num_too_slow, left_s))

    def _plan_standby(self, stream: RunningStream, target: WorkerView) -> Standby | None:
        """What is to wait for the stream at its new worker; None where that is not possible."""
        worker = find_standby_worker(self._services, target)
        if worker is None:
            return None
        standby = Standby(self._services, stream, worker)
        return standby if standby.num_prefix_tokens else None

    def _check_there(self, target: WorkerView) -> None:
        """Pass if requests may still be placed on the incarnation of it that has the KV."""
        worker = self._services.workers.with_id(target.id)
        info = None if worker is None or not worker.is_available else worker.info
        if info is None or info.epoch != target.ref.epoch:
            raise UpstreamError(f"{target.id} is not used any more")

    async def _copy_all(self, stream: RunningStream, target: WorkerView, cause: MoveCause) -> None:
        """Hand over the whole blocks, until only a few tokens were generated meanwhile.

        Each handoff waits for the end of a block: both workers cache whole blocks, so that the one
        computes a single token for it, and the other few after the cut.
        """
        record = stream.resumption.record
        for _ in range(MAX_COPIES):
            await self._wait_for_block_end(stream, target)
            num_before = record.num_ids
            await self._copy(stream, target, read_cached_ids(stream), cause)
            if record.num_ids - num_before <= REST_TOKENS:
                return

    async def _wait_for_block_end(self, stream: RunningStream, target: WorkerView) -> None:
        """Return when the old worker has computed hardly more than whole blocks; after a while."""
        num_prompt, loads = stream.resumption.num_prompt_tokens, (stream.decode.load, target.load)
        block_size = max(0 if load is None else load.block_size for load in loads)
        if num_prompt is None or not block_size:
            return
        record, clock = stream.resumption.record, self._services.clock
        until = clock.now() + BLOCK_END_S
        while (  # noqa: ASYNC110 - an event would be set for each token of each stream
            (num_prompt + record.num_ids - 1) % block_size > 1 and clock.now() < until
        ):
            await asyncio.sleep(POLL_S)

    async def _copy(
        self,
        stream: RunningStream,
        target: WorkerView,
        ids: list[int],
        cause: MoveCause,
        *,
        standby: Standby | None = None,
    ) -> None:
        """Hand over the KV of the prompt and of these tokens: of their whole blocks to `standby`.

        Raises:
            UpstreamError: one of the two workers failed, or the handoff did.
        """
        services, clock = self._services, self._services.clock
        stream.num_copies += 1
        began = clock.now()
        part = stream.context.part(f"move{stream.num_copies}", began)
        placement = Placement(stream.decode, target, why=(f"a stream is moved ({cause})",))
        part.begin_attempt(placement, stream.context.metrics)
        sealed = self._seal_ticket(stream, target, part, standby)
        bodies = copy_bodies(stream.body, ids, sealed, target.protocol)
        part.trace.outcome = "failed"
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(stream.decode, part, bodies.prefill, stream))
                if standby is None:
                    group.create_task(self._take(target, part, bodies.decode, stream))
                else:
                    group.create_task(standby.open(sealed))
            part.trace.outcome, part.status = "ok", HTTPStatus.OK
            handoffs = services.load.costs(target.model).handoffs
            cost = handoffs.cost_of(stream.decode, target)
            cost.observe(stream.num_prompt_tokens + len(ids), clock.now() - began)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._records.add(part.finish(part.status or 0, clock.now()))

    def _seal_ticket(
        self,
        stream: RunningStream,
        target: WorkerView,
        part: RequestContext,
        standby: Standby | None,
    ) -> str:
        services = self._services
        ticket = Ticket(
            id=new_ticket_id(),
            request_id=part.id,
            prefill=stream.decode.ref,
            decode=target.ref,
            mode="push",
            issue=services.ticket_issuer.issue(part.left_s(services.clock.now())),
            tenant_salt=hash_tenant(stream.body.cache_salt),
            num_prefix_tokens=0 if standby is None else standby.num_prefix_tokens,
            distance=name_distance(stream.decode.topology, target.topology),
        )
        part.trace.ticket, part.trace.distance = ticket.id.hex(), ticket.distance or None
        return write_ticket(ticket, stream.decode, target, services.options.credentials)

    async def _send(
        self, view: WorkerView, part: RequestContext, body: bytes, stream: RunningStream
    ) -> None:
        """The part of the worker that has the KV: it answers once the other has it, too."""
        status, answer = await self._ask(view, part, body, stream)
        result = read_prefill_result(view.protocol, status, answer)
        if not isinstance(result, PrefillDone):
            raise PrefillFailedError(
                f"{view.id} did not hand the KV over: {result}",
                cause=FallbackCause.HANDOFF_FAILED,
            )

    async def _take(
        self, view: WorkerView, part: RequestContext, body: bytes, stream: RunningStream
    ) -> None:
        """The part of the worker that gets it: one token, once it has all."""
        status, answer = await self._ask(view, part, body, stream)
        if status != HTTPStatus.OK or ERROR_EVENT in answer:
            raise WorkerFailedError(
                f"{view.id} did not take the KV: it answered {status}",
                answer=ErrorAnswer(status, answer),
            )

    async def _ask(
        self, view: WorkerView, part: RequestContext, body: bytes, stream: RunningStream
    ) -> tuple[int, bytes]:
        upstream, worker = self._services.upstream, self._services.workers.with_id(view.id)
        if worker is None:
            raise UpstreamError(f"{view.id} is gone")
        headers = stream.write_headers(part) + MOVES
        with worker.cancel_scope():
            answer = await upstream.post(worker.completion_urls[part.path], body, headers)
            try:
                return answer.status, await answer.read_whole(MAX_SMALL_ANSWER_BYTES)
            finally:
                answer.release()


def find_end(worker: Worker) -> float:
    """When its machine is taken; inf: not that is known."""
    preemption = worker.state.preemption if isinstance(worker.state, Draining) else None
    return inf if preemption is None else preemption.at


def compute_pause_s(num_too_slow: int, left_s: float) -> float:
    """How long a stream stays after a move that failed, at a worker that ends in `left_s`.

    Longer each time only after moves that took too long: the others have the link meanwhile. One
    that is refused costs little.
    """
    doubled_s = AGAIN_AFTER_S * 2.0 ** (num_too_slow - 1)
    return max(AGAIN_AFTER_S, min(doubled_s, MOST_AGAIN_AFTER_S, left_s / 2))


def read_cached_ids(stream: RunningStream) -> list[int]:
    """The client's tokens up to the first one behind the whole blocks that its worker has cached.

    A worker without standby requests hands over a prompt of them after a step of one token. With
    the rest of the last block its step would be longer, for all of its streams.
    """
    ids = stream.resumption.record.read_token_ids() or []
    num_prompt, num_cached = stream.resumption.num_prompt_tokens, stream.count_cached(len(ids))
    if num_prompt is None or num_cached is None:
        return ids
    return ids[: max(0, num_cached + 1 - num_prompt)]


def measure_paces(streams: Iterable[RunningStream], now: float) -> dict[WorkerId, float]:
    """Seconds for a token since the last look, at each worker of which that was seen."""
    sums: dict[WorkerId, tuple[float, int]] = {}
    for stream in streams:
        seconds, num = stream.count_since_look(now)
        before = sums.get(stream.decode.id, (0.0, 0))
        sums[stream.decode.id] = before[0] + seconds, before[1] + num
    return {worker: seconds / max(1, num) for worker, (seconds, num) in sums.items() if seconds}


def find_pace(
    view: WorkerView, load: FleetLoad, now: float, *, seen_s: float | None, is_full: bool
) -> WorkerPace:
    """A worker's pace as it is seen, else as it is predicted if the worker is known.

    With one stream more it grows as is predicted. Gaps are predicted, and no shorter than that.
    """
    activity, report = load.of(view.id, view.model), view.load
    costs = load.costs(view.model)
    pace_s, next_pace_s = activity.pace_s(0, now), activity.pace_s(1, now)
    next_gap_s = costs.gap_s(activity, 1, now)
    gap_s = 0.0
    if min(activity.step_cost.num_seen, activity.prefill_cost.num_seen) >= LEAST_SEEN:
        gap_s = costs.gap_s(activity, 0, now)
    if seen_s is not None:
        pace_s, next_pace_s = seen_s, next_pace_s * seen_s / pace_s
    elif activity.step_cost.num_seen < LEAST_SEEN:
        pace_s = 0.0
    lacks_blocks = (
        report is not None
        and report.num_waiting > 0
        and LACKS_BLOCKS * report.num_free_blocks < report.num_blocks
    )
    return WorkerPace(
        view.id,
        pace_s,
        next_pace_s,
        takes=view.available and view.slow_start is None and not is_full,
        lacks_blocks=lacks_blocks,
        num_free_tokens=inf if report is None else report.num_free_blocks * report.block_size,
        gap_s=max(gap_s, pace_s),
        next_gap_s=max(next_gap_s, next_pace_s),
    )
