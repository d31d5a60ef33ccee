"""How many workers of both roles only prefill at present, and the others only decode.

A division of labour is a decision for the fleet: where all workers are equally busy with prompts,
no single request gains by its first step, though all gain once it is made. So it is looked at now
and then: what the present division achieves is counted, what another one would achieve is predicted
for the traffic as it comes (`router/demand.py`).

    stays ◄── no other is predicted to be `MUCH_BETTER`, or known to be `BETTER`, at such a load
      │       (before a whole window has passed: by more than chance)
      │
      └─► another division, until it is known what that achieves
            │ it achieves more: it stays
            │ it does not: back, and it is not tried again at such a load for a while
            │ requests pile up meanwhile: back at once, and not again at such a load or a higher one
            └ more requests come than before, or none for a while: that was another load, which
              refutes nothing

Pure: times are given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Final, TypeVar

from baton.router.demand import (
    Achieved,
    ClosedLoops,
    IndependentArrivals,
    Limits,
    find_demand,
    predict_rate,
)

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
"""What must be predicted, or must be known of the last `KNOWN_FOR_S`, of another division."""
KNOWN_FOR_S: Final = 120.0
RETRY_AFTER_S: Final = 60.0
MOST_RETRY_AFTER_S: Final = 3600.0
ALIKE: Final = 1.5
"""Numbers of requests at once, one over the other."""
MOST_LOADS: Final = 8
"""For which it is remembered what a division achieved."""
PAUSE_S: Final = 3.0
"""Without a request."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What it achieved with so many at once, and when that was."""

    achieved: Achieved
    at_once: float
    at: float


