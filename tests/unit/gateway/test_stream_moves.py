"""When a stream is moved again whose move failed."""

from __future__ import annotations

from math import inf

import pytest

from baton.clock import Instant
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.stream_moves import compute_pause_s, find_end
from baton.gateway.workers import Preemption, Up, Workers
from baton.protocol.worker_http import Role
from tests.unit.gateway.test_workers import info


@pytest.mark.parametrize(
    ("num_too_slow", "left_s", "pause_s"),
    [
        pytest.param(0, inf, 1.0, id="refused"),
        pytest.param(1, inf, 1.0, id="too slow"),
        pytest.param(3, inf, 4.0, id="too slow for the third time"),
        pytest.param(20, inf, 8.0, id="never much beside the time that it took"),
        pytest.param(20, 6.0, 3.0, id="in time for another one before the end"),
        pytest.param(20, -1.0, 1.0, id="not at once, whatever is left"),
    ],
)
def test_the_pause_after_a_failure(num_too_slow: int, left_s: float, pause_s: float) -> None:
    assert compute_pause_s(num_too_slow, left_s) == pause_s


def test_the_end_of_a_worker_is_that_of_its_machine() -> None:
    workers = Workers((WorkerAddress("http://127.0.0.1:1", Role.DECODE),), GatewayMetrics())
    (worker,) = workers.all
    workers.change(worker, Up(info()))
    assert find_end(worker) == inf
    workers.drain(worker)
    assert find_end(worker) == inf, "not known"
    workers.drain(worker, Preemption("maintenance", Instant(70.0)))
    assert find_end(worker) == 70.0
