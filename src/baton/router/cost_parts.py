"""What each worker would add to the cost of a request: the arrays that the cost policy compares.

Times come from learned lines (`router/learning.py`), queues from what the gateway has given its
workers (`router/load.py`). `goodput` counts in units of the limits, `throughput` in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from baton.router.load import TYPICAL_ANSWER_TOKENS
from baton.router.worker_activity import MOST_SHARE, WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.router.devices import DeviceSums
    from baton.router.fleet import ModelWorkers, WorkerView
    from baton.router.load import FleetLoad, ModelCosts, Rows
    from baton.router.placement import PlacementRequest

BEYOND: Final = 10.0
"""What a unit beyond a limit counts: the request is as good as lost, but sooner is better."""
MOST_GAPS: Final = 3.0
"""Times its target that a gap of another answer counts at most. It is not lost twice: one with a
target that no worker keeps would keep all prompts away from its own."""

Objective: TypeAlias = Literal["goodput", "throughput"]
Number = TypeVar("Number", "float", "NDArray[np.float64]")
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class CostOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wanted: requests within both limits, in seconds, or as many as can be.

    `load_prefixes`: KV of a prompt's beginning may be loaded from a worker that has it cached.
    `count_stored`: what workers can load from their store need not be computed. `split_prompts`:
    two workers that have little to do may compute a long prompt together.
    """

    objective: Objective = "goodput"
    ttft_s: _Seconds = 2.0
    tpot_s: _Seconds = 0.1
    load_prefixes: bool = True
    count_stored: bool = True
    split_prompts: bool = True

    def count_ttft(self, ttft_s: Number, request: PlacementRequest) -> Number:
        """What the time to the first token counts, by the request's own limit if it has one."""
        if self.objective == "throughput":
            return ttft_s
        return bend(ttft_s / (request.ttft_s or self.ttft_s))

    def count_tpot(self, tpot_s: Number, request: PlacementRequest) -> Number:
        """What the time of a token counts, by the request's own limit if it has one."""
        if self.objective == "throughput" or request.tpot_s is None:
            return self.count_usual_tpot(tpot_s)
        return bend(tpot_s / request.tpot_s)

    def count_usual_tpot(self, tpot_s: Number) -> Number:
        """What the time of a token counts, by the limit of all."""
        if self.objective == "throughput":
            return TYPICAL_ANSWER_TOKENS * tpot_s
        return bend(tpot_s / self.tpot_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a client is expected to see, in seconds; tokens of the prompt that are not computed.

    `num_stored` of them are loaded from the store, in `load_s`. `queue_s`: for prompts before it
    and, where it computes and answers, a place among the answers; `decode_queue_s`: for a place
    after a handoff. `itl_s`: the longest gaps between tokens; None where no answer has a limit for
    them.
    """

    queue_s: float
    prefill_s: float
    handoff_s: float
    tpot_s: float
    num_cached: int = 0
    load_s: float = 0.0
    num_stored: int = 0
    decode_queue_s: float = 0.0
    itl_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        before_s = self.queue_s + self.load_s + self.prefill_s
        return before_s + self.handoff_s + self.decode_queue_s


@dataclass(frozen=True, slots=True)
class Usable:
    """Who may serve: the first `num_decodes` of `workers` may answer, those at `helpers` prefill.

    Good for `served` and `prefills`; `rows` until `load` forgets workers. `is_spread`: they are
    at more than one of the `places`. `devices`: None where no two of them share one.
    `has_trial`: the one helper is a prefill worker that is half-open, and must be tried.
    """

    served: ModelWorkers
    prefills: frozenset[WorkerId]
    load: FleetLoad
    num_forgotten: int
    workers: Sequence[WorkerView]
    ids: Sequence[WorkerId]
    num_decodes: int
    helpers: NDArray[np.intp]
    rows: Rows
    places: NDArray[np.intp]
    is_spread: bool
    devices: DeviceSums | None
    has_slow_starts: bool
    has_trial: bool

    @property
    def has_divided_labour(self) -> bool:
        """Whether no worker that answers prefills for others, and some worker does."""
        return bool(len(self.helpers) and self.helpers.min() >= self.num_decodes)


@dataclass(frozen=True, slots=True)
class Parts:
    """What each worker would add to a request's cost, as arrays `[num_workers]`.

    Of what it has not cached it loads all but `num_computed` tokens from its store; then to compute
    the prompt takes `queue_s + load_s + prefill_s`, its `before_s`, which counts `own_ttft`, and
    costs the answers there `stall`. A token of the answer takes `tpot_s`; that, and what it costs
    the answers there and prompts to come, counts `answering`, of which `keep` is for keeping what
    it has not cached. It was given its last prompt at `given_at`. `place_s`: until an answer that
    ends leaves a place there, which `queue_s` includes; None where all have places.
    `shares` are what workers in a slow start get of what they would get otherwise; None where there
    are none. `gap_s`: the longest gaps between tokens of the answer; None where none has a limit.
    """

    usable: Usable
    num_uncached: NDArray[np.float64]
    num_computed: NDArray[np.float64]
    queue_s: NDArray[np.float64]
    load_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]
    before_s: NDArray[np.float64]
    own_ttft: NDArray[np.float64]
    stall: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    answering: NDArray[np.float64]
    keep: NDArray[np.float64]
    given_at: NDArray[np.float64]
    shares: NDArray[np.float64] | None
    place_s: NDArray[np.float64] | None
    gap_s: NDArray[np.float64] | None

    def wait_after(
        self, arrives_s: NDArray[np.float64], decodes: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """How long KV that arrives then waits at each of these workers for a place."""
        if self.place_s is None:
            return np.zeros(len(decodes))
        return np.maximum(0.0, self.place_s[decodes] - arrives_s)

    def predict(
        self, pair: tuple[int, int], num_tokens: int, handoff_s: float = 0.0, wait_s: float = 0.0
    ) -> Prediction:
        """What a client will see of a prompt computed by the first, and answered by the second.

        That one has a place for the answer `wait_s` after the handoff.
        """
        first, second = pair
        return Prediction(
            float(self.queue_s[first]),
            float(self.prefill_s[first]),
            handoff_s,
            float(self.tpot_s[second]),
            num_tokens - int(self.num_uncached[first]),
            float(self.load_s[first]),
            int(self.num_uncached[first] - self.num_computed[first]),
            wait_s,
            self.predict_itl(second),
        )

    def predict_itl(self, decode: int) -> float | None:
        """`Prediction.itl_s` of an answer there."""
        return None if self.gap_s is None else float(self.gap_s[decode])


def weigh(
    usable: Usable, request: PlacementRequest, load: FleetLoad, options: CostOptions
) -> Parts:
    """All workers that may serve a request, each by itself."""
    now, rows, costs = request.at, usable.rows, load.costs(request.model)
    columns, num_uncached = costs.columns, _count_uncached(usable, request)
    prefill_s = costs.prefill.factors(columns.prefill_evidence[:, rows])
    num_computed, load_s = num_uncached, np.zeros(len(num_uncached))
    queue_s = np.maximum(0.0, columns.free_at[rows] - now)
    if usable.devices is not None:
        queue_s = usable.devices.sum(queue_s)
    if request.stored and options.count_stored:
        num_stored, load_s = _weigh_loads(
            usable, request, costs, num_uncached, prefill_factors=prefill_s
        )
        num_computed = num_uncached - num_stored
    num_tokens = float(request.num_prompt_tokens)
    prefill_s *= costs.prefill.predict(num_computed, num_tokens - num_computed)
    stall, usual_s, tpot_s, answering, gap_s = _weigh_answers(
        usable, costs, prefill_s, options, request=request
    )
    place_s = _find_places(usable, costs, usual_s)
    if place_s is not None:
        queue_s = np.maximum(queue_s, place_s)
    before_s = queue_s + load_s + prefill_s
    # What is stored pushes out as much, of which others would have found so large a share.
    keep_work = costs.found_share * costs.prefill.each
    if options.objective == "goodput":
        keep_work /= options.ttft_s
    keep = keep_work * costs.prefill.work(num_uncached, num_tokens - num_uncached)
    answering += keep
    shares = None
    if usable.has_slow_starts:
        shares = np.array([worker.share(now) for worker in usable.workers])
    return Parts(
        usable,
        num_uncached,
        num_computed,
        queue_s,
        load_s,
        prefill_s,
        before_s,
        options.count_ttft(before_s, request),
        stall,
        tpot_s,
        answering,
        keep,
        columns.share_at[rows],
        shares,
        place_s,
        gap_s,
    )


def _find_places(
    usable: Usable, costs: ModelCosts, pace_s: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """`place_s` of `Parts`, as `ModelCosts.place_s`; a token of an answer takes `pace_s`."""
    most = costs.columns.most_running[usable.rows]
    num_ahead = costs.columns.num_decodes[usable.rows] + 1.0 - most
    if num_ahead.max() <= 0.0:
        return None
    place_s: NDArray[np.float64] = np.maximum(0.0, num_ahead) * costs.answer_tokens * pace_s / most
    return place_s


def _count_uncached(usable: Usable, request: PlacementRequest) -> NDArray[np.float64]:
    """Tokens of the prompt that each worker would compute or load: at least one."""
    tokens, ids = float(request.num_prompt_tokens), usable.ids
    if not request.cached:
        return np.full(len(ids), tokens)
    num_cached = np.fromiter(map(request.cached.get, ids, repeat(0)), np.float64, len(ids))
    return np.maximum(min(tokens, 1.0), tokens - num_cached)


def _weigh_loads(
    usable: Usable,
    request: PlacementRequest,
    costs: ModelCosts,
    num_uncached: NDArray[np.float64],
    *,
    prefill_factors: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens that each worker loads from its store, and in what time `[num_workers]`.

    All that the store has and it has not cached, where a load takes less than to compute it; else
    none, as the worker itself decides.
    """
    ids = usable.ids
    num_stored = np.fromiter(map(request.stored.get, ids, repeat(0)), np.float64, len(ids))
    num_cached = request.num_prompt_tokens - num_uncached
    num_stored -= num_cached
    num_stored = np.maximum(0.0, np.minimum(num_stored, num_uncached - 1.0))
    load_s = costs.load.factors(costs.columns.load_evidence[:, usable.rows])
    load_s *= costs.load.predict(num_stored)
    computed_s = prefill_factors * costs.prefill.each
    computed_s *= costs.prefill.work(num_stored, num_cached)
    is_worth_it = load_s < computed_s
    return num_stored * is_worth_it, load_s * is_worth_it


def _weigh_answers(
    usable: Usable,
    costs: ModelCosts,
    prefill_s: NDArray[np.float64],
    options: CostOptions,
    *,
    request: PlacementRequest,
) -> tuple[
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64] | None,
]:
    """`stall`, a token's seconds before, `tpot_s`, `answering` without `keep`, `gap_s`: `Parts`."""
    rows, columns, step = usable.rows, costs.columns, costs.step
    step_s, num = step.factors(columns.step_evidence[:, rows]), columns.num_decodes[rows]
    before_s, after_s = step_s * step.predict(num), step_s * step.predict(num + 1)
    share = columns.prefill_share[rows] * np.exp((columns.share_at[rows] - request.at) / WINDOW_S)
    own_share, devices = share, usable.devices
    if devices is not None:
        num_busy, share = devices.sum(np.minimum(1.0, num)), devices.sum(share)
        before_s *= np.maximum(1.0, num_busy)
        after_s *= num_busy + (num == 0)
    left = 1.0 - np.minimum(MOST_SHARE, share)
    usual_s, tpot_s = before_s / left, after_s / left
    own = options.count_tpot(tpot_s, request)
    if options.objective == "throughput":
        stall, slowing = num * prefill_s, num * (tpot_s - usual_s) * TYPICAL_ANSWER_TOKENS
    else:
        limit = options.tpot_s
        usual, busy = bend(usual_s / limit), np.minimum(MOST_SHARE, share + prefill_s / WINDOW_S)
        # The share is of some seconds; over a whole answer no token waits for more than its part.
        stalled_s = np.minimum(before_s / (1.0 - busy), usual_s + prefill_s / costs.answer_tokens)
        stall = num * (bend(stalled_s / limit) - usual)
        slowed = own if request.tpot_s is None else bend(tpot_s / limit)
        slowing = num * (slowed - usual)
    if devices is not None:
        # A prompt delays all answers of its device; an idle worker that gets one slows the others.
        stall = devices.sum(stall)
        num_busy = np.maximum(1.0, devices.sum(np.minimum(1.0, num)))
        with_one_more_s = usual_s * (1.0 + 1.0 / num_busy)
        slower = options.count_usual_tpot(with_one_more_s) - options.count_usual_tpot(usual_s)
        slowing += (num == 0) * devices.sum(num * slower)
    times_s = before_s, after_s, own_share, prefill_s
    gap_s, stalled, answered = _weigh_gaps(usable, costs, times_s, options, request=request)
    return stall + stalled, usual_s, tpot_s, own + slowing + answered, gap_s


