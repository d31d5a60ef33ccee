"""What a gateway has given its workers to do, and how fast they do it. Pure: times are given.

    begin ──► prefilled ──► first_token ──► end          of each `RunningRequest`
    waits or is computed    │               │
    at its prefill worker   KV moves        its answer is generated at its decode worker

A worker's prompts are taken for a queue: each begins when the one before it is done. What is
predicted is corrected by what is seen, and `WorkerCost`s learn from it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from msgspec import UNSET

from baton.protocol.worker_http import StoreLoads
from baton.router.arrivals import Arrivals
from baton.router.devices import SharedDevice
from baton.router.handoff_costs import HandoffCosts
from baton.router.learning import NOTHING_SEEN, LearnedLine, WorkerCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import WorkerView
    from baton.router.placement import Placement

WINDOW_S: Final = 3.0
"""Over which the share of a worker's time that prompts take is averaged."""
MIN_STREAMED: Final = 4
"""Parts of an answer from which its pace is learned."""
MOST_WORKERS: Final = 4096
"""Of which anything is remembered; those that have nothing to do are forgotten then."""
MOST_ENDED: Final = 512
"""Requests that are remembered after their end."""
MOST_SHARE: Final = 0.95
"""Of a worker's time that prompts take: a step is not called slower than 20 times for that."""
_PREFILL_GUESS: Final = (0.005, 5e-5)
_STEP_GUESS: Final = (0.01, 2e-4)
_LOAD_GUESS: Final = (0.005, 2e-5)
FOUND_FORGETTING: Final = 0.99
"""About the last 100 prompts count in `ModelCosts.found_share`."""
TYPICAL_ANSWER_TOKENS: Final = 128
"""Of an answer, before any was seen."""
ANSWER_SHARE: Final = 0.02
"""What the newest answer counts in `ModelCosts.answer_tokens`."""
NO_PLACE: Final = -1
Rows: TypeAlias = "slice | NDArray[np.intp]"
NO_LOADS: Final = StoreLoads(0, 0, 0.0)


