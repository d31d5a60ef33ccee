"""How much code runs to push one layer: a reader has to open so many files."""

from __future__ import annotations

import pytest

from tests.integration.layer_trace import trace_layer

MAX_FILES = {"tcp": 57, "shared": 58}
MAX_CALLS = {"tcp": 530, "shared": 455}
"""Lower them when there are fewer: they are here so that there are never more."""


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_layer_runs_through_few_files_and_calls(kind):
    trace = trace_layer(kind)
    assert trace.ran("handoff/session/receive.py", "ReceiveSession.landed"), "no layer landed"
    assert len(trace.files) <= MAX_FILES[kind], "\n".join(trace.files)
    assert len(trace.calls) <= MAX_CALLS[kind]
