"""What one gateway reports of a model's traffic. Pure: times are given."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from baton.protocol.demand import EndedAnswer, ModelDemand, RequestShape
from baton.router.demand import find_demand
from baton.router.load import EndedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.router.fleet import WorkerView
    from baton.router.load import FleetLoad

REPORTED_S: Final = 30.0
LEAST_ENDED: Final = 8
"""From which the shape of requests is known."""


def report_demand(
    workers: Sequence[WorkerView], load: FleetLoad, num_waiting: int, now: float
) -> ModelDemand:
    """Of the workers of one model, at least one; `num_waiting` requests wait in the gateway."""
    model = workers[0].model
    costs = load.costs(model)
    since = now - REPORTED_S
    shape = None
    if len(costs.answered) >= LEAST_ENDED:
        recent = [each for each in costs.answered if each.at > since]
        shown = recent if len(recent) >= LEAST_ENDED else list(costs.answered)[-LEAST_ENDED:]
        # Of all that `num_begun` counts, so without times, which are no part of a shape.
        sizes = [
            EndedRequest(
                each.at, each.num_tokens, each.num_cached, each.num_output_tokens, 0.0, 0.0
            )
            for each in shown
        ]
        found = find_demand(sizes, REPORTED_S, workers, load)
        shape = RequestShape(
            prefill_s=found.prefill_s,
            handoff_s=found.handoff_s,
            num_answer_tokens=found.num_answer_tokens,
            step_s=found.step_s[0],
            step_answer_s=found.step_s[1],
            most_at_once=found.most_at_once if found.most_at_once < inf else None,
        )
    return ModelDemand(
        model=model,
        num_begun=costs.arrivals.num_begun,
        num_waiting=num_waiting,
        window_s=REPORTED_S,
        ended=tuple(
            EndedAnswer(each.ttft_s, each.tpot_s) for each in costs.ended if each.at > since
        ),
        shape=shape,
    )
