"""Two workers short of memory wait for each other: who gives up, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.clock import Instant
from baton.engines.interface import PrefillLeg
from baton.engines.stalls import IMPATIENCE_S, PATIENCE_S, StallWatch
from tests.unit.engines.test_scheduler import (
    carry_out,
    make_scheduler,
    make_sequence,
    number_ticket,
)

if TYPE_CHECKING:
    from baton.engines.transformers.scheduler import Scheduler

SOON, LATE = Instant(1.0 + PATIENCE_S / 2), Instant(1.0 + PATIENCE_S)


def stalled() -> Scheduler:
    """One leg is computed and not taken; another has no room."""
    scheduler = make_scheduler(4)
    for number in (1, 2):
        leg = PrefillLeg(number_ticket(number))
        scheduler.add(make_sequence(12, 1, leg, start=100 * number, number=number))
    (work,) = scheduler.schedule().work
    carry_out(scheduler, work)
    assert not scheduler.schedule().work
    assert scheduler.num_waiting == 1
    return scheduler


def is_over(watch: StallWatch, scheduler: Scheduler, now: float, *, is_busy: bool = False) -> bool:
    return watch.is_over(Instant(now), in_vain=scheduler.waits_for_offered and not is_busy)


def test_who_waits_in_vain_is_patient_for_a_while_and_then_less() -> None:
    scheduler, watch = stalled(), StallWatch()
    assert not is_over(watch, scheduler, 1.0)
    assert watch.ends_at == LATE
    assert not is_over(watch, scheduler, SOON)
    assert is_over(watch, scheduler, LATE)
    assert not is_over(watch, scheduler, LATE)
    assert is_over(watch, scheduler, LATE + IMPATIENCE_S)
    assert scheduler.custody.lent == (number_ticket(1).id,)


def test_patience_begins_again_whenever_something_was_computed() -> None:
    scheduler, watch = stalled(), StallWatch()
    is_over(watch, scheduler, 1.0)
    assert not is_over(watch, scheduler, LATE, is_busy=True)
    assert watch.ends_at is None
    assert not is_over(watch, scheduler, LATE)


def test_nothing_is_over_while_nobody_waits() -> None:
    scheduler, watch = make_scheduler(4), StallWatch()
    scheduler.add(make_sequence(12, 1, PrefillLeg(number_ticket(1)), number=1))
    carry_out(scheduler, scheduler.schedule().work[0])
    for now in (1.0, LATE, 100.0):
        assert not is_over(watch, scheduler, now)