def _weigh_gaps(
    usable: Usable,
    costs: ModelCosts,
    times_s: tuple[NDArray[np.float64], ...],
    options: CostOptions,
    *,
    request: PlacementRequest,
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | float, NDArray[np.float64] | float]:
    """`gap_s` of `Parts`, and what limits of gaps add to its `stall` and `answering`.

    `times_s`: of a step without prompts, as it is and with one answer more; the share of a worker's
    time that prompts took in `WINDOW_S`, and the seconds of this one. In a gap there is besides a
    step the piece of a prompt that is computed in it: as many tokens as a step has at most, and no
    more than all those prompts. What is beyond a limit counts `BEYOND` times, of answers that are
    under way up to `MOST_GAPS` of it; all of these at a worker that have a limit are taken to have
    the least, or a step's time if that is longer.
    """
    rows, columns, (before_s, after_s, share, own_s) = usable.rows, costs.columns, times_s
    are_limited = request.itl_s is not None or columns.num_limited_of_all
    if options.objective == "throughput" or not are_limited:
        return None, 0.0, 0.0
    num_limited, limit_s = columns.num_limited[rows], columns.gap_limit_s[rows]
    limit_s = np.maximum(limit_s, before_s)
    lately_s = WINDOW_S * np.minimum(1.0, share)
    piece_s = costs.prefill.factors(columns.prefill_evidence[:, rows])
    step_tokens = columns.step_tokens[rows]
    num_before = np.maximum(0.0, request.num_prompt_tokens - step_tokens)  # of its last piece
    piece_s *= costs.prefill.predict(step_tokens, num_before)
    now_s = np.minimum(lately_s, piece_s)
    gap_s = after_s + now_s
    usual = without = _count_beyond(before_s + now_s, limit_s)
    if usable.has_divided_labour:  # who only decodes is to compute none, whatever it did lately
        without, lately_s = _count_beyond(before_s, limit_s), np.zeros(len(before_s))
    with_it_s = np.minimum(lately_s + own_s, piece_s)
    stall = num_limited * (_count_beyond(before_s + with_it_s, limit_s) - without)
    answering = num_limited * (_count_beyond(gap_s, limit_s) - usual)
    if request.itl_s is not None:
        answering += _count_beyond(gap_s, request.itl_s, most=np.inf)
    return gap_s, stall, answering


def _count_beyond(
    gap_s: NDArray[np.float64], limit_s: NDArray[np.float64] | float, most: float = MOST_GAPS
) -> NDArray[np.float64]:
    times = np.minimum(gap_s / limit_s, most)
    counted: NDArray[np.float64] = BEYOND * np.maximum(0.0, times - 1.0)
    return counted


def bend(share: Number) -> Number:
    """A figure in units of its limit, with what is beyond it counted `BEYOND` times."""
    if isinstance(share, float):
        return share + BEYOND * max(0.0, share - 1.0)
    return np.maximum(share, (1.0 + BEYOND) * share - BEYOND)
