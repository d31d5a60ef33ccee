"""How many workers of both roles only prefill at present, and the others only decode.

A division of labour is a decision for the fleet: where all workers are equally busy with prompts,
no single request gains by its first step, though all gain once it is made. So it is looked at now
and then: what the present division achieves is counted, what another one would achieve is predicted
from the requests under way and the learned costs (two stations in a closed network).

    stays ◄── no other is predicted to be `MUCH_BETTER`, or known to be `BETTER`, at such a load
      │       (before a whole window has passed: by more than chance)
      │
      └─► another division, until it is known what that achieves
            │ it achieves more: it stays
            │ it does not: back, and it is not tried again at such a load for a while
            └ requests pile up meanwhile: back at once, and not again at such a load or a higher one

Pure: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, sqrt
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from baton.router.load import MOST_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import WorkerView
    from baton.router.load import EndedRequest, FleetLoad

LOOK_EVERY_S: Final = 1.0
SETTLING_S: Final = 3.0
"""After a change; or as long as a request lasts."""
WINDOW_S: Final = 8.0
"""In which what a division achieves is counted; or `NUM_WAVES` times as long as a request lasts."""
NUM_WAVES: Final = 3
LEAST_ENDED: Final = 8
"""Requests from which what a division achieves is counted."""
MUCH_BETTER: Final = 1.1
BETTER: Final = 1.05
"""What must be predicted, or must be known of the last `KNOWN_FOR_S`, of another division."""
KNOWN_FOR_S: Final = 120.0
RETRY_AFTER_S: Final = 60.0
MOST_RETRY_AFTER_S: Final = 3600.0
STEEPNESS: Final = 8
ALIKE: Final = 1.5
"""Numbers of requests at once, one over the other."""
NUM_ITERATIONS: Final = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds within which a request is good."""

    ttft_s: float
    tpot_s: float

    def are_met(self, ended: EndedRequest) -> bool:
        """Whether a request was good."""
        return ended.ttft_s <= self.ttft_s and ended.tpot_s <= self.tpot_s

    def share_met(self, ttft_s: float, tpot_s: float) -> float:
        """The share of requests that are good where these are the means: half at the limit."""
        return _share(ttft_s / self.ttft_s) * _share(tpot_s / self.tpot_s)


def _share(mean: float) -> float:
    return 1.0 / (1.0 + mean**STEEPNESS)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the workers: requests at once, and what one of them costs, in seconds.

    `prefill_s` and `handoff_s` are of what is not cached, `cold_prefill_s` and `cold_handoff_s` of
    whole prompts: another division begins with the caches of this one, and what workers have of a
    prompt is then not where it is needed. `step_s` of a step's answers: `(fixed, each)`. `trust` is
    the share of the predicted rate that the present division achieves: workers may share what each
    is predicted to have, processors for example, and of other divisions no better is believed.
    A worker has room for the KV of `most_at_once` requests.
    """

    num_at_once: float
    prefill_s: float
    cold_prefill_s: float
    handoff_s: float
    cold_handoff_s: float
    num_answer_tokens: float
    step_s: tuple[float, float]
    trust: float = 1.0
    most_at_once: float = inf

    def without_caches(self) -> Demand:
        """Where prompts find nothing."""
        return replace(self, prefill_s=self.cold_prefill_s, handoff_s=self.cold_handoff_s)


def predict_goodput(demand: Demand, limits: Limits, num_workers: int, num_prefill: int) -> float:
    """Good requests a second with so many workers for prefill alone; 0: all do both parts."""
    rate, ttft_s, tpot_s = predict_rate(demand, num_workers, num_prefill)
    return demand.trust * rate * limits.share_met(ttft_s, tpot_s)


def predict_rate(demand: Demand, num_workers: int, num_prefill: int) -> tuple[float, float, float]:
    """Requests a second, and the means of their TTFT and TPOT."""
    num_decode = num_workers - num_prefill
    fixed, each = demand.step_s
    rate, tpot_s = 0.0, fixed + each
    answer_s = demand.num_answer_tokens * tpot_s
    for _ in range(NUM_ITERATIONS):
        busy = rate * demand.prefill_s / (num_prefill or num_workers)
        share = min(MOST_SHARE, busy) if num_prefill == 0 else 0.0
        answers = rate * demand.num_answer_tokens * tpot_s / num_decode
        tpot_s += 0.5 * ((fixed + each * max(1.0, answers)) / (1.0 - share) - tpot_s)
        answer_s = demand.num_answer_tokens * tpot_s
        most = (num_prefill or num_workers) / demand.prefill_s
        alone_s = demand.prefill_s + answer_s + (demand.handoff_s if num_prefill else 0.0)
        at_once = min(demand.num_at_once, num_decode * demand.most_at_once)
        rate += 0.5 * (min(most, at_once / alone_s) - rate)
    ttft_s = max(demand.num_at_once / rate - answer_s, demand.prefill_s)
    return rate, ttft_s, tpot_s


@dataclass(frozen=True, slots=True)
class _Known:
    """Good requests a second, with so many at once, and when that was."""

    achieved: float
    at_once: float
    at: float


@dataclass(frozen=True, slots=True)
class _Refuted:
    """It is not tried for so long from `at` on, with about so many requests at once.

    `is_too_slow`: nor with more of them.
    """

    for_s: float
    at_once: float
    at: float
    is_too_slow: bool = False

    def holds(self, at_once: float, now: float) -> bool:
        """Whether it is not to be tried now."""
        if now >= self.at + self.for_s:
            return False
        return _is_alike(self.at_once, min(at_once, self.at_once) if self.is_too_slow else at_once)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A division of which nothing is known yet: `before` was there, with so many at once.

    It is given up if more than `most_under_way` requests are.
    """

    before: frozenset[WorkerId]
    at_once: float
    most_under_way: float

    @classmethod
    def begin(cls, before: frozenset[WorkerId], at_once: float, num_under_way: int) -> _Trial:
        """Of independent arrivals so many more come by chance: two standard deviations."""
        return cls(before, at_once, num_under_way + 2.0 * sqrt(max(1, num_under_way)))


