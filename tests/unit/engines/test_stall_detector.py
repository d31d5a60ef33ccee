"""Two workers short of memory wait for each other: who gives up, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.clock import Instant
from baton.engines.interface import PrefillRequest
from baton.engines.stall_detector import STALL_RETRY_S, STALL_TIMEOUT_S, StallDetector
from tests.unit.engines.test_scheduler import (
    carry_out,
    make_scheduler,
    make_sequence,
    number_ticket,
)

if TYPE_CHECKING:
    from baton.engines.transformers.scheduler import Scheduler

SOON, LATE = Instant(1.0 + STALL_TIMEOUT_S / 2), Instant(1.0 + STALL_TIMEOUT_S)


def stalled() -> Scheduler:
    """One leg is computed and not taken; another has no room."""
    scheduler = make_scheduler(4)
    for number in (1, 2):
        leg = PrefillRequest(number_ticket(number))
        scheduler.add(make_sequence(12, 1, leg, start=100 * number, number=number))
    (work,) = scheduler.schedule().work
    carry_out(scheduler, work)
    assert not scheduler.schedule().work
    assert scheduler.num_waiting == 1
    return scheduler


def should_cancel(
    detector: StallDetector, scheduler: Scheduler, now: float, *, is_busy: bool = False
) -> bool:
    return detector.should_cancel(
        Instant(now), no_progress=scheduler.waits_for_offered and not is_busy
    )


def test_who_waits_in_vain_is_patient_for_a_while_and_then_less() -> None:
    scheduler, detector = stalled(), StallDetector()
    assert not should_cancel(detector, scheduler, 1.0)
    assert detector.timeout_at == LATE
    assert not should_cancel(detector, scheduler, SOON)
    assert should_cancel(detector, scheduler, LATE)
    assert not should_cancel(detector, scheduler, LATE)
    assert should_cancel(detector, scheduler, LATE + STALL_RETRY_S)
    assert scheduler.pinned_blocks.sending_tickets == (number_ticket(1).id,)


def test_patience_begins_again_whenever_something_was_computed() -> None:
    scheduler, detector = stalled(), StallDetector()
    should_cancel(detector, scheduler, 1.0)
    assert not should_cancel(detector, scheduler, LATE, is_busy=True)
    assert detector.timeout_at is None
    assert not should_cancel(detector, scheduler, LATE)


def test_nothing_is_over_while_nobody_waits() -> None:
    scheduler, detector = make_scheduler(4), StallDetector()
    scheduler.add(make_sequence(12, 1, PrefillRequest(number_ticket(1)), number=1))
    carry_out(scheduler, scheduler.schedule().work[0])
    for now in (1.0, LATE, 100.0):
        assert not should_cancel(detector, scheduler, now)
