"""How much the gateway does for a request, whatever the machine."""

from __future__ import annotations

import pytest

from tests.integration.gateway_counts import BUILTIN_CALLS, PYTHON_CALLS, count_gateway

BOUNDS = {
    # of one                push, whole   one worker, whole   push, event
    PYTHON_CALLS:           (366,         273,                7),
    BUILTIN_CALLS:          (230,         176,                14),
}  # fmt: skip
"""The most that there may be: what is counted today, and 0.5 % more, since calls of the standard
library differ a little between its versions. Lower them when there are fewer. Of an event, one
Python call and two of builtins are those of a turn of the loop, in which it is alone here."""

CASES = [("push", "whole"), ("one", "whole"), ("push", "stream")]


@pytest.mark.parametrize("case", CASES)
def test_a_request_and_an_event_take_few_calls(case: tuple[str, str]) -> None:
    counts, functions = count_gateway(*case)
    column = CASES.index(case)
    over = {
        name: (counts[name], bounds[column])
        for name, bounds in BOUNDS.items()
        if counts[name] > bounds[column]
    }
    assert not over, functions.most_common(40)
