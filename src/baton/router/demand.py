"""What is asked of a model's workers, and what each division of labour would make of it.

`ClosedLoops` ask for more as soon as they are answered: two stations in a closed network, from the
requests under way and the learned costs. `IndependentArrivals` come as they come: no division
serves more of them, and what it can gain are the requests that are not good now.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, exp, inf, sqrt
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from msgspec import UNSET

from baton.router.load import ITL_SHARE
from baton.router.worker_activity import MOST_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import WorkerView
    from baton.router.load import EndedRequest, FleetLoad

STEEPNESS: Final = 8
NUM_ITERATIONS: Final = 12


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds within which a request is good, if it keeps its own target for gaps, too."""

    ttft_s: float
    tpot_s: float

    def are_met(self, ended: EndedRequest) -> bool:
        """Whether a request was good."""
        in_time = ended.ttft_s <= self.ttft_s and ended.tpot_s <= self.tpot_s
        return in_time and ended.kept_itl

    def share_met(self, ttft_s: float, tpot_s: float) -> float:
        """The share of requests that are good where these are the means: half at the limit."""
        return _share(ttft_s / self.ttft_s) * _share(tpot_s / self.tpot_s)


def _share(mean: float) -> float:
    return 1.0 / (1.0 + mean**STEEPNESS)


def _chance_of_at_most(most: int, mean: float) -> float:
    """That no more of independent events happen."""
    chance = found = exp(-mean)
    for num in range(1, most + 1):
        chance *= mean / num
        found += chance
    return min(1.0, found)


@dataclass(frozen=True, slots=True)
class Achieved:
    """Requests a second, and those of them that were good."""

    rate: float
    good: float

    def mean_with(self, other: Achieved) -> Achieved:
        """The mean of two measurements."""
        return Achieved((self.rate + other.rate) / 2, (self.good + other.good) / 2)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the workers: requests at once, and what one of them costs, in seconds.

    `prefill_s` and `handoff_s` are of what is not cached, `cold_prefill_s` and `cold_handoff_s` of
    whole prompts: another division begins with the caches of this one, and what workers have of a
    prompt is then not where it is needed. `step_s` of a step's answers: `(fixed, each)`. `trust` is
    the share of the predicted rate that the present division achieves: workers may share what each
    is predicted to have, processors for example, and of other divisions no better is believed.
    A worker has room for the KV of `most_at_once` requests. Beside answers a prompt is computed in
    `num_pieces` steps, each of which takes `piece_s` longer for that. `gap_limits`: targets for the
    gaps between tokens, and the share of requests with each; others have none.
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
    piece_s: float = 0.0
    num_pieces: float = 1.0
    gap_limits: tuple[tuple[float, float], ...] = ()

    def share_kept(self, step_s: float, num_prompts: float) -> float:
        """The share of requests that keep their own targets for gaps, 0 to 1.

        Beside an answer its worker computes `num_prompts` on the average, more or fewer by chance.
        """
        if not self.gap_limits:
            return 1.0
        num_may_miss = max(0, ceil((1.0 - ITL_SHARE) * (self.num_answer_tokens - 1)) - 1)
        few = _chance_of_at_most(int(num_may_miss / self.num_pieces), num_prompts)
        missed = 0.0
        for limit_s, share in self.gap_limits:
            kept = few * _share(step_s / limit_s)
            kept += (1.0 - few) * _share((step_s + self.piece_s) / limit_s)
            missed += share * (1.0 - kept)
        return max(0.0, 1.0 - missed)

    def without_caches(self) -> Demand:
        """Where prompts find nothing."""
        return replace(self, prefill_s=self.cold_prefill_s, handoff_s=self.cold_handoff_s)

    def of_division(self, num_prefill: int) -> Demand:
        """Of another division than the present one: where all do both, caches stay in use."""
        return self.without_caches() if num_prefill else self


@dataclass(frozen=True, slots=True)
class ClosedLoops:
    """As many requests come as are served, by `num_workers`; `achieved` at present."""

    demand: Demand
    limits: Limits
    achieved: Achieved
    num_workers: int

    def predict(self, num_prefill: int) -> float:
        """Good requests a second of another division, with so many workers for prefill alone."""
        demand = self.demand.of_division(num_prefill)
        return predict_goodput(demand, self.limits, self.num_workers, num_prefill)

    def value(self, achieved: Achieved) -> float:
        """Good requests a second of a division that achieved that lately."""
        return achieved.good


