"""What a gateway reports of its requests: each once, and all that were answered."""

from __future__ import annotations

import pytest

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.demand_report import LEAST_ENDED, REPORTED_S, report_demand
from baton.router.fleet import WorkerView
from baton.router.load import AnsweredRequest, FleetLoad
from baton.router.placement import Placement


def view(name: str) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, Role.BOTH, "demo", "f", frozenset({"tcp"}), available=True)


ONE, OTHER = view("one"), view("other")


def test_a_request_that_is_placed_again_is_one_request() -> None:
    load = FleetLoad()
    first = load.begin(Placement(None, ONE), 1000, 0.0, num_cached=500)
    first.first_token(0.5)
    first.end(1.0, 20, None, 0)
    rest = load.begin(Placement(None, OTHER), 32, 1.0, 0, before=first)
    costs = load.costs("demo")
    assert report_demand((ONE, OTHER), load, 0, 1.0).num_begun == 1
    assert costs.arrivals.num_prompt_tokens == 1500, "32 tokens of a move are no prompt"
    assert costs.arrivals.most_under_way == 1
    assert costs.found_share == pytest.approx(1 / 3)
    rest.end(2.0, 10, None, 30)
    assert report_demand((ONE, OTHER), load, 0, 2.0).num_begun == 1
    assert list(costs.answered) == [AnsweredRequest(2.0, 1000, 500, 30)]


def test_the_shape_is_that_of_all_requests_that_were_answered() -> None:
    load, now = FleetLoad(), 100.0
    for at in range(10):
        is_chat = at == 0
        running = load.begin(Placement(None, ONE), 100 if is_chat else 8000, now)
        running.first_token(now + 0.5)
        running.end(now + 1.0, 50 if is_chat else 1)
        now += 1.0
    failed = load.begin(Placement(None, ONE), 1, now)
    failed.end(now, 0, None, 0)
    demand = report_demand((ONE,), load, 0, now)
    assert demand.shape is not None
    assert demand.shape.num_answer_tokens == pytest.approx((50 + 9) / 10)
    line = load.costs("demo").prefill
    costs_s = float(line.predict(100.0)), float(line.predict(8000.0))
    assert demand.shape.prefill_s == pytest.approx(costs_s[0] / 10 + costs_s[1] * 9 / 10)
    assert len(demand.ended) == 1, "of one token no pace is known"


def test_the_shape_is_that_of_the_latest_requests() -> None:
    load = FleetLoad()
    for at in range(LEAST_ENDED):
        load.begin(Placement(None, ONE), 100, float(at)).end(float(at), 0, None, 10)
        if at < LEAST_ENDED - 1:
            assert report_demand((ONE,), load, 0, float(at)).shape is None
    later = LEAST_ENDED + REPORTED_S
    for _ in range(LEAST_ENDED):
        load.begin(Placement(None, ONE), 100, later).end(later, 0, None, 1)
    shape = report_demand((ONE,), load, 0, later).shape
    assert shape is not None
    assert shape.num_answer_tokens == 1
