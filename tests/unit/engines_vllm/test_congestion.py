"""Who waits for room in vLLM, whether in vain, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.engines.stalls import IMPATIENCE_S, PATIENCE_S
from baton.engines.vllm.congestion import Congestion, Occupancy

if TYPE_CHECKING:
    from collections.abc import Iterable

BEGIN = 5.0
LATE = BEGIN + PATIENCE_S


@dataclass
class Blocks:
    """As vLLM's pool: one block is its own, and is never free."""

    num_gpu_blocks: int = 9
    num_free: int = 8

    def get_num_free_blocks(self) -> int:
        return self.num_free


@pytest.fixture
def congestion() -> Congestion:
    return Congestion(block_size=16)


def plan(
    congestion: Congestion, now: float, *, preempted: Iterable[str] = (), is_busy: bool = False
) -> bool:
    return congestion.step(Instant(now), preempted=preempted, is_busy=is_busy)


def hold(congestion: Congestion, request: str) -> None:
    congestion.admitted(request)
    congestion.ended(request)
    congestion.held(request)


def wait_in_vain(congestion: Congestion, now: float, *, is_busy: bool = False) -> bool:
    """There is no room for `late`."""
    congestion.asked("late")
    return plan(congestion, now, is_busy=is_busy)


def test_who_waits_for_held_blocks_is_patient_for_a_while_and_then_less(
    congestion: Congestion,
) -> None:
    hold(congestion, "held")
    assert not wait_in_vain(congestion, BEGIN)
    assert not wait_in_vain(congestion, LATE - 0.01)
    assert wait_in_vain(congestion, LATE)
    assert not wait_in_vain(congestion, LATE + IMPATIENCE_S / 2)
    assert wait_in_vain(congestion, LATE + IMPATIENCE_S)


def test_patience_begins_again_with_every_step_that_computes(congestion: Congestion) -> None:
    hold(congestion, "held")
    wait_in_vain(congestion, BEGIN)
    assert not wait_in_vain(congestion, LATE, is_busy=True)
    assert not wait_in_vain(congestion, LATE)
    assert wait_in_vain(congestion, LATE + PATIENCE_S)


def test_where_nothing_is_held_nobody_waits_in_vain(congestion: Congestion) -> None:
    hold(congestion, "held")
    wait_in_vain(congestion, BEGIN)
    congestion.released({"held"})
    assert not wait_in_vain(congestion, LATE)
    assert not wait_in_vain(congestion, LATE + PATIENCE_S)


def test_who_is_admitted_or_not_asked_about_does_not_lack_room(congestion: Congestion) -> None:
    hold(congestion, "held")
    congestion.arrived("behind another")
    for now in (BEGIN, LATE, LATE + PATIENCE_S):
        assert not plan(congestion, now)
    for now in (BEGIN, LATE, LATE + PATIENCE_S):
        congestion.asked("early")
        congestion.admitted("early")
        assert not plan(congestion, now)


def test_a_request_waits_from_its_arrival_until_it_is_admitted_or_ends(
    congestion: Congestion,
) -> None:
    congestion.bind(Blocks())

    def num_waiting() -> int:
        told = congestion.tell()
        assert told is not None
        return told.num_waiting

    congestion.arrived("a")
    congestion.arrived("b")
    assert num_waiting() == 2
    congestion.asked("a")
    assert num_waiting() == 2
    congestion.admitted("a")
    assert num_waiting() == 1
    congestion.ended("b")
    assert num_waiting() == 0
    plan(congestion, BEGIN, preempted={"a"})
    assert num_waiting() == 1
    congestion.admitted("a")
    assert num_waiting() == 0


def test_there_is_news_only_where_what_was_told_is_not_true_any_more(
    congestion: Congestion,
) -> None:
    assert congestion.tell() is None
    blocks = Blocks()
    congestion.bind(blocks)
    assert not congestion.has_changed  # nothing was told yet: the first step will
    assert congestion.tell() == Occupancy(0, 8, 8, 16)
    assert not congestion.has_changed
    blocks.num_free = 3
    assert congestion.has_changed
    assert congestion.tell() == Occupancy(0, 8, 3, 16)
    assert not congestion.has_changed
