"""Which layers of a step the agent learns of: those with hooks, and those of a CUDA graph.

In each step vLLM calls the hooks of some layers, in any order, some more than once (microbatches),
those of a drafter among them; model runner V2 reports the end of the launch by itself, V1 does not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.vllm.rank_handoffs import MAX_REPORT_DELAY_S
from baton.engines.vllm.step_orders import Progress, StartSend, StepOrders
from tests.examples import examples
from tests.unit.engines_vllm.test_rank_handoffs import ID, make_harness, prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.ids import TicketId

LAYERS = {"a": 0, "b": 1}
NUM_TOKENS = 12


@dataclass(frozen=True)
class Step:
    """Tokens up to `stop`; hooks with the time that passes before each."""

    hooks: list[tuple[str, float]]
    reports_launch: bool


def steps() -> st.SearchStrategy[Step]:
    names = st.sampled_from([*LAYERS, "draft_model.layer0"])
    pauses = st.sampled_from([0.0, MAX_REPORT_DELAY_S / 2, 2 * MAX_REPORT_DELAY_S])
    return st.builds(Step, st.lists(st.tuples(names, pauses), max_size=6), st.booleans())


@settings(deadline=None, max_examples=examples(150))
@given(chunks=st.lists(steps(), min_size=1, max_size=4), on_gpu=st.booleans())
def test_each_layer_of_each_step_is_reported_once_behind_what_computed_it(
    chunks: Sequence[Step], *, on_gpu: bool
) -> None:
    positions = itertools.count()
    recorded: list[int] = []

    def record() -> int | None:
        recorded.append(next(positions))
        return recorded[-1] if on_gpu else None

    harness = make_harness(None, record)
    reports: list[tuple[int, int, object]] = []
    forward = harness.port.layer_ready

    def layer_ready(
        tickets: Sequence[tuple[TicketId, int]], layer: int, after: object = None
    ) -> None:
        reports.extend((layer, stop, after) for ticket, stop in tickets if ticket == ID)
        forward(tickets, layer, after)

    harness.port.layer_ready = layer_ready  # type: ignore[method-assign]
    for number, step in enumerate(chunks, 1):
        is_last = number == len(chunks)
        stop = NUM_TOKENS if is_last else number
        progress = Progress("r", 0, (1, 2, 3) if number == 1 else (), stop, is_last=is_last)
        offers = (StartSend("r", prompt(harness, NUM_TOKENS), 0),) if number == 1 else ()
        reports.clear()
        harness.rank.begin_step(StepOrders(offers=offers, progress=(progress,)))
        at_hook: dict[int, object] = {}
        for name, pause_s in step.hooks:
            harness.clock.advance(pause_s)
            if harness.rank.follows_layers:
                harness.rank.layer_done(name)
            layer = LAYERS.get(name)
            if layer is not None:
                at_hook.setdefault(layer, recorded[-1])
            assert {layer for layer, *_ in reports} <= at_hook.keys()
            if not on_gpu:
                assert {layer for layer, *_ in reports} == at_hook.keys(), "it is computed"
        if step.reports_launch:
            harness.rank.forward_launched()
            assert len(reports) == len(LAYERS)
        harness.rank.end_step()
        assert sorted(report[:2] for report in reports) == [(0, stop), (1, stop)]
        for layer, _, after in reports:
            if on_gpu:
                assert after == at_hook.get(layer, recorded[-1])
        assert harness.port.sends[ID].is_finished == is_last
        assert not harness.rank.follows_layers
