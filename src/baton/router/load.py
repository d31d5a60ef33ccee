"""What a gateway has given its workers to do: the requests under way. Pure: times are given.

    begin ──► prefilled ──► first_token ──► end          of each `RunningRequest`
    waits or is computed    │               │
    at its prefill worker   KV moves        its answer is generated at its decode worker

What it has given each worker is in that one's `WorkerActivity`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from msgspec import UNSET

from baton.record import Record
from baton.router.arrivals import Arrivals
from baton.router.devices import SharedDevice
from baton.router.handoff_costs import HandoffCosts
from baton.router.learning import LearnedLine, PromptLine, WorkerCost
from baton.router.topology import Places
from baton.router.worker_activity import (
    MOST_SHARE,
    NO_PLACE,
    NO_PROMPTS,
    UNLIMITED_TOKENS,
    WINDOW_S,
    LoadColumns,
    WorkerActivity,
)
from baton.telemetry.trace import PredictedTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import WorkerView
    from baton.router.placement import Placement

MIN_STREAMED: Final = 4
"""Parts of an answer from which its pace is learned."""
ITL_SHARE: Final = 0.99
"""Of the gaps between the parts of an answer that are to be within its target."""
MOST_WORKERS: Final = 4096
"""Of which anything is remembered; those that have nothing to do are forgotten then."""
MOST_ENDED: Final = 512
"""Requests that are remembered after their end."""
_PREFILL_GUESS: Final = (0.005, 5e-5)
_STEP_GUESS: Final = (0.01, 2e-4)
_LOAD_GUESS: Final = (0.005, 2e-5)
FOUND_FORGETTING: Final = 0.99
"""About the last 100 prompts count in `ModelCosts.found_share`."""
SPLITS_REMEMBERED_S: Final = 120.0
SPLIT_SHARE: Final = 0.3
"""What the newest one counts in `SplitTimes`."""
MOST_SLOWNESS: Final = 10.0
MOST_OWN: Final = 2.0
"""Times what was predicted: what takes longer, computing is not the cause of."""
LEAST_SEEN: Final = 4
"""Prompts, before it is known what their parts take."""
TYPICAL_ANSWER_TOKENS: Final = 128
"""Of an answer, before any was seen."""
ANSWER_SHARE: Final = 0.02
"""What the newest answer counts in `ModelCosts.answer_tokens`."""
Rows: TypeAlias = "slice | NDArray[np.intp]"


def find_itl(gaps: Sequence[float] | None) -> float | None:
    """The p99 of the gaps of an answer, in seconds; of 100 or fewer, the longest.

    None: there are too few to know.
    """
    if gaps is None or len(gaps) < MIN_STREAMED - 1:
        return None
    return sorted(gaps)[int(ITL_SHARE * len(gaps))]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a client saw of a streamed answer of `num_streamed` parts.

    `num_tokens` of its prompt were to be computed, `num_cached` were not. Of `ttft_s` it `waited_s`
    in the gateway; after `prefill_s` more its prompt was computed (None: not known).
    `kept_itl`: gaps between its parts were within its target `itl_s`, if it had one.
    """

    at: float
    num_tokens: int
    num_cached: int
    num_streamed: int
    ttft_s: float
    tpot_s: float
    waited_s: float = 0.0
    prefill_s: float | None = None
    kept_itl: bool = True
    itl_s: float | None = None

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end."""
        return self.ttft_s + self.tpot_s * (self.num_streamed - 1)


class AnsweredRequest(Record, frozen=True):
    """The tokens of a request that was answered at `at`, however often it was placed.

    `num_tokens` of its prompt were to be computed, `num_cached` were cached or stored.
    """

    at: float
    num_tokens: int
    num_cached: int
    num_output_tokens: int


@dataclass(slots=True, eq=False)
class FirstPart:
    """Tokens of a prompt that another worker computes first, at the same time (`Placement`).

    The second worker begins after `lead` of the first one's time, which is `took_s` once known.
    """

    worker: WorkerActivity
    num_tokens: int
    num_cached: int
    expected: tuple[float, float]
    lead: float
    took_s: float | None = None
    is_over: bool = False

    def done(self, began_at: float, done_at: float) -> None:
        """They were computed."""
        if not self.is_over:
            self.is_over, self.took_s = True, done_at - began_at
            self.worker.finish_prefill(self.num_tokens, self.expected, done_at)
            self.worker.observe_prefill(self.num_tokens, began_at, done_at, self.num_cached)

    def drop(self, now: float) -> None:
        """They were computed at an unknown time, or never will be."""
        if not self.is_over:
            self.is_over = True
            self.worker.drop_prefill(self.num_tokens, self.expected, now)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One attempt, from its placement to its end. Owner: the gateway's thread.

    `num_tokens` of its prompt are to be computed, `num_cached` are not, `num_handed` are to be
    handed over. Before that it `waited_s` in the gateway. `has_prefix`: the prompt's beginning
    comes from another worker, so that what the rest takes is not seen; `first_part` is what that
    one computes of it. `has_load`: it comes from the store, and the same holds. `predicted`: by the
    models, when it was placed. `prompt`: tokens to compute and others when the request was placed
    first. `itl_s`: its target for the gaps
    between tokens, see `limit_gaps`.
    """

    prefill: WorkerActivity
    decode: WorkerActivity
    handoff_cost: WorkerCost | None
    costs: ModelCosts
    num_tokens: int
    num_handed: int
    began_at: float
    _expected: tuple[float, float]
    predicted: PredictedTimes
    prompt: tuple[int, int]
    num_cached: int = 0
    waited_s: float = 0.0
    has_prefix: bool = False
    has_load: bool = False
    first_part: FirstPart | None = None
    itl_s: float | None = None
    _is_prefilled: bool = False
    _prefilled_at: float | None = None
    _first_at: float | None = None
    _seconds: tuple[float, float] = (0.0, 0.0)
    _is_over: bool = False

    def limit_gaps(self, itl_s: float) -> None:
        """Gaps between its tokens are to be no longer. Once, before its end."""
        self.itl_s = itl_s
        self.decode.gap_limits.count(itl_s, +1)

    def prefilled(self, done_at: float) -> None:
        """Its prefill worker has computed the prompt; the report of it may come later."""
        if self.has_prefix:
            if self.first_part is not None:
                self.first_part.done(self.began_at, max(done_at, self.began_at))
            return
        if self._prefilled_at is not None or (self._is_over and self._first_at is None):
            return
        self._prefilled_at = done_at = max(done_at, self.began_at)
        self._leave_queue(done_at)
        if self.has_load:
            self.prefill.skip_prefill(done_at)
        else:
            self.prefill.observe_prefill(self.num_tokens, self.began_at, done_at, self.num_cached)
        self._learn_handoff()

    def first_token(self, now: float) -> None:
        """The answer has begun."""
        if self._is_over or self._first_at is not None:
            return
        self._first_at = now = max(now, self.began_at)  # a worker reports how long it is since
        if self.handoff_cost is None and not self.has_prefix:
            self.prefilled(now)
        else:
            self._leave_queue(now)
            self._learn_handoff()
            if self.first_part is not None:
                self._learn_split(self.first_part, now)
        self._seconds = self.decode.count_streams(+1, now)

    def end(
        self,
        now: float,
        num_streamed: int = 0,
        itl_s: float | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """It is over. `num_streamed` parts of the answer came one by one; 0: not known.

        `itl_s`: all but 1 % of the gaps between them were no longer; None: not known.
        `num_output_tokens`: of the whole answer, 0 where the request was not answered; None: as
        many as were streamed.
        """
        if self._is_over:
            return
        if not self._is_prefilled:
            self.prefill.drop_prefill(self.num_tokens, self._expected, now)
        if self.first_part is not None:
            self.first_part.drop(now)
        if self._first_at is not None:
            seconds = self.decode.count_streams(-1, now)
            if num_streamed >= MIN_STREAMED and now > self._first_at:
                kept_itl = self.itl_s is None or itl_s is None or itl_s <= self.itl_s
                self._learn(self._first_at, seconds, now, num_streamed, kept_itl=kept_itl)
        self.decode.count_decodes(-1)
        if self.itl_s is not None:
            self.decode.gap_limits.count(self.itl_s, -1)
        self.costs.arrivals.end(now, now - self.began_at)
        if num_output_tokens is None:
            num_output_tokens = num_streamed
        if num_output_tokens:
            self.costs.note_answered(AnsweredRequest(now, *self.prompt, num_output_tokens))
        self._is_over = True

    def _leave_queue(self, now: float) -> None:
        if not self._is_prefilled:
            self._is_prefilled = True
            self.prefill.finish_prefill(self.num_tokens, self._expected, now)

    def _learn_split(self, first_part: FirstPart, now: float) -> None:
        """What the second worker took, where the first one was done before it.

        Where either had something else to do, that is not known.
        """
        first_s = first_part.took_s
        is_alone = self.decode.num_requests == 1 and not first_part.worker.num_requests
        if first_s is None or not is_alone or self.predicted.queue_s > 0.0:
            return
        begins_at = self.began_at + first_part.lead * first_s
        took_s, cost = now - begins_at, self.prefill.prefill_cost
        if took_s <= first_s:
            return
        ratio = took_s / cost.predict(self.num_tokens, self.num_cached)
        if ratio < MOST_OWN or cost.line.num_seen < LEAST_SEEN:
            self.prefill.observe_prefill(self.num_tokens, begins_at, now, self.num_cached)
            ratio = 1.0
        self.costs.splits.observe(ratio, now)

    def _learn_handoff(self) -> None:
        """Once both are known: when the prompt was computed, and when the answer began."""
        if self.handoff_cost is None or self._prefilled_at is None or self._first_at is None:
            return
        exposed_s = self._first_at - self._prefilled_at - self.predicted.decode_queue_s
        exposed_s = max(0.0, exposed_s)
        self.costs.handoffs.observe(self.handoff_cost, self.num_handed, exposed_s)

    def _learn(
        self,
        first_at: float,
        seconds: tuple[float, float],
        now: float,
        num_streamed: int,
        *,
        kept_itl: bool,
    ) -> None:
        """From a whole stream: a step's cost for as many answers as there were on the average."""
        pace_s = (now - first_at) / (num_streamed - 1)
        alone = 1.0 - min(MOST_SHARE, self.decode.prefill_share(now))
        num_streams = (seconds[0] - self._seconds[0]) / (now - first_at)
        num_busy = (seconds[1] - self._seconds[1]) / (now - first_at)
        step_s = pace_s * alone / num_busy if num_busy > 1.0 else pace_s * alone
        self.decode.observe_step(num_streams, step_s)
        ttft_s = self.waited_s + first_at - self.began_at
        done_at = self._prefilled_at
        prefill_s = None if done_at is None else min(done_at, first_at) - self.began_at
        num_first = 0 if self.first_part is None else self.first_part.num_tokens
        tokens = self.num_tokens + num_first, self.num_cached - num_first
        self.costs.note_ended(
            EndedRequest(
                now,
                *tokens,
                num_streamed,
                ttft_s,
                pace_s,
                self.waited_s,
                prefill_s,
                kept_itl,
                self.itl_s,
            )
        )


@dataclass(slots=True, eq=False)
class SplitTimes:
    """How much longer than computing the second part of a split takes, lately.

    As where KV lands slowly.
    """

    _log: float = 0.0
    _seen_at: float = 0.0

    def slowness(self, now: float) -> float:
        """A factor, 1 where none was seen for long: what was slow is tried again."""
        return exp(self._log * exp((self._seen_at - now) / SPLITS_REMEMBERED_S))

    def observe(self, ratio: float, now: float) -> None:
        """The second part of one took so many times what was predicted."""
        seen = log(min(max(ratio, 1.0), MOST_SLOWNESS))
        known = log(self.slowness(now))
        self._log = known + SPLIT_SHARE * (seen - known)
        self._seen_at = now


class ModelCosts:
    """What the workers of one model share.

    `found_share` is what of the latest prompts was cached where they were computed, 0 to 1;
    `answer_tokens` the mean length of the latest answers that were streamed; `arrivals` whether
    requests come independently of the answers; `ended` are the latest streams that ended, and
    `answered` all the latest answers, oldest first. The three sums of tokens are over all answers.
    """

    def __init__(self) -> None:
        self.found_share = 0.0
        self.splits = SplitTimes()
        self.answer_tokens = float(TYPICAL_ANSWER_TOKENS)
        self.prefill = PromptLine(_PREFILL_GUESS)
        self.step = LearnedLine(_STEP_GUESS)
        self.load = LearnedLine(_LOAD_GUESS)
        self.handoffs = HandoffCosts(self.prefill)
        self.arrivals = Arrivals()
        self.ended: deque[EndedRequest] = deque(maxlen=MOST_ENDED)
        self.answered: deque[AnsweredRequest] = deque(maxlen=MOST_ENDED)
        self.num_computed_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.columns = LoadColumns()
        self._devices: dict[int, SharedDevice] = {}
        self._found = self._asked = 0.0

    def find_device(self, place: int) -> SharedDevice | None:
        """What workers at a place compute on, if it is a device."""
        if not self.handoffs.places.has_device[place]:
            return None
        return self._devices.setdefault(place, SharedDevice())

    def forget_places(self) -> None:
        """Number the places of workers anew, as they are asked about."""
        self.handoffs.places = Places()  # most are those of workers that are gone
        self.columns.place.fill(NO_PLACE)
        self._devices.clear()

    def note_ended(self, ended: EndedRequest) -> None:
        """A streamed answer is complete."""
        self.ended.append(ended)
        self.answer_tokens += ANSWER_SHARE * (ended.num_streamed - self.answer_tokens)

    def note_answered(self, answered: AnsweredRequest) -> None:
        """A request is over, and its client has the answer, in whatever parts."""
        self.answered.append(answered)
        self.num_computed_tokens += answered.num_tokens
        self.num_cached_tokens += answered.num_cached
        self.num_output_tokens += answered.num_output_tokens

    def place_s(self, activity: WorkerActivity, now: float) -> float:
        """How long an answer that comes now waits until one of those before it leaves a place."""
        most = float(self.columns.most_running[activity.row])
        num_ahead = activity.num_decodes + 1 - most
        if num_ahead <= 0:
            return 0.0
        return num_ahead * self.answer_tokens * activity.pace_s(0, now) / most

    def gap_s(self, activity: WorkerActivity, more: int, now: float) -> float:
        """The longest between tokens there, with so many answers more: as `Parts.gap_s` has it.

        A step, and what it computes of the usual prompt, if prompts took as long lately.
        """
        step_tokens = float(self.columns.step_tokens[activity.row])
        num_before = max(0.0, self.arrivals.num_prompt_tokens - step_tokens)
        piece_s = activity.prefill_cost.predict(step_tokens, num_before)
        lately_s = WINDOW_S * activity.prefill_share(now)
        return activity.pace_s(more, NO_PROMPTS) + min(lately_s, piece_s)

    def note_begun(self, now: float, num_tokens: int, num_cached: int) -> None:
        """A new request: of its prompt so many tokens were not cached, and so many were."""
        self.arrivals.begin(now, num_cached + num_tokens)
        self._found = FOUND_FORGETTING * self._found + num_cached
        self._asked = FOUND_FORGETTING * self._asked + num_cached + num_tokens
        self.found_share = self._found / max(1.0, self._asked)


class FleetLoad:
    """All workers' parts. Owner: the gateway's thread."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCosts] = {}
        self._workers: dict[tuple[str, WorkerId], WorkerActivity] = {}
        self.num_forgotten = 0

    def of(self, worker: WorkerId, model: str) -> WorkerActivity:
        """What that worker has to do for a model."""
        activity = self._workers.get((model, worker))
        if activity is None:
            if len(self._workers) >= MOST_WORKERS:  # names of incarnations that are over
                self._forget_idle()
            activity = self._workers[model, worker] = WorkerActivity(self.costs(model))
        return activity

    def rows(self, workers: Iterable[WorkerView]) -> Rows:
        """Their rows in the model's columns `[num_workers]`; good until `num_forgotten` changes.

        A slice where they follow one another, as a whole fleet's do: no column is copied then.
        """
        rows = [self._row(each) for each in workers]
        if rows == [*range(rows[0], rows[0] + len(rows))]:
            return slice(rows[0], rows[0] + len(rows))
        return np.array(rows, dtype=np.intp)

    def _row(self, worker: WorkerView) -> int:
        activity, costs = self.of(worker.id, worker.model), self.costs(worker.model)
        row, places = activity.row, costs.handoffs.places
        costs.columns.step_tokens[row] = worker.max_step_tokens or UNLIMITED_TOKENS
        before, place = costs.columns.place[row], places.number(worker.topology)
        if before != place:
            costs.columns.place[row] = place
            activity.device = costs.find_device(place)
            if before != NO_PLACE:
                costs.handoffs.forget_pairs()
        return row

    def _forget_idle(self) -> None:
        self.num_forgotten += 1
        for costs in self._models.values():
            costs.handoffs.forget_pairs()
        for (model, worker), each in list(self._workers.items()):
            if not each.num_requests:
                self._drop(model, worker)

    def forget(self, model: str, workers: frozenset[WorkerId]) -> None:
        """These workers of a model are gone; none of them has a request."""
        costs = self._models.get(model)
        if costs is None:
            return
        self.num_forgotten += 1
        for worker in workers:
            self._drop(model, worker)
        costs.handoffs.forget(workers)
        if costs.handoffs.places.is_full:
            costs.forget_places()

    def _drop(self, model: str, worker: WorkerId) -> None:
        activity = self._workers.pop((model, worker), None)
        if activity is not None:
            for cost in (activity.prefill_cost, activity.step_cost, activity.load_cost):
                cost.leave()
            self.costs(model).columns.free_row(activity.row)

    def find(self, worker: WorkerId, model: str) -> WorkerActivity | None:
        """What that worker has to do for a model; None if it was never asked about."""
        return self._workers.get((model, worker))

    def begin(  # noqa: PLR0913 - each is a fact of one attempt
        self,
        placement: Placement,
        num_tokens: int,
        now: float,
        num_handed: int | None = None,
        *,
        num_cached: int = 0,
        waited_s: float = 0.0,
        before: RunningRequest | None = None,
    ) -> RunningRequest:
        """A request goes to these workers, of which one has so many prompt tokens to compute.

        It has `num_cached` more, and loads those that the placement expects to be stored.
        `num_handed` are then handed over, as many as are computed unless it is given; of a prefix,
        they come first. `waited_s`: for a place. `before`: the request's last attempt, which is
        over; with one it is no new request.
        """
        decode_view, prefill_view = placement.decode, placement.prefill
        costs = self.costs(decode_view.model)
        decode, cost = self.of(decode_view.id, decode_view.model), None
        prefill, is_prefix = decode, placement.num_prefix_tokens > 0
        if prefill_view is not None and not is_prefix:
            prefill = self.of(prefill_view.id, prefill_view.model)
            cost = costs.handoffs.cost_of(prefill_view, decode_view)
        num_stored, num_first = placement.num_stored_tokens, placement.num_split_tokens
        handed, first_part = num_tokens if num_handed is None else num_handed, None
        handoff_s = 0.0 if cost is None else cost.predict(handed)
        begins_at, most_running = max(now, prefill.free_at), costs.columns.most_running
        queue_s, decode_queue_s = begins_at - now, 0.0
        # Each request comes here: nothing is called where there are places.
        if prefill.num_decodes >= most_running[prefill.row]:
            queue_s = max(queue_s, costs.place_s(prefill, now))
        expected = prefill.add_prefill(num_tokens, now, num_stored, num_cached)
        done_at = prefill.free_at
        load_s, prefill_s = expected[0] - done_at, done_at - begins_at
        if is_prefix and prefill_view is not None:
            rest = handed, prefill_s
            first_part, prefill_s, handoff_s = self._begin_prefix(
                placement, prefill_view, rest, now
            )
        if prefill is not decode and decode.num_decodes >= most_running[decode.row]:
            arrives_s = queue_s + load_s + prefill_s + handoff_s
            decode_queue_s = max(0.0, costs.place_s(decode, now) - arrives_s)
        predicted = PredictedTimes(
            queue_s=queue_s,
            load_s=load_s,
            prefill_s=prefill_s,
            handoff_s=handoff_s,
            decode_queue_s=decode_queue_s,
        )
        decode.count_decodes(+1)
        if before is None:
            costs.note_begun(now, num_tokens + num_first + num_stored, num_cached - num_first)
        else:
            costs.arrivals.resume()
        return RunningRequest(
            prefill,
            decode,
            cost,
            costs,
            num_tokens,
            handed,
            now,
            expected,
            predicted,
            (num_tokens + num_first, num_cached - num_first + num_stored)
            if before is None
            else before.prompt,
            num_cached,
            waited_s,
            is_prefix,
            num_stored > 0,
            first_part,
        )

    def _begin_prefix(
        self, placement: Placement, first: WorkerView, rest: tuple[int, float], now: float
    ) -> tuple[FirstPart | None, float, float]:
        """What another worker computes of a prompt is given to it; prefill and handoff in seconds.

        `rest`: tokens to be handed over, and what computing the others takes.
        """
        decode, num_tokens = placement.decode, placement.num_split_tokens
        costs, (num_handed, second_s) = self.costs(decode.model), rest
        if not num_tokens:
            load_s = costs.handoffs.predict_load(first, decode, placement.num_prefix_tokens)
            return None, second_s, load_s
        num_before = placement.num_prefix_tokens - num_tokens
        worker, lead = self.of(first.id, first.model), 1.0 / max(1, decode.num_landing_layers)
        first_s = worker.prefill_cost.predict(num_tokens, num_before)
        second_s *= costs.splits.slowness(now)
        both_s = max(first_s + lead * second_s, lead * first_s + second_s)
        handoff_s = costs.handoffs.cost_of(first, decode).predict(num_handed)
        expected = worker.add_prefill(num_tokens, now, 0, num_before)
        return FirstPart(worker, num_tokens, num_before, expected, lead), both_s, handoff_s

    def note_report(self, worker: WorkerId, model: str, report: WorkerLoad | None) -> None:
        """A worker was asked for its load just now; None: it does not report it."""
        if report is not None and report.store_loads is not UNSET:
            self.of(worker, model).note_loads(report.store_loads)

    def limit_running(self, worker: WorkerId, model: str, most: float) -> None:
        """A worker that was asked about generates so many answers at once, one at least."""
        if (activity := self._workers.get((model, worker))) is not None:
            self.costs(model).columns.most_running[activity.row] = max(1.0, most)

    @property
    def models(self) -> Mapping[str, ModelCosts]:
        """What the workers of each model share."""
        return self._models

    def costs(self, model: str) -> ModelCosts:
        """What a model's workers share."""
        costs = self._models.get(model)
        if costs is None:
            costs = self._models[model] = ModelCosts()
        return costs