def _is_alike(one: float, other: float) -> bool:
    return one < ALIKE * other and other < ALIKE * one


@dataclass(slots=True)
class Division:
    """One model's. `prefills` only prefill at present; empty: all do both.

    By number of prefill workers: what it achieved, `_known`, and that it was tried and left,
    `_refuted`. Owner: one thread.
    """

    limits: Limits
    prefills: frozenset[WorkerId] = frozenset()
    changed_at: float = float("-inf")
    _trial: _Trial | None = None
    _looked_at: float = float("-inf")
    _known: dict[int, _Known] = field(default_factory=dict)
    _refuted: dict[int, _Refuted] = field(default_factory=dict)

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now - self._looked_at >= LOOK_EVERY_S

    def look(self, workers: Sequence[WorkerView], load: FleetLoad, now: float) -> None:
        """Change the division of these workers, which do both parts, if that is due."""
        if not self.is_due(now):
            return
        if self._looked_at == float("-inf"):
            self.changed_at = now  # nothing is learned yet
        self._looked_at = now
        names = {worker.id for worker in workers}
        if not self.prefills <= names or len(workers) <= len(self.prefills):
            self._change(frozenset(), now)
        if len(workers) < 2:  # noqa: PLR2004 - a pair
            return
        num_under_way = sum(load.of(each.id, each.model).num_decodes for each in workers)
        if self._trial is not None and num_under_way > self._trial.most_under_way:
            self._give_up(self._trial, now)
            return
        ended, is_whole = self._find_ended(load.ended(workers[0].model), now)
        if not ended:
            return
        window_s = now - ended[0].at
        achieved = sum(map(self.limits.are_met, ended)) / window_s
        # Two standard deviations of a share of so many requests, as a rate.
        doubt = 0.0 if is_whole else sqrt(len(ended)) / window_s
        demand = _demand(ended, window_s, workers, load)
        demand = replace(demand, num_at_once=max(demand.num_at_once, num_under_way))
        rate, _, _ = predict_rate(demand, len(workers), len(self.prefills))
        demand = replace(demand, trust=min(1.0, len(ended) / window_s / rate))
        chosen = self._judge(achieved, doubt, demand, len(workers), now)
        if is_whole:
            self._trial = None
        if chosen != len(self.prefills):
            trial = None
            if self._find_known(chosen, demand.num_at_once, now) is None:
                trial = _Trial.begin(self.prefills, demand.num_at_once, num_under_way)
            self._set(chosen, workers, load, now)
            self._trial = trial

    def _find_ended(
        self, latest: Iterable[EndedRequest], now: float
    ) -> tuple[list[EndedRequest], bool]:
        """The requests that show what this division achieves, and whether of a whole window.

        None if they are too few. Closed loops come in waves: a whole window has several. Those that
        began before the division was made show something else.
        """
        ended = [each for each in latest if each.at > self.changed_at]
        if len(ended) < LEAST_ENDED:
            return [], False
        typical_s = sum(each.lasted_s for each in ended[-LEAST_ENDED:]) / LEAST_ENDED
        settled_at = self.changed_at + max(SETTLING_S, typical_s)
        whole_s = max(WINDOW_S, NUM_WAVES * typical_s)
        window_s = min(whole_s, now - settled_at)
        if window_s < typical_s:
            return [], False
        ended = [each for each in ended if each.at > now - window_s]
        # The first ones after a pause come together, and find cold caches.
        is_shown = len(ended) >= LEAST_ENDED and now - ended[0].at >= window_s / 2
        return ended if is_shown else [], window_s == whole_s

    def _judge(
        self, achieved: float, doubt: float, demand: Demand, num_workers: int, now: float
    ) -> int:
        """How many should prefill: as many as now, unless others are known, or likely, better.

        `doubt`: good requests a second by which `achieved` may be wrong.
        """
        num, at_once = len(self.prefills), demand.num_at_once
        known = self._find_known(num, at_once, now)
        if known is not None:
            achieved = (achieved + known) / 2
        self._known[num] = _Known(achieved, at_once, now)
        best, most, is_known = num, achieved + doubt, False
        for other in range(num_workers):
            refuted = self._refuted.get(other)
            if other == num or (refuted is not None and refuted.holds(at_once, now)):
                continue
            known = self._find_known(other, at_once, now)
            if known is not None:
                worth = known / BETTER
            else:
                cold = demand.without_caches() if other else demand
                worth = predict_goodput(cold, self.limits, num_workers, other) / MUCH_BETTER
            if worth > most:
                best, most, is_known = other, worth, known is not None
        if is_known:  # back: what was tried is not as good
            self._refute(at_once, now)
        return best

    def _give_up(self, trial: _Trial, now: float) -> None:
        """Requests pile up: they come faster than this division serves them."""
        self._refute(trial.at_once, now, is_too_slow=True)
        self._change(trial.before, now)

    def _refute(self, at_once: float, now: float, *, is_too_slow: bool = False) -> None:
        num = len(self.prefills)
        before = self._refuted.get(num)
        for_s = RETRY_AFTER_S if before is None else min(MOST_RETRY_AFTER_S, 2 * before.for_s)
        self._refuted[num] = _Refuted(for_s, at_once, now, is_too_slow)

    def _find_known(self, num_prefill: int, at_once: float, now: float) -> float | None:
        """What a division achieved lately, at about as many requests at once."""
        known = self._known.get(num_prefill)
        if known is None or now - known.at > KNOWN_FOR_S or not _is_alike(known.at_once, at_once):
            return None
        return known.achieved

    def _set(
        self, num_prefill: int, workers: Sequence[WorkerView], load: FleetLoad, now: float
    ) -> None:
        """The workers with the fewest answers prefill; those that do already go on."""
        by_answers = sorted(
            workers,
            key=lambda w: (w.id not in self.prefills, load.of(w.id, w.model).num_decodes),
        )
        self._change(frozenset(worker.id for worker in by_answers[:num_prefill]), now)

    def _change(self, prefills: frozenset[WorkerId], now: float) -> None:
        self.prefills, self.changed_at, self._trial = prefills, now, None


