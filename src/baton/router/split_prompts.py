"""A long prompt that is split between two workers, which compute at the same time.

The first computes tokens `[0, k)` and hands over each layer's KV as it is computed; the second
computes the tokens from `k` on, each layer as soon as it has that layer's KV, and answers. So it
follows the first by one layer:

    TTFT = the longer queue + max(first + second / layers, first / layers + second) + the handoff's
           exposed part,    of what each takes for its own tokens

Together they compute longer than one alone would. What other prompts wait for that counts, by the
share of its time that each computes prompts: fleets that are busy split none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, Final

from baton.protocol.worker_http import MAX_SPLIT_TOKENS, SPLIT_UNIT
from baton.router.cost_parts import Prediction
from baton.router.topology import Distance
from baton.router.worker_activity import MOST_SHARE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.router.cost_parts import CostOptions, Parts
    from baton.router.learning import LearnedLine
    from baton.router.load import FleetLoad
    from baton.router.placement import PlacementRequest
    from baton.router.worker_activity import LoadColumns, WorkerActivity

LEAST_SPLIT: Final = 512
"""Tokens that a worker must have to compute alone: of fewer, half is hardly sooner than all."""
MOST_ASKED: Final = 3
"""Workers with the shortest queues, of which the first that can takes its part."""
LEAST_SAVED: Final = 0.15
"""What of the time to the first token, as one worker would have it, must be saved."""
_LEAST_TOKEN_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Split:
    """The worker at `first` of `Usable.workers` hands over `num_prefix` tokens.

    Of these it has not cached `num_computed`.
    """

    first: int
    num_prefix: int
    num_computed: int
    prediction: Prediction
    cost: float


def find_split(
    parts: Parts, second: int, request: PlacementRequest, load: FleetLoad, *, options: CostOptions
) -> Split | None:
    """How a prompt is best split between the worker at `second`, which answers, and another.

    None where it cannot be. The other one is the one with the shortest queue.
    """
    usable, costs = parts.usable, load.costs(request.model)
    first = _find_first(parts, second, costs.handoffs.places.distances)
    if first is None:
        return None
    prefill, decode = usable.workers[first], usable.workers[second]
    both = load.of(prefill.id, request.model), load.of(decode.id, request.model)
    num_tokens = float(request.num_prompt_tokens)
    uncached = float(parts.num_uncached[first]), float(parts.num_uncached[second])
    points = _list_points(num_tokens, uncached, both, costs.columns)
    if not points:
        return None
    pair = _Pair(
        line=costs.prefill,
        factors=(
            both[0].prefill_cost.factor,
            both[1].prefill_cost.factor * costs.splits.slowness(request.at),
        ),
        num_tokens=num_tokens,
        num_cached=num_tokens - uncached[0],
        lead=1.0 / decode.num_landing_layers,
        alone_s=float(parts.prefill_s[second]),
        busy=min(MOST_SHARE, max(each.prefill_share(request.at) for each in both)),
    )
    even = SPLIT_UNIT * round(pair.find_even() / SPLIT_UNIT)
    num_prefix = min(max(points[0], even), points[-1])
    first_s, both_s, others_s = pair.weigh(num_prefix)
    taking = costs.handoffs.cost_of(prefill, decode)
    queue_s = float(max(parts.queue_s[first], parts.queue_s[second]))
    handoff_s = taking.predict(num_prefix - num_tokens + uncached[1])
    cost = options.count_ttft(queue_s + both_s + handoff_s + others_s, request)
    cost += first_s * float(parts.stall[first] / parts.prefill_s[first])
    cost += num_prefix * float(parts.keep[first] / num_tokens) + float(parts.answering[second])
    if parts.shares is not None:
        cost /= float(min(parts.shares[first], parts.shares[second]))
    tpot_s, itl_s = float(parts.tpot_s[second]), parts.predict_itl(second)
    num_cached = int(num_tokens - uncached[0])
    seen = Prediction(queue_s, both_s, handoff_s, tpot_s, num_cached, itl_s=itl_s)
    return Split(first, num_prefix, num_prefix - num_cached, seen, cost)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two workers for one prompt of `num_tokens`; the first has cached `num_cached` of them.

    What either takes to compute is its factor times the line; the second one follows by `lead` of
    that. Alone it would take `alone_s`. Prompts take the share `busy` of the busier one's time.
    """

    line: LearnedLine
    factors: tuple[float, float]
    num_tokens: float
    num_cached: float
    lead: float
    alone_s: float
    busy: float

    def find_even(self) -> float:
        """After how many tokens to split, so that either computes as long: both are done soonest.

        The first one's work `w`, and that of the rest, are parts of one whole:
        `f (fixed + each (w - cached)) = s (fixed + each (whole - w))`, solved for `w`, and that for
        the number of tokens: `w = tokens + bend / 2 * tokens ** 2`.
        """
        line, (first, second) = self.line, self.factors
        fixed = (second - first) * line.fixed / max(line.each, _LEAST_TOKEN_S)
        whole = second * line.work(self.num_tokens) + first * line.work(self.num_cached)
        work = max(0.0, (whole + fixed) / (first + second))
        return 2.0 * work / (1.0 + sqrt(1.0 + 2.0 * line.bend * work))

    def weigh(self, num_prefix: int) -> tuple[float, float, float]:
        """Seconds of the first one, until both are done, and that other prompts wait longer."""
        line, (first, second), lead = self.line, self.factors, self.lead
        first_s = first * line.predict(num_prefix - self.num_cached, self.num_cached)
        second_s = second * line.predict(self.num_tokens - num_prefix, float(num_prefix))
        both_s = max(first_s + lead * second_s, lead * first_s + second_s)
        # The second one waits for the first layer only.
        more_s = max(0.0, (1.0 - lead) * first_s + both_s - self.alone_s)
        return first_s, both_s, more_s * (self.busy / (1.0 - self.busy))


