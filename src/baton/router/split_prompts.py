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
from math import ceil
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.protocol.worker_http import MAX_SPLIT_TOKENS, SPLIT_UNIT
from baton.router.cost_parts import Prediction
from baton.router.worker_activity import MOST_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.router.cost_parts import CostOptions, Parts
    from baton.router.load import FleetLoad
    from baton.router.placement import PlacementRequest
    from baton.router.worker_activity import LoadColumns, WorkerActivity

LEAST_SPLIT: Final = 512
"""Tokens that a worker must have to compute alone: of fewer, half is hardly sooner than all."""
MOST_TRIED: Final = 16
"""Values of `k` that are compared."""
MOST_ASKED: Final = 3
"""Workers with the shortest queues, of which the first that can takes its part."""
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
    usable, costs = parts.usable, load.costs(request.model)
    first = _find_first(parts, second, costs.handoffs.places.has_device)
    if first is None:
        return None
    prefill, decode = usable.workers[first], usable.workers[second]
    pair = load.of(prefill.id, request.model), load.of(decode.id, request.model)
    num_tokens, own_s = float(request.num_prompt_tokens), float(parts.prefill_s[second])
    uncached = float(parts.num_uncached[first]), float(parts.num_uncached[second])
    cached, lead = num_tokens - uncached[0], 1.0 / decode.num_landing_layers
    line, taking = costs.prefill, costs.handoffs.cost_of(prefill, decode)
    handed = _list_points(num_tokens, uncached, pair, costs.columns)
    if handed is None:
        return None
    first_s = pair[0].prefill_cost.factor * line.predict(handed - cached, cached)
    second_s = pair[1].prefill_cost.factor * line.predict(num_tokens - handed, handed)
    second_s *= costs.splits.slowness(request.at)
    both_s = np.maximum(first_s + lead * second_s, lead * first_s + second_s)
    queue_s = float(max(parts.queue_s[first], parts.queue_s[second]))
    handoff_s = taking.factor * taking.line.predict(handed - num_tokens + uncached[1])
    busy = min(MOST_SHARE, max(each.prefill_share(request.at) for each in pair))
    # The second one waits for the first layer only.
    more_s = np.maximum(0.0, (1.0 - lead) * first_s + both_s - own_s)
    ttft_s = queue_s + handoff_s + both_s + more_s * (busy / (1.0 - busy))
    cost = options.count_ttft(ttft_s, request)
    cost = cost + first_s * float(parts.stall[first] / parts.prefill_s[first])
    cost += handed * float(parts.keep[first] / num_tokens) + float(parts.answering[second])
    if parts.shares is not None:
        cost /= float(min(parts.shares[first], parts.shares[second]))
    best = int(cost.argmin())
    both, exposed, num_prefix = float(both_s[best]), float(handoff_s[best]), int(handed[best])
    tpot_s, itl_s = float(parts.tpot_s[second]), parts.predict_itl(second)
    seen = Prediction(queue_s, both, exposed, tpot_s, int(cached), itl_s=itl_s)
    return Split(first, num_prefix, num_prefix - int(cached), seen, float(cost[best]))


def _find_first(parts: Parts, second: int, has_device: NDArray[np.bool_]) -> int | None:
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
        is_apart = usable.places[first] != place or not has_device[place]
        is_alike = prefill.num_landing_layers == decode.num_landing_layers
        if is_apart and is_alike and decode.why_not_from(prefill) is None:
            return int(first)
    return None


def _list_points(
    num_tokens: float,
    uncached: tuple[float, float],
    pair: tuple[WorkerActivity, WorkerActivity],
    columns: LoadColumns,
) -> NDArray[np.float64] | None:
    """Some numbers of tokens that the first of two workers may hand over to the second.

    More than either has cached. Both compute their part in one step: else the second one has
    nothing to follow. Beside answers the first one has steps of no more tokens than usual, and the
    second one does not begin before all has landed.
    """
    first, second = pair
    if second.num_decodes:
        return None
    most = float(columns.step_tokens[first.row]) if first.num_decodes else MAX_SPLIT_TOKENS
    least = max(num_tokens - min(uncached) + SPLIT_UNIT, num_tokens - MAX_SPLIT_TOKENS)
    most = min(num_tokens - 2.0, num_tokens - uncached[0] + most)
    begin, end = ceil(least / SPLIT_UNIT), int(most / SPLIT_UNIT)
    if end < begin:
        return None
    step = 1 + (end - begin) // MOST_TRIED
    return SPLIT_UNIT * np.arange(begin, end + 1, step, dtype=np.float64)
