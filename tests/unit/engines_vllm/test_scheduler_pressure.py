"""Who waits for room in vLLM, whether in vain, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.engines.stall_detector import STALL_RETRY_S, STALL_TIMEOUT_S
from baton.engines.vllm.scheduler_pressure import SchedulerPressure
from baton.engines.vllm.step_orders import Occupancy

if TYPE_CHECKING:
    from collections.abc import Iterable

BEGIN = 5.0
LATE = BEGIN + STALL_TIMEOUT_S


@dataclass
class Blocks:
    """As vLLM's pool: one block is its own, and is never free."""

    num_gpu_blocks: int = 9
    num_free: int = 8

    def get_num_free_blocks(self) -> int:
        return self.num_free


@pytest.fixture
def pressure() -> SchedulerPressure:
    return SchedulerPressure(block_size=16)


def plan(
    pressure: SchedulerPressure, now: float, *, preempted: Iterable[str] = (), is_busy: bool = False
) -> bool:
    return pressure.step(Instant(now), preempted=preempted, is_busy=is_busy)


def hold(pressure: SchedulerPressure, request: str) -> None:
    pressure.admitted(request)
    pressure.ended(request)
    pressure.held(request)


def wait_in_vain(pressure: SchedulerPressure, now: float, *, is_busy: bool = False) -> bool:
    """There is no room for `late`."""
    pressure.asked("late")
    return plan(pressure, now, is_busy=is_busy)


def test_who_waits_for_held_blocks_is_patient_for_a_while_and_then_less(
    pressure: SchedulerPressure,
) -> None:
    hold(pressure, "held")
    assert not wait_in_vain(pressure, BEGIN)
    assert not wait_in_vain(pressure, LATE - 0.01)
    assert wait_in_vain(pressure, LATE)
    assert not wait_in_vain(pressure, LATE + STALL_RETRY_S / 2)
    assert wait_in_vain(pressure, LATE + STALL_RETRY_S)


def test_patience_begins_again_with_every_step_that_computes(pressure: SchedulerPressure) -> None:
    hold(pressure, "held")
    wait_in_vain(pressure, BEGIN)
    assert not wait_in_vain(pressure, LATE, is_busy=True)
    assert not wait_in_vain(pressure, LATE)
    assert wait_in_vain(pressure, LATE + STALL_TIMEOUT_S)


def test_where_nothing_is_held_nobody_waits_in_vain(pressure: SchedulerPressure) -> None:
    hold(pressure, "held")
    wait_in_vain(pressure, BEGIN)
    pressure.released({"held"})
    assert not wait_in_vain(pressure, LATE)
    assert not wait_in_vain(pressure, LATE + STALL_TIMEOUT_S)


def test_who_is_admitted_or_not_asked_about_does_not_lack_room(pressure: SchedulerPressure) -> None:
    hold(pressure, "held")
    pressure.arrived("behind another")
    for now in (BEGIN, LATE, LATE + STALL_TIMEOUT_S):
        assert not plan(pressure, now)
    for now in (BEGIN, LATE, LATE + STALL_TIMEOUT_S):
        pressure.asked("early")
        pressure.admitted("early")
        assert not plan(pressure, now)


def test_a_request_waits_from_its_arrival_until_it_is_admitted_or_ends(
    pressure: SchedulerPressure,
) -> None:
    pressure.bind(Blocks())

    told = 0

    def num_waiting() -> int:
        nonlocal told
        news = pressure.take_news()
        told = told if news is None else news.num_waiting
        return told

    pressure.arrived("a")
    pressure.arrived("b")
    assert num_waiting() == 2
    pressure.asked("a")
    assert num_waiting() == 2
    pressure.admitted("a")
    assert num_waiting() == 1
    pressure.ended("b")
    assert num_waiting() == 0
    plan(pressure, BEGIN, preempted={"a"})
    assert num_waiting() == 1
    pressure.admitted("a")
    assert num_waiting() == 0


def test_there_is_news_only_where_what_was_told_is_not_true_any_more(
    pressure: SchedulerPressure,
) -> None:
    assert pressure.take_news() is None
    blocks = Blocks()
    pressure.bind(blocks)
    assert not pressure.is_report_outdated  # nothing was told yet: the first step will
    assert pressure.take_news() == Occupancy(0, 8, 8, 16)
    assert not pressure.is_report_outdated
    assert pressure.take_news() is None
    blocks.num_free = 3
    assert pressure.is_report_outdated
    assert pressure.take_news() == Occupancy(0, 8, 3, 16)
    assert not pressure.is_report_outdated
    pressure.arrived("a")
    assert pressure.is_report_outdated


def test_a_few_blocks_are_not_worth_a_step_and_add_up(pressure: SchedulerPressure) -> None:
    blocks = Blocks(num_gpu_blocks=321, num_free=320)
    pressure.bind(blocks)
    pressure.take_news()
    blocks.num_free -= 10
    assert not pressure.is_report_outdated
    blocks.num_free -= 1
    assert pressure.is_report_outdated
    blocks.num_free += 10
    assert not pressure.is_report_outdated
    assert pressure.take_news() == Occupancy(0, 320, 319, 16)