def _find_first(parts: Parts, second: int, distances: NDArray[np.int8]) -> int | None:
    """The worker that can take the first part, and has least to do before: `second` takes the rest.

    Not one on the same device, nor one of another kind: both take their part in one step.
    """
    usable, decode = parts.usable, parts.usable.workers[second]
    own_tokens, place = parts.num_computed[second], usable.places[second]
    is_long = own_tokens == parts.num_uncached[second] and own_tokens >= LEAST_SPLIT
    helpers = usable.helpers[usable.helpers != second]
    if not (is_long and decode.num_landing_layers > 1 and len(helpers)):
        return None
    for first in helpers[parts.queue_s[helpers].argsort(kind="stable")[:MOST_ASKED]].tolist():
        prefill = usable.workers[first]
        is_apart = distances[usable.places[first], place] != Distance.SAME_DEVICE
        is_alike = prefill.num_landing_layers == decode.num_landing_layers
        if is_apart and is_alike and decode.why_not_from(prefill) is None:
            return int(first)
    return None


def _list_points(
    num_tokens: float,
    uncached: tuple[float, float],
    pair: tuple[WorkerActivity, WorkerActivity],
    columns: LoadColumns,
) -> range:
    """How many tokens the first of two workers may hand over to the second.

    More than either has cached. Both compute their part in one step: else the second one has
    nothing to follow. Beside answers the first one has steps of no more tokens than usual, and the
    second one does not begin before all has landed.
    """
    first, second = pair
    if second.num_decodes:
        return range(0)
    most = float(columns.step_tokens[first.row]) if first.num_decodes else MAX_SPLIT_TOKENS
    least = max(num_tokens - min(uncached) + SPLIT_UNIT, num_tokens - MAX_SPLIT_TOKENS)
    most = min(num_tokens - 2.0, num_tokens - uncached[0] + most)
    begin, end = ceil(least / SPLIT_UNIT), int(most / SPLIT_UNIT)
    return range(SPLIT_UNIT * begin, SPLIT_UNIT * end + 1, SPLIT_UNIT)