@dataclass(frozen=True, slots=True)
class _Refuted:
    """It is not tried for so long from `at` on, with about so many requests at once.

    `is_too_slow`: nor with more of them. It achieved `share` of what was predicted.
    """

    for_s: float
    at_once: float
    at: float
    is_too_slow: bool = False
    share: float = 1.0

    def holds(self, at_once: float, now: float) -> bool:
        """Whether it is not to be tried now."""
        if now >= self.at + self.for_s:
            return False
        return _is_alike(self.at_once, min(at_once, self.at_once) if self.is_too_slow else at_once)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A division of which nothing is known yet: `before` was there, with so many at once.

    It is given up if more than `most_under_way` requests are. `predicted`: good requests a second.
    At `began_at` the gateway had begun `num_begun` requests, `rate` a second.
    """

    before: frozenset[WorkerId]
    at_once: float
    most_under_way: float
    predicted: float
    began_at: float
    num_begun: int
    rate: float

    def has_grown(self, num_begun: int, now: float) -> bool:
        """Whether more have come since than before, by more than two standard deviations."""
        expected = self.rate * (now - self.began_at)
        return num_begun - self.num_begun > expected + 2.0 * sqrt(max(1.0, expected))


def _most_by_chance(num_under_way: int) -> float:
    """Of independent arrivals so many are under way by chance: two standard deviations more."""
    return num_under_way + 2.0 * sqrt(max(1, num_under_way))


def _is_alike(one: float, other: float) -> bool:
    return one < ALIKE * other and other < ALIKE * one


_Noted = TypeVar("_Noted", _Known, _Refuted)


def _note(noted: list[_Noted], new: _Noted) -> None:
    """In place of what was noted of such a load, or of the one that was seen longest ago."""
    noted[:] = [each for each in noted if not _is_alike(each.at_once, new.at_once)]
    noted.append(new)
    del noted[:-MOST_LOADS]


@dataclass(slots=True)
class Division:
    """One model's. `prefills` only prefill at present; empty: all do both.

    By number of prefill workers, for each of the latest loads: what it achieved, `_known`, and that
    it was tried and left, `_refuted`. Owner: one thread.
    """

    limits: Limits
    prefills: frozenset[WorkerId] = frozenset()
    changed_at: float = float("-inf")
    _trial: _Trial | None = None
    _looked_at: float = float("-inf")
    _known: defaultdict[int, list[_Known]] = field(default_factory=lambda: defaultdict(list))
    _refuted: defaultdict[int, list[_Refuted]] = field(default_factory=lambda: defaultdict(list))

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now - self._looked_at >= LOOK_EVERY_S

    def look(self, workers: Sequence[WorkerView], load: FleetLoad, now: float) -> None:
        """Change the division of these workers, which do both parts, if that is due."""
        if not self.is_due(now):
            return
        if self._looked_at == float("-inf"):
            self.changed_at = now  # nothing is learned yet
        looked_at, self._looked_at = self._looked_at, now
        names = {worker.id for worker in workers}
        if not self.prefills <= names or len(workers) <= len(self.prefills):
            self._change(frozenset(), now)
        if len(workers) < 2:  # noqa: PLR2004 - a pair
            return
        num_under_way = sum(load.of(each.id, each.model).num_decodes for each in workers)
        costs = load.costs(workers[0].model)
        num_begun = costs.arrivals.num_begun
        if self._trial is not None and num_under_way == 0 and now - looked_at > PAUSE_S:
            self._break_off(self._trial, now)
        if self._trial is not None and num_under_way > self._trial.most_under_way:
            self._give_up(self._trial, now, has_grown=self._trial.has_grown(num_begun, now))
            return
        least = LEAST_ENDED if costs.arrivals.are_closed_loops else LEAST_INDEPENDENT
        ended, is_whole = self._find_ended(costs.ended, now, least)
        if not ended:
            return
        # Two standard deviations of a share of so many requests, as a rate.
        doubt = 0.0 if is_whole else sqrt(len(ended)) / (now - ended[0].at)
        traffic = self._find_traffic(ended, workers, load, num_under_way=num_under_way, now=now)
        chosen, at_once = self._judge(traffic, doubt, now), traffic.demand.num_at_once
        if is_whole:
            self._trial = None
        if chosen != len(self.prefills):
            trial = None
            if self._find_known(chosen, at_once, now) is None:
                trial = _Trial(
                    self.prefills,
                    at_once,
                    _most_by_chance(num_under_way),
                    traffic.predict(chosen),
                    now,
                    num_begun,
                    traffic.achieved.rate,
                )
            self._set(chosen, workers, load, now)
            self._trial = trial

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
        at_once = max(demand.num_at_once, num_under_way)
        demand = replace(demand, num_at_once=at_once)
        known = self._find_known(num_prefill, at_once, now)
        if known is not None:
            achieved = achieved.mean_with(known)
        _note(self._known[num_prefill], _Known(achieved, at_once, now))
        arrivals = load.costs(workers[0].model).arrivals
        if not arrivals.are_closed_loops:
            return IndependentArrivals(demand, self.limits, achieved, len(workers), num_prefill)
        predicted, _, _ = predict_rate(demand, len(workers), num_prefill)
        demand = replace(demand, trust=min(1.0, rate / predicted))
        return ClosedLoops(demand, self.limits, achieved, len(workers))

    def _find_ended(
        self, latest: Iterable[EndedRequest], now: float, least: int
    ) -> tuple[list[EndedRequest], bool]:
        """The requests that show what this division achieves, and whether of a whole window.

        `least` or more; empty if they are too few. Closed loops come in waves: a whole window has
        several. Those that began before the division was made show something else.
        """
        ended = [each for each in latest if each.at > self.changed_at]
        if len(ended) < least:
            return [], False
        typical_s = sum(each.lasted_s for each in ended[-LEAST_ENDED:]) / LEAST_ENDED
        whole_s, least_s = max(WINDOW_S, NUM_WAVES * typical_s), typical_s
        if least > LEAST_ENDED:
            whole_s = least_s = max(whole_s, now - ended[-least].at)
        window_s = min(whole_s, now - self.changed_at - max(SETTLING_S, typical_s))
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
        num, at_once = len(self.prefills), traffic.demand.num_at_once
        achieved = traffic.value(traffic.achieved)
        best, most, is_known = num, achieved + doubt, False
        held = {
            n: each
            for n, noted in self._refuted.items()
            for each in noted
            if each.holds(at_once, now)
        }
        # Where one division was predicted to be better than it is, so are others.
        believed = min((each.share for each in held.values()), default=1.0)
        for other in range(traffic.num_workers):
            if other == num or other in held:
                continue
            known = self._find_known(other, at_once, now)
            if known is not None:
                worth = traffic.value(known) / BETTER
            else:
                worth = traffic.predict(other) * (believed if other else 1.0) / MUCH_BETTER
            if worth > most:
                best, most, is_known = other, worth, known is not None
        if is_known:  # back: what was tried is not as good
            share = 1.0 if self._trial is None else min(1.0, achieved / self._trial.predicted)
            self._refute(at_once, now, share=share)
        return best

    def _give_up(self, trial: _Trial, now: float, *, has_grown: bool) -> None:
        """Requests pile up: they come faster than this division serves them, or than before."""
        if not has_grown:
            self._refute(trial.at_once, now, is_too_slow=True)
        self._change(trial.before, now)

    def _break_off(self, trial: _Trial, now: float) -> None:
        """No more requests come: what is known by now decides which division waits for others."""
        found = self._find_known(len(self.prefills), trial.at_once, now)
        before = self._find_known(len(trial.before), trial.at_once, now)
        if found is None or before is None or found.good <= before.good:
            self._change(trial.before, now)
        self._trial = None

    def _refute(
        self, at_once: float, now: float, *, is_too_slow: bool = False, share: float = 1.0
    ) -> None:
        noted = self._refuted[len(self.prefills)]
        before = max((n.for_s for n in noted if _is_alike(n.at_once, at_once)), default=0.0)
        for_s = min(MOST_RETRY_AFTER_S, max(RETRY_AFTER_S, 2 * before))
        _note(noted, _Refuted(for_s, at_once, now, is_too_slow, share))

    def _find_known(self, num_prefill: int, at_once: float, now: float) -> Achieved | None:
        """What a division achieved lately, at about as many requests at once."""
        for known in reversed(self._known[num_prefill]):
            if now - known.at <= KNOWN_FOR_S and _is_alike(known.at_once, at_once):
                return known.achieved
        return None

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
