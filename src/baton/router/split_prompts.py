"""A long prompt shared out to two workers, which compute at the same time.

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
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.router.cost_parts import Prediction
from baton.router.worker_activity import MOST_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.router.cost_parts import CostOptions, Parts
    from baton.router.learning import PromptLine
    from baton.router.load import FleetLoad
    from baton.router.placement import PlacementRequest
    from baton.router.worker_activity import LoadColumns

LEAST_SPLIT: Final = 512
"""Tokens that a worker must have to compute alone: of fewer, half is hardly sooner than all."""
SPLIT_UNIT: Final = 64
"""`k` is a multiple of it, and so of the workers' blocks: the second one's are its own, or filled
by the first."""
MOST_TRIED: Final = 16
"""Values of `k` that are compared."""
MOST_TOGETHER: Final = 8192
"""Tokens that a worker without answers computes in one step, of a prompt that it shares."""
LEAST_SAVED: Final = 0.15
"""What of the time to the first token, as one worker would have it, must be saved."""


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
    usable, num_tokens = parts.usable, float(request.num_prompt_tokens)
    decode, costs = usable.workers[second], load.costs(request.model)
    first = _find_first(parts, second)
    if first is None:
        return None
    prefill = usable.workers[first]
    cached = num_tokens - float(parts.num_uncached[first])
    handed = _list_points(parts, (first, second), request, costs.columns)
    if not len(handed):
        return None
    line, lead = costs.prefill, 1.0 / decode.num_landing_layers
    first_s = _slowness(parts, first, num_tokens, line) * line.predict(handed - cached, cached)
    second_s = _slowness(parts, second, num_tokens, line) * line.predict(
        num_tokens - handed, handed
    )
    both_s = np.maximum(first_s + lead * second_s, lead * first_s + second_s)
    queue_s = float(max(parts.queue_s[first], parts.queue_s[second]))
    handoff_s = costs.handoffs.cost_of(prefill, decode).predict(float(handed[0]))
    shares = [
        load.of(each.id, request.model).prefill_share(request.at) for each in (prefill, decode)
    ]
    busy, own_s = min(MOST_SHARE, max(shares)), float(parts.prefill_s[second])
    others_s = np.maximum(0.0, first_s + second_s - own_s) * busy / (1.0 - busy)
    cost = options.count_ttft(queue_s + both_s + handoff_s + others_s, request)
    cost = cost + first_s * float(parts.stall[first] / parts.prefill_s[first])
    cost += second_s * float(parts.stall[second] / parts.prefill_s[second])
    cost += float(parts.answering[second]) + handed * float(parts.keep[first] / num_tokens)
    if parts.shares is not None:
        cost /= float(min(parts.shares[first], parts.shares[second]))
    best = int(cost.argmin())
    num_prefix = int(handed[best])
    seen = Prediction(
        queue_s,
        float(both_s[best]),
        handoff_s,
        float(parts.tpot_s[second]),
        int(cached),
        itl_s=parts.predict_itl(second),
    )
    return Split(first, num_prefix, num_prefix - int(cached), seen, float(cost[best]))


def _find_first(parts: Parts, second: int) -> int | None:
    """The worker that can share a prompt with the one at `second`, and has least to do before."""
    usable, decode = parts.usable, parts.usable.workers[second]
    own_tokens = parts.num_computed[second]
    is_long = own_tokens == parts.num_uncached[second] and own_tokens >= LEAST_SPLIT
    helpers = usable.helpers[usable.helpers != second]
    if not (is_long and decode.num_landing_layers > 1 and len(helpers)):
        return None
    first = int(helpers[parts.queue_s[helpers].argmin()])
    prefill = usable.workers[first]
    can_share = prefill.protocol == "baton" and decode.why_not_from(prefill) is None
    return first if can_share else None


def _list_points(
    parts: Parts, pair: tuple[int, int], request: PlacementRequest, columns: LoadColumns
) -> NDArray[np.float64]:
    """Some numbers of tokens that the first of two workers may hand over to the second.

    More than either has cached. Both compute their part in one step: else the second one has
    nothing to follow. Beside answers a step has no more tokens than usual.
    """
    rows, num_tokens = parts.usable.rows, float(request.num_prompt_tokens)
    first, second = pair
    is_alone = columns.num_decodes[rows] == 0
    most = np.where(is_alone, MOST_TOGETHER, columns.step_tokens[rows])
    cached = num_tokens - parts.num_uncached
    least = max(cached[first] + SPLIT_UNIT, cached[second] + SPLIT_UNIT, num_tokens - most[second])
    bounds = np.array([least, min(num_tokens - 2.0, cached[first] + most[first])]) / SPLIT_UNIT
    bounds = np.array([np.ceil(bounds[0]), np.floor(bounds[1])])
    if bounds[1] < bounds[0]:
        return np.empty(0)
    return SPLIT_UNIT * np.unique(np.floor(np.linspace(bounds[0], bounds[1], MOST_TRIED)))


def _slowness(parts: Parts, at: int, num_tokens: float, line: PromptLine) -> float:
    """How much slower than the mean of all a worker computes prompts."""
    num_computed = float(parts.num_computed[at])
    return float(parts.prefill_s[at]) / line.predict(num_computed, num_tokens - num_computed)