class LoadColumns:
    """What placement looks at of one model's workers, one row for each: see `WorkerActivity`.

    A policy reads many workers at once as arrays, requests change one at a time. Of costs they have
    the `WorkerCost.evidence` `[3, num_rows]`. `place` is a number of the model's `Places`.
    """

    FIRST_ROWS: Final = 64

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_rows = 0
        self.free_at = np.zeros(self.FIRST_ROWS)
        self.num_decodes = np.zeros(self.FIRST_ROWS)
        self.prefill_share = np.zeros(self.FIRST_ROWS)
        self.share_at = np.zeros(self.FIRST_ROWS)
        self.prefill_evidence = np.zeros((3, self.FIRST_ROWS))
        self.step_evidence = np.zeros((3, self.FIRST_ROWS))
        self.load_evidence = np.zeros((3, self.FIRST_ROWS))
        self.place = np.full(self.FIRST_ROWS, NO_PLACE, dtype=np.intp)

    def add_row(self) -> int:
        """A row for one worker more."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
            if row == len(self.free_at):
                self._grow()
        for column in (self.free_at, self.num_decodes, self.prefill_share, self.share_at):
            column[row] = 0.0
        for evidence in (self.prefill_evidence, self.step_evidence, self.load_evidence):
            evidence[:, row] = NOTHING_SEEN
        self.place[row] = NO_PLACE
        return row

    def free_row(self, row: int) -> None:
        """Its worker is forgotten."""
        self._free.append(row)

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)], -1))


class WorkerActivity:
    """One worker's part. `num_prefills` prompts are waiting or computed here, of `prefill_tokens`.

    `num_decodes` answers are generated here, or will be. `free_at`: when the prompts will be done.
    `prefill_cost` gives seconds of a prompt's tokens, `step_cost` seconds of a step's answers,
    `load_cost` seconds of tokens that are loaded from the store. `row` is its row in the model's
    columns, which follow whatever changes here. `device`: the one that it computes on, if known.
    """

    __slots__ = (
        "_busy_on",
        "_columns",
        "_drift_s",
        "_last_done_at",
        "_loads",
        "_num_streams",
        "_prefill_share",
        "_share_at",
        "_stream_seconds",
        "_streams_at",
        "device",
        "free_at",
        "load_cost",
        "num_decodes",
        "num_prefills",
        "prefill_cost",
        "prefill_tokens",
        "row",
        "step_cost",
    )

    def __init__(self, costs: ModelCosts) -> None:
        self.prefill_cost, self.step_cost = WorkerCost(costs.prefill), WorkerCost(costs.step)
        self.load_cost, self._loads = WorkerCost(costs.load), NO_LOADS
        self.device: SharedDevice | None = None
        self._busy_on: SharedDevice | None = None
        self._columns, self.row = costs.columns, costs.columns.add_row()
        self.num_prefills = self.prefill_tokens = self.num_decodes = self._num_streams = 0
        self.free_at = self._drift_s = self._last_done_at = 0.0
        self._stream_seconds = self._streams_at = self._prefill_share = self._share_at = 0.0

    @property
    def num_requests(self) -> int:
        """Prompts and answers that it has."""
        return self.num_prefills + self.num_decodes

    def queue_s(self, now: float) -> float:
        """How long a prompt that comes now waits for those before it."""
        return max(0.0, self.free_at - now)

    def prefill_share(self, now: float) -> float:
        """The share of its time that prompts took lately, 0 to 1."""
        return min(1.0, self._prefill_share * exp((self._share_at - now) / WINDOW_S))

    def pace_s(self, more: int, now: float) -> float:
        """Of a token, with so many answers more."""
        share = min(MOST_SHARE, self.prefill_share(now))
        pace_s = self.step_cost.predict(self.num_decodes + more) / (1.0 - share)
        if self.device is not None:
            pace_s *= max(1, self.device.num_busy + (more > 0 and self._busy_on is None))
        return pace_s

    def add_prefill(self, num_tokens: int, now: float, num_stored: int = 0) -> tuple[float, float]:
        """A prompt is given to it: when it should be done, and what that is relative to.

        So many tokens of it are loaded before that, while others are computed.
        """
        self.num_prefills += 1
        self.prefill_tokens += num_tokens
        takes_s = self.prefill_cost.predict(num_tokens)
        self._set_free_at(max(now, self.free_at) + takes_s)
        self._prefill_share = self.prefill_share(now) + takes_s / WINDOW_S
        self._share_at = now
        self._columns.prefill_share[self.row] = self._prefill_share
        self._columns.share_at[self.row] = now
        load_s = self.load_cost.predict(num_stored) if num_stored else 0.0
        return self.free_at + load_s, self._drift_s

    def finish_prefill(self, num_tokens: int, expected: tuple[float, float], now: float) -> None:
        """It was computed: what was expected of those behind it moves by as much as this did."""
        self._remove_prefill(num_tokens)
        late_s = now - (expected[0] + self._drift_s - expected[1])
        self._drift_s += late_s
        self._set_free_at(max(now, self.free_at + late_s))

    def observe_prefill(self, num_tokens: int, began_at: float, done_at: float) -> None:
        """A prompt that was given to it then was computed now, after the one before it."""
        began_at = max(began_at, self._last_done_at)
        if done_at < began_at:  # a later one was reported first
            return
        self.prefill_cost.observe(num_tokens, done_at - began_at)
        self._columns.prefill_evidence[:, self.row] = self.prefill_cost.evidence
        self._last_done_at = done_at

    def skip_prefill(self, done_at: float) -> None:
        """A prompt was computed now, and what computing took is not known: some was loaded."""
        self._last_done_at = max(self._last_done_at, done_at)

    def note_loads(self, loads: StoreLoads) -> None:
        """It reports what it has loaded from its store since its start."""
        before, self._loads = self._loads, loads
        if loads.num_loads < before.num_loads:  # it was restarted
            before = NO_LOADS
        num_loads = loads.num_loads - before.num_loads
        if num_loads:
            num_tokens, seconds = (
                loads.num_tokens - before.num_tokens,
                loads.seconds - before.seconds,
            )
            self.observe_loads(num_tokens / num_loads, seconds / num_loads)

    def observe_loads(self, num_tokens: float, seconds: float) -> None:
        """A load, or a mean one of several, was of so many tokens and took so long."""
        self.load_cost.observe(num_tokens, seconds)
        self._columns.load_evidence[:, self.row] = self.load_cost.evidence

    def drop_prefill(self, num_tokens: int, expected: tuple[float, float], now: float) -> None:
        """It was computed at an unknown time, or never will be: those behind it need not wait."""
        self._remove_prefill(num_tokens)
        early_s = min(0.0, now - (expected[0] + self._drift_s - expected[1]))
        self._drift_s += early_s
        self._set_free_at(max(now, self.free_at + early_s))

    def count_streams(self, change: int, now: float) -> tuple[float, float]:
        """One answer more begins here, or ends: answers times seconds until now.

        And workers of its device that had answers, times seconds.
        """
        self._stream_seconds += self._num_streams * (now - self._streams_at)
        device = self.device
        if self._busy_on is None and device is not None:
            self._busy_on = device
            device.count(+1, now)
        self._num_streams += change
        self._streams_at = now
        if self._busy_on is not None and not self._num_streams:
            self._busy_on.count(-1, now)
            self._busy_on = None
        return self._stream_seconds, now if device is None else device.busy_seconds(now)

    def count_decodes(self, change: int) -> None:
        """One answer more is to be generated here, or one less."""
        self.num_decodes += change
        self._columns.num_decodes[self.row] = self.num_decodes

    def observe_step(self, num_streams: float, seconds: float) -> None:
        """A step with so many answers took so long."""
        self.step_cost.observe(num_streams, seconds)
        self._columns.step_evidence[:, self.row] = self.step_cost.evidence

    def _set_free_at(self, at: float) -> None:
        self.free_at = self._columns.free_at[self.row] = at

    def _remove_prefill(self, num_tokens: int) -> None:
        self.num_prefills -= 1
        self.prefill_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a client saw of a streamed answer of `num_streamed` parts.

    `num_tokens` of its prompt were to be computed, `num_cached` were not.
    """

    at: float
    num_tokens: int
    num_cached: int
    num_streamed: int
    ttft_s: float
    tpot_s: float

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end."""
        return self.ttft_s + self.tpot_s * (self.num_streamed - 1)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One attempt, from its placement to its end. Owner: the gateway's thread.

    `num_tokens` of its prompt are to be computed, `num_cached` are not, `num_handed` are to be
    handed over. Before that it `waited_s` in the gateway. `has_prefix`: the prompt's beginning
    comes from another worker, so that what the rest takes is not seen. `has_load`: it comes from
    the store, and the same holds.
    """

    prefill: WorkerActivity
    decode: WorkerActivity
    handoff_cost: WorkerCost | None
    costs: ModelCosts
    num_tokens: int
    num_handed: int
    began_at: float
    _expected: tuple[float, float]
    num_cached: int = 0
    waited_s: float = 0.0
    has_prefix: bool = False
    has_load: bool = False
    _is_prefilled: bool = False
    _prefilled_at: float | None = None
    _first_at: float | None = None
    _seconds: tuple[float, float] = (0.0, 0.0)
    _is_over: bool = False

    def prefilled(self, done_at: float) -> None:
        """Its prefill worker has computed the prompt; the report of it may come later."""
        if self.has_prefix:  # nothing was computed there
            return
        if self._prefilled_at is not None or (self._is_over and self._first_at is None):
            return
        self._prefilled_at = done_at = max(done_at, self.began_at)
        self._leave_queue(done_at)
        if self.has_load:
            self.prefill.skip_prefill(done_at)
        else:
            self.prefill.observe_prefill(self.num_tokens, self.began_at, done_at)
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
        self._seconds = self.decode.count_streams(+1, now)

    def end(self, now: float, num_streamed: int = 0) -> None:
        """It is over. `num_streamed` parts of the answer came one by one; 0: not known."""
        if self._is_over:
            return
        if not self._is_prefilled:
            self.prefill.drop_prefill(self.num_tokens, self._expected, now)
        if self._first_at is not None:
            seconds = self.decode.count_streams(-1, now)
            if num_streamed >= MIN_STREAMED and now > self._first_at:
                self._learn(self._first_at, seconds, now, num_streamed)
        self.decode.count_decodes(-1)
        self.costs.arrivals.end(now, now - self.began_at)
        self._is_over = True

    def _leave_queue(self, now: float) -> None:
        if not self._is_prefilled:
            self._is_prefilled = True
            self.prefill.finish_prefill(self.num_tokens, self._expected, now)

    def _learn_handoff(self) -> None:
        """Once both are known: when the prompt was computed, and when the answer began."""
        if self.handoff_cost is None or self._prefilled_at is None or self._first_at is None:
            return
        exposed_s = max(0.0, self._first_at - self._prefilled_at)
        self.costs.handoffs.observe(self.handoff_cost, self.num_handed, exposed_s)

    def _learn(
        self, first_at: float, seconds: tuple[float, float], now: float, num_streamed: int
    ) -> None:
        """From a whole stream: a step's cost for as many answers as there were on the average."""
        pace_s = (now - first_at) / (num_streamed - 1)
        alone = 1.0 - min(MOST_SHARE, self.decode.prefill_share(now))
        num_streams = (seconds[0] - self._seconds[0]) / (now - first_at)
        num_busy = (seconds[1] - self._seconds[1]) / (now - first_at)
        step_s = pace_s * alone / num_busy if num_busy > 1.0 else pace_s * alone
        self.decode.observe_step(num_streams, step_s)
        ttft_s = self.waited_s + first_at - self.began_at
        tokens = self.num_tokens, self.num_cached
        self.costs.note_ended(EndedRequest(now, *tokens, num_streamed, ttft_s, pace_s))


