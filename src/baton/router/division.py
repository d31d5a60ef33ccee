"""How many workers of both roles only prefill at present, and the others only decode.

A division of labour is a decision for the fleet: where all workers are equally busy with prompts,
no single request gains by its first step, though all gain once it is made. So it is looked at now
and then: what the present division achieves is counted, what another one would achieve is predicted
for the traffic as it comes (`router/demand.py`).

    stays ◄── no other is predicted to be `MUCH_BETTER`, or known to be `BETTER`, at such a load
      │       (before a whole window has passed: by more than chance)
      │
      ├─► another division, until it is known what that achieves
      │     │ it achieves more: it stays
      │     │ it does not: back, and it is not tried again at such a load for a while
      │     │ requests pile up meanwhile: back at once, and not again at such a load or a higher one
      │     ├ more requests come than before: that is another load, which refutes nothing
      │     └ none come for a while: what was counted by then decides, if that is enough
      │
      ├─► where fewer than `FEW` are good: replicas or a neighbour, of which nothing is known at
      │   such a load, though no more is predicted of it. The same, but it must be `BETTER` to stay
      │
      └─► another load comes, of which something is known: the division that was best then, at once
          (closed loops; another number at once, or prompts of another length)

What is known of which load is in `router/division_memory.py`. Pure: times are given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Final

from baton.router.demand import (
    Achieved,
    ClosedLoops,
    IndependentArrivals,
    Limits,
    find_demand,
    predict_rate,
)
from baton.router.division_memory import NO_LOAD, DivisionMemory, LoadShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.ids import WorkerId
    from baton.router.demand import Traffic
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
LEAST_INDEPENDENT: Final = 32
"""The same of independent arrivals: the share of good ones is what counts, and chance moves it."""
MUCH_BETTER: Final = 1.1
BETTER: Final = 1.05
"""What must be predicted, or must be known, of another division."""
FEW: Final = 0.5
"""The share of good requests below which a trial can cost little, and predictions are not needed:
they are least exact where all is near its limit."""
PAUSE_S: Final = 3.0
"""Without a request."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A division of which nothing is known yet: `before` was there, under this load.

    It is given up if more than `most_under_way` requests are. `predicted`: good requests a second;
    None: it is tried because few were good, whatever is predicted.
    At `began_at` the gateway had begun `num_begun` requests, `rate` a second.
    """

    before: frozenset[WorkerId]
    load: LoadShape
    most_under_way: float
    predicted: float | None
    began_at: float
    num_begun: int
    rate: float

    def find_least(self, before: float) -> float:
        """It stays if it achieves more than this: without a prediction it must be better."""
        return before * BETTER if self.predicted is None else before / BETTER

    def share_of(self, achieved: float) -> float:
        """The share of what was predicted that this is, 1 at most."""
        return 1.0 if self.predicted is None else min(1.0, achieved / self.predicted)

    def has_grown(self, num_begun: int, now: float) -> bool:
        """Whether more have come since than before, by more than two standard deviations."""
        expected = self.rate * (now - self.began_at)
        return num_begun - self.num_begun > expected + 2.0 * sqrt(max(1.0, expected))


def _most_by_chance(num_under_way: int) -> float:
    """Of independent arrivals so many are under way by chance: two standard deviations more."""
    return num_under_way + 2.0 * sqrt(max(1, num_under_way))


@dataclass(slots=True)
class Division:
    """One model's. `prefills` only prefill at present; empty: all do both.

    Requests that began before `_shown_since` show something else. `_seen` is the load at the last
    look, `_judged` when it was last judged; at `_alike_at` the two were alike. Owner: one thread.
    """

    limits: Limits
    prefills: frozenset[WorkerId] = frozenset()
    _shown_since: float = float("-inf")
    _trial: _Trial | None = None
    _looked_at: float = float("-inf")
    _seen: LoadShape = NO_LOAD
    _judged: LoadShape | None = None
    _alike_at: float = float("-inf")
    _has_paused: bool = False
    _memory: DivisionMemory = field(default_factory=DivisionMemory)
    _memories: defaultdict[int, DivisionMemory] = field(
        default_factory=lambda: defaultdict(DivisionMemory)
    )
    """By the number of workers: what they achieve together is not what more or fewer do."""

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now - self._looked_at >= LOOK_EVERY_S

    def look(self, workers: Sequence[WorkerView], load: FleetLoad, now: float) -> None:
        """Change the division of these workers, which do both parts, if that is due."""
        if not self.is_due(now):
            return
        looked_at, self._looked_at = self._looked_at, now
        memory = self._memories[len(workers)]
        if memory is not self._memory:  # together they achieve something else from now on
            self._memory = memory
            self._change(self.prefills, now)
        names = {worker.id for worker in workers}
        if not self.prefills <= names or len(workers) <= len(self.prefills):
            self._change(frozenset(), now)
        if len(workers) < 2:  # noqa: PLR2004 - a pair
            return
        num_under_way = sum(load.of(each.id, each.model).num_decodes for each in workers)
        arrivals = load.costs(workers[0].model).arrivals
        if num_under_way == 0 and now - looked_at > PAUSE_S:
            self._has_paused = True
            if self._trial is not None:
                self._break_off(self._trial, now)
        seen = self._seen
        self._seen = LoadShape(arrivals.most_under_way, arrivals.num_prompt_tokens)
        if self._trial is not None and num_under_way > self._trial.most_under_way:
            has_grown = self._trial.has_grown(arrivals.num_begun, now)
            self._give_up(self._trial, now, has_grown=has_grown)
        elif not arrivals.are_closed_loops or self._seen.is_like(self._judged or self._seen):
            self._alike_at = now
            self._look_at_ended(num_under_way, workers, load, now)
        elif (
            (self._has_paused and num_under_way)
            or self._seen.is_like(seen)
            or self._memory.find_best(self._seen, now) is not None
        ):
            self._begin_load(workers, load, now)
        self._has_paused = self._has_paused and num_under_way == 0

    def _begin_load(self, workers: Sequence[WorkerView], load: FleetLoad, now: float) -> None:
        """Another load is here: what was best at such a load, if that is known, takes over."""
        self._judged, self._trial = self._seen, None
        if not self._has_paused:
            self._shown_since = max(self._shown_since, self._alike_at)
        self._alike_at = now
        here = self._memory.find(len(self.prefills), self._seen, now)
        found = self._memory.find_best(self._seen, now)
        if found is None:
            return
        num_prefill, best = found
        if num_prefill == len(self.prefills) or num_prefill >= len(workers):
            return
        if best.good > (FEW * best.rate if here is None else BETTER * here.good):
            self._set(num_prefill, workers, load, now)

    def _look_at_ended(
        self, num_under_way: int, workers: Sequence[WorkerView], load: FleetLoad, now: float
    ) -> None:
        """Judge the present division by what it achieved, if enough requests have ended."""
        costs = load.costs(workers[0].model)
        least = LEAST_ENDED if costs.arrivals.are_closed_loops else LEAST_INDEPENDENT
        ended, is_whole = self._find_ended(costs.ended, now, least)
        if not ended:
            return
        chance = self._find_deviation(ended, now)
        doubt = 0.0 if is_whole else chance
        traffic = self._find_traffic(ended, workers, load, num_under_way=num_under_way, now=now)
        chosen, shape = self._judge(traffic, doubt, now), self._shape_of(traffic)
        predicted: float | None = None
        if chosen != len(self.prefills):
            predicted = traffic.predict(chosen)
        elif self._trial is None or is_whole:
            chosen = self._find_unknown(traffic, chance, now)
        self._judged = self._seen
        if is_whole:
            self._trial = None
        if chosen != len(self.prefills):
            before = self.prefills if self._trial is None else self._trial.before
            trial = None
            if self._memory.find(chosen, shape, now) is None:
                most, num_begun = _most_by_chance(num_under_way), costs.arrivals.num_begun
                rate = traffic.achieved.rate
                trial = _Trial(before, shape, most, predicted, now, num_begun, rate)
            self._set(chosen, workers, load, now)
            self._trial = trial

    def _find_deviation(self, ended: Sequence[EndedRequest], now: float) -> float:
        """Two standard deviations of the good requests among so many, as a rate.

        Where most are good their rate counts, which varies too: as if only half were good.
        """
        num = len(ended)
        share = min(0.5, (sum(map(self.limits.are_met, ended)) + 1) / (num + 2))
        return 2.0 * sqrt(share * (1.0 - share) * num) / (now - ended[0].at)

    def _find_traffic(
        self,
        ended: Sequence[EndedRequest],
        workers: Sequence[WorkerView],
        load: FleetLoad,
        *,
        num_under_way: int,
        now: float,
    ) -> Traffic:
        """How requests come, and what this division achieves, which is known from now on."""
        num_prefill, window_s = len(self.prefills), now - ended[0].at
        rate = len(ended) / window_s
        achieved = Achieved(rate, sum(map(self.limits.are_met, ended)) / window_s)
        demand = find_demand(ended, window_s, workers, load)
        arrivals = load.costs(workers[0].model).arrivals
        # Of closed loops their number is known; the mean is of those that ended in the window.
        at_once = max(demand.num_at_once, num_under_way)
        if arrivals.are_closed_loops:
            at_once = self._seen.num_at_once
        demand = replace(demand, num_at_once=at_once)
        shape = replace(self._seen, num_at_once=at_once)
        known = self._memory.find(num_prefill, shape, now)
        if known is not None:
            achieved = achieved.mean_with(known)
        self._memory.note(num_prefill, achieved, shape, now)
        if not arrivals.are_closed_loops:
            return IndependentArrivals(demand, self.limits, achieved, len(workers), num_prefill)
        predicted, _, _ = predict_rate(demand, len(workers), num_prefill)
        demand = replace(demand, trust=min(1.0, rate / predicted))
        return ClosedLoops(demand, self.limits, achieved, len(workers))

    def _shape_of(self, traffic: Traffic) -> LoadShape:
        """The load that is judged."""
        return replace(self._seen, num_at_once=traffic.demand.num_at_once)

    def _find_ended(
        self, latest: Iterable[EndedRequest], now: float, least: int
    ) -> tuple[list[EndedRequest], bool]:
        """The requests that show what this division achieves, and whether of a whole window.

        `least` or more; empty if they are too few. Closed loops come in waves: a whole window has
        several. Those that began before the division was made, or the load, show something else.
        """
        ended = [each for each in latest if each.at - each.lasted_s > self._shown_since]
        if len(ended) < least:
            return [], False
        typical_s = sum(each.lasted_s for each in ended[-LEAST_ENDED:]) / LEAST_ENDED
        whole_s, least_s = max(WINDOW_S, NUM_WAVES * typical_s), typical_s
        if least > LEAST_ENDED:
            whole_s = least_s = max(whole_s, now - ended[-least].at)
        window_s = min(whole_s, now - self._shown_since - max(SETTLING_S, typical_s))
        if window_s < least_s:
            return [], False
        ended = [each for each in ended if each.at >= now - window_s]
        # The first ones after a pause come together, and find cold caches.
        is_shown = len(ended) >= least and now - ended[0].at >= window_s / 2
        return ended if is_shown else [], window_s == whole_s

    def _judge(self, traffic: Traffic, doubt: float, now: float) -> int:
        """How many should prefill: as many as now, unless others are known, or likely, better.

        `doubt`: good requests a second by which what is achieved may be wrong.
        """
        num, shape = len(self.prefills), self._shape_of(traffic)
        achieved = traffic.value(traffic.achieved)
        best, most, is_known = num, achieved + doubt, False
        refuted = self._memory.find_refuted(shape, now)
        # Where one division was predicted to be better than it is, so are others.
        believed = min(refuted.values(), default=1.0)
        for other in range(traffic.num_workers):
            if other == num or other in refuted:
                continue
            known = self._memory.find(other, shape, now)
            if known is not None:
                worth = traffic.value(known) / BETTER
            else:
                worth = traffic.predict(other) * (believed if other else 1.0) / MUCH_BETTER
            if worth > most:
                best, most, is_known = other, worth, known is not None
        trial = self._trial
        if not is_known and trial is not None and doubt == 0.0:
            known = self._memory.find(len(trial.before), shape, now)
            if known is not None and achieved <= trial.find_least(traffic.value(known)):
                best, is_known = len(trial.before), True
        if is_known:  # back: what was tried is not as good
            share = 1.0 if trial is None else trial.share_of(achieved)
            self._memory.refute(num, shape, now, share=share)
        return best

    def _find_unknown(self, traffic: Traffic, chance: float, now: float) -> int:
        """Where few are good: replicas or a neighbour, if nothing is known of it at such a load.

        `chance`: good requests a second that there may be more. Of those divisions the most
        promising one, else the present one. For closed loops alone: of independent arrivals no
        division serves more, and where few are good they pile up.
        """
        num, shape, achieved = len(self.prefills), self._shape_of(traffic), traffic.achieved
        if not isinstance(traffic, ClosedLoops) or achieved.good + chance >= FEW * achieved.rate:
            return num
        refuted = self._memory.find_refuted(shape, now)
        unknown = [
            other
            for other in {0, num - 1, num + 1} - {num}
            if 0 <= other < traffic.num_workers
            and other not in refuted
            and self._memory.find(other, shape, now) is None
        ]
        return max(unknown, key=traffic.predict, default=num)

    def _give_up(self, trial: _Trial, now: float, *, has_grown: bool) -> None:
        """Requests pile up: they come faster than this division serves them, or than before."""
        if not has_grown:
            self._memory.refute(len(self.prefills), trial.load, now, is_too_slow=True)
        self._change(trial.before, now)

    def _break_off(self, trial: _Trial, now: float) -> None:
        """No more requests come: what is known by now decides which division waits for others."""
        num = len(self.prefills)
        found = self._memory.find(num, trial.load, now)
        before = self._memory.find(len(trial.before), trial.load, now)
        if found is None or before is None:
            self._change(trial.before, now)
        elif found.good <= before.good:
            share = trial.share_of(found.good)
            self._memory.refute(num, trial.load, now, share=share)
            self._change(trial.before, now)
        self._trial = None

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
        self.prefills, self._shown_since, self._trial = prefills, now, None
