"""How much code runs to push one layer: a reader has to open so many files."""

from __future__ import annotations

import pytest

from tests.integration.layer_trace import TYPICAL_LAYER, trace_layer
from tests.journey import read_steps

MAX_FILES = {"tcp": (37, 33), "shared": (36, 32)}
MAX_CALLS = {"tcp": (366, 238), "shared": (269, 219)}
"""Of the first layer, and of the others. Lower them when there are fewer: they are here so that
there are never more."""


@pytest.mark.parametrize("layer", [0, TYPICAL_LAYER])
@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_layer_runs_through_few_files_and_calls(kind, layer):
    trace = trace_layer(kind, layer)
    assert trace.ran("handoff/session/receive.py", "ReceiveSession.landed"), "no layer landed"
    assert len(trace.files) <= MAX_FILES[kind][layer], "\n".join(trace.files)
    assert len(trace.calls) <= MAX_CALLS[kind][layer]


def test_the_steps_of_the_journey_run_in_its_order():
    calls = trace_layer("tcp").calls
    first_calls = {call: at for at, call in reversed(list(enumerate(calls)))}
    steps = [(step.file, step.function) for step in read_steps() if step.section == "One layer"]
    assert len(steps) > 10
    assert [step for step in steps if step not in first_calls] == []
    places = [first_calls[step] for step in steps]
    assert places == sorted(places)