class ModelCosts:
    """What the workers of one model share.

    `found_share` is what of the latest prompts was cached where they were computed, 0 to 1;
    `answer_tokens` the mean length of the latest answers that were streamed; `arrivals` whether
    requests come independently of the answers; `ended` are the latest that ended, oldest first.
    """

    def __init__(self) -> None:
        self.found_share = 0.0
        self.answer_tokens = float(TYPICAL_ANSWER_TOKENS)
        self.prefill = LearnedLine(_PREFILL_GUESS)
        self.step = LearnedLine(_STEP_GUESS)
        self.load = LearnedLine(_LOAD_GUESS)
        self.handoffs = HandoffCosts(self.prefill)
        self.arrivals = Arrivals()
        self.ended: deque[EndedRequest] = deque(maxlen=MOST_ENDED)
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
        self.handoffs.forget_places()
        self.columns.place.fill(NO_PLACE)
        self._devices.clear()

    def note_ended(self, ended: EndedRequest) -> None:
        """A streamed answer is complete."""
        self.ended.append(ended)
        self.answer_tokens += ANSWER_SHARE * (ended.num_streamed - self.answer_tokens)

    def note_found(self, num_cached: int, num_tokens: int) -> None:
        """Of a prompt so many tokens were cached, and so many were not."""
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
            if len(self._workers) >= MOST_WORKERS:  # names of lives that are over
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

    def begin(
        self,
        placement: Placement,
        num_tokens: int,
        now: float,
        num_handed: int | None = None,
        *,
        num_cached: int = 0,
        waited_s: float = 0.0,
    ) -> RunningRequest:
        """A request goes to these workers, of which one has so many prompt tokens to compute.

        It has `num_cached` more, and loads those that the placement expects to be stored.
        `num_handed` are then handed over, as many as are computed unless it is given; of a prefix,
        they come first. `waited_s`: for a place.
        """
        decode_view, prefill_view = placement.decode, placement.prefill
        costs = self.costs(decode_view.model)
        decode, cost = self.of(decode_view.id, decode_view.model), None
        prefill, is_prefix = decode, placement.num_prefix_tokens > 0
        if prefill_view is not None and not is_prefix:
            prefill = self.of(prefill_view.id, prefill_view.model)
            cost = costs.handoffs.cost_of(prefill_view, decode_view)
        num_stored = placement.num_stored_tokens
        expected = prefill.add_prefill(num_tokens, now, num_stored)
        decode.count_decodes(+1)
        costs.arrivals.begin()
        costs.note_found(num_cached, num_tokens + num_stored)
        handed = num_tokens if num_handed is None else num_handed
        return RunningRequest(
            prefill,
            decode,
            cost,
            costs,
            num_tokens,
            handed,
            now,
            expected,
            num_cached,
            waited_s,
            is_prefix,
            num_stored > 0,
        )

    def note_report(self, worker: WorkerId, model: str, report: WorkerLoad | None) -> None:
        """A worker was asked for its load just now; None: it does not report it."""
        if report is not None and report.store_loads is not UNSET:
            self.of(worker, model).note_loads(report.store_loads)

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