def _demand(
    ended: Sequence[EndedRequest], window_s: float, workers: Sequence[WorkerView], load: FleetLoad
) -> Demand:
    num = len(ended)
    tokens = sum(each.num_tokens for each in ended) / num
    all_tokens = tokens + sum(each.num_cached for each in ended) / num
    model = workers[0].model
    costs = load.costs(model)
    num_answer_tokens = max(1.0, sum(each.num_streamed for each in ended) / num)
    return Demand(
        num_at_once=max(1.0, sum(each.lasted_s for each in ended) / window_s),
        prefill_s=max(1e-4, costs.prefill.predict(tokens)),
        cold_prefill_s=max(1e-4, costs.prefill.predict(all_tokens)),
        handoff_s=costs.handoffs.predict_usual(tokens),
        cold_handoff_s=costs.handoffs.predict_usual(all_tokens),
        num_answer_tokens=num_answer_tokens,
        step_s=(costs.step.fixed, costs.step.each),
        most_at_once=min(find_room(each.load, ended) for each in workers),
    )


def find_room(load: WorkerLoad | None, ended: Sequence[EndedRequest]) -> float:
    """Requests like these whose KV a worker has room for at once; inf if it does not report that.

    So many that chance (two standard deviations) does not make them larger than the room.
    """
    if load is None:
        return inf
    sizes = [each.num_tokens + each.num_cached + each.num_streamed for each in ended]
    size, spread, room = fmean(sizes), pstdev(sizes), load.num_blocks * load.block_size
    # size * num + 2 * spread * sqrt(num) = room
    most = ((sqrt(spread * spread + size * room) - spread) / size) ** 2
    return max(1.0, most if load.max_running is UNSET else min(most, load.max_running))
