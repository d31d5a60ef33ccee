"""What Baton adds to a step of vLLM's, as Python calls: the same on every machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import baton
from baton.engines.vllm.step_orders import NO_ORDERS, Finished, Progress, StepOrders
from tests.unit.engines_vllm.test_admission import (
    Blocks,
    admission,
    clock,
    receiving,
    request,
    sending,
    step,
)
from tests.unit.engines_vllm.test_rank_handoffs import ID, expect, harness, offer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from baton.engines.vllm.admission import Admission
    from tests.unit.engines_vllm.test_rank_handoffs import RankHarness

__all__ = ["admission", "clock", "harness"]  # fixtures
PACKAGE = str(Path(baton.__file__).parent)


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Baton's own functions."""
    num_calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            num_calls += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls


def plan(admission: Admission, planned: Any) -> StepOrders:
    """One step of the scheduler's process, until its workers have reported."""
    orders = admission.step(planned)
    admission.update_from_workers(set(), set(), None)
    assert admission.take_refused() == {}
    return orders


def work(harness: RankHarness, orders: StepOrders, *layers: str) -> tuple[set[str], set[str]]:
    """One step of a worker's process, as `BatonConnector` has it."""
    rank = harness.rank
    if orders is not NO_ORDERS:
        rank.prepare(orders)
    rank.begin_step(orders)
    for layer in layers:
        if rank.follows_layers:
            rank.layer_done(layer)
    rank.end_step()
    ended = rank.get_finished(set(), 0.0)
    rank.take_invalid_blocks()
    rank.take_report()
    rank.take_records()
    return ended


def test_a_step_without_handoffs_takes_a_call_for_each_hook(
    admission: Admission, harness: RankHarness
) -> None:
    admission.bind(Blocks())
    plan(admission, step())
    busy = step(cached=tuple((f"r{n}", None, 9, 1) for n in range(100)))
    for planned in (step(), busy):
        assert plan(admission, planned) is NO_ORDERS
        assert count_calls(lambda planned=planned: plan(admission, planned)) <= 12
    work(harness, NO_ORDERS)
    assert count_calls(lambda: work(harness, NO_ORDERS)) <= 14
    layers = ["a", "b"] * 50
    assert count_calls(lambda: work(harness, NO_ORDERS, *layers)) <= 14


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_prompt_takes_few_calls_in_the_scheduler(admission: Admission, *, is_sent: bool) -> None:
    admission.bind(Blocks())
    asked = request(sending() if is_sent else receiving())
    blocks = [1, 2, 3]

    def hand_over() -> None:
        admission.arrived(asked)
        missing = admission.count_missing(asked, 0)
        assert missing == (0 if is_sent else 9)
        admission.allocated(asked, (blocks,), missing)
        if not is_sent:
            assert plan(admission, step()).expected
            admission.update_from_workers({"r"}, None, None)
        plan(admission, step(new=(("r", blocks, 0 if is_sent else 8, 9 if is_sent else 1),)))
        assert admission.finish(asked)[0] is is_sent
        assert plan(admission, step()).finished

    assert count_calls(hand_over) <= (93 if is_sent else 105)


def test_a_sent_prompt_takes_few_calls_in_its_worker(harness: RankHarness) -> None:
    work(harness, NO_ORDERS)

    def send() -> None:
        work(harness, offer(harness, 7, 7, (5, 6)), "a", "b")
        harness.port.sent(ID)
        harness.rank.get_finished({"r"}, 0.01)

    assert count_calls(send) <= 122  # a position for each of two layers


def test_a_received_prompt_takes_few_calls_in_its_worker(harness: RankHarness) -> None:
    work(harness, NO_ORDERS)

    def receive() -> None:
        work(harness, expect(harness))
        harness.port.land(ID)
        assert harness.rank.get_finished(set(), 0.01) == (set(), {"r"})
        work(harness, StepOrders(started=("r",)), "a", "b")
        work(harness, StepOrders(finished=(Finished("r", "stop", 1),)))

    assert count_calls(receive) <= 118  # the position, too


def test_layers_are_followed_where_one_is_awaited(harness: RankHarness) -> None:
    work(harness, offer(harness, 7, 3, (5,)), "a", "b")
    work(harness, NO_ORDERS, "a")  # another prompt's: that this one is not done yet is reported
    assert harness.port.uncomputed == [(ID,)] * 2
    work(harness, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    assert harness.port.sends[ID].is_finished