@dataclass(frozen=True, slots=True)
class IndependentArrivals:
    """As many requests come whatever is served: `achieved.rate`, with `num_prefill` at present."""

    demand: Demand
    limits: Limits
    achieved: Achieved
    num_workers: int
    num_prefill: int

    def predict(self, num_prefill: int) -> float:
        """As `ClosedLoops` does: what is good now, and the difference of the predicted shares."""
        rate, num_workers = self.achieved.rate, self.num_workers
        demand = self.demand.of_division(num_prefill)
        there = predict_share(demand, self.limits, num_workers, num_prefill, rate=rate)
        here = predict_share(self.demand, self.limits, num_workers, self.num_prefill, rate=rate)
        return min(rate, self.achieved.good + rate * (there - here))

    def value(self, achieved: Achieved) -> float:
        """As `ClosedLoops` does: other requests came then, of which it is the share that counts."""
        return self.achieved.rate * achieved.good / achieved.rate


Traffic: TypeAlias = ClosedLoops | IndependentArrivals


def predict_goodput(demand: Demand, limits: Limits, num_workers: int, num_prefill: int) -> float:
    """Good requests a second with so many workers for prefill alone; 0: all do both parts."""
    rate, ttft_s, tpot_s = predict_rate(demand, num_workers, num_prefill)
    step_s, num_prompts = tpot_s, 0.0
    if num_prefill == 0:
        step_s *= 1.0 - min(MOST_SHARE, rate * demand.prefill_s / num_workers)
        # Of the prompts that come meanwhile none is of the client that waits for this answer.
        of_others = max(0.0, 1.0 - num_workers / demand.num_at_once)
        num_prompts = of_others * rate * demand.num_answer_tokens * tpot_s / num_workers
    kept = demand.share_kept(step_s, num_prompts)
    return demand.trust * rate * limits.share_met(ttft_s, tpot_s) * kept


def predict_rate(demand: Demand, num_workers: int, num_prefill: int) -> tuple[float, float, float]:
    """Requests a second of closed loops, and the means of their TTFT and TPOT."""
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


def predict_share(
    demand: Demand, limits: Limits, num_workers: int, num_prefill: int, *, rate: float
) -> float:
    """The share of requests that are good if `rate` come in a second, 0 to 1.

    0 where they come faster than they would be served, or need more KV than there is room for.
    """
    num_decode = num_workers - num_prefill
    busy = rate * demand.prefill_s / (num_prefill or num_workers)
    if busy >= MOST_SHARE:
        return 0.0
    fixed, each = demand.step_s
    left = 1.0 if num_prefill else 1.0 - busy
    tokens_per_s = rate * demand.num_answer_tokens / num_decode
    # tpot_s = (fixed + each * answers) / left, where answers = tokens_per_s * tpot_s, one at least
    if each * tokens_per_s >= MOST_SHARE * left:
        return 0.0
    tpot_s = max((fixed + each) / left, fixed / (left - each * tokens_per_s))
    if tokens_per_s * tpot_s > demand.most_at_once:
        return 0.0
    waits_s = demand.prefill_s * busy / (1.0 - busy)
    ttft_s = waits_s + demand.prefill_s + (demand.handoff_s if num_prefill else 0.0)
    num_prompts = 0.0 if num_prefill else tokens_per_s * tpot_s
    return limits.share_met(ttft_s, tpot_s) * demand.share_kept(tpot_s * left, num_prompts)


def find_demand(
    ended: Sequence[EndedRequest], window_s: float, workers: Sequence[WorkerView], load: FleetLoad
) -> Demand:
    """What these requests, which ended in so many seconds, ask of a model's workers."""
    num = len(ended)
    computed = np.array([each.num_tokens for each in ended], np.float64)
    cached = np.array([each.num_cached for each in ended], np.float64)
    tokens, all_tokens = float(computed.mean()), float((computed + cached).mean())
    model = workers[0].model
    costs = load.costs(model)
    num_answer_tokens = max(1.0, sum(each.num_streamed for each in ended) / num)
    piece_tokens = fmean(min(each.max_step_tokens or inf, tokens) for each in workers)
    gap_limits = Counter(each.itl_s for each in ended if each.itl_s is not None)
    return Demand(
        num_at_once=max(1.0, sum(each.lasted_s for each in ended) / window_s),
        prefill_s=max(1e-4, float(costs.prefill.predict(computed, cached).mean())),
        cold_prefill_s=max(1e-4, float(costs.prefill.predict(computed + cached).mean())),
        handoff_s=costs.handoffs.predict_usual(tokens),
        cold_handoff_s=costs.handoffs.predict_usual(all_tokens),
        num_answer_tokens=num_answer_tokens,
        step_s=(costs.step.fixed, costs.step.each),
        most_at_once=min(find_room(each.load, ended) for each in workers),
        piece_s=float(costs.prefill.predict(piece_tokens, all_tokens - piece_tokens)),
        num_pieces=max(1.0, tokens / max(1.0, piece_tokens)),
        gap_limits=tuple((itl_s, of_it / num) for itl_s, of_it in gap_limits.items()),
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
