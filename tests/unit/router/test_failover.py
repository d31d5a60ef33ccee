from __future__ import annotations

import pytest

from baton.ids import WorkerId
from baton.router.failover import EVERY_MODE, Attempt, Failover, Failure

DECODE, PREFILL = WorkerId("d0"), WorkerId("p0")
PULLED = Attempt(DECODE, PREFILL, "pull")


def after(*failures: Failure, attempt: Attempt = PULLED) -> Failover:
    failover = Failover()
    for failure in failures:
        failover.record(attempt, failure)
    return failover


def test_a_decode_worker_that_failed_is_avoided_and_the_second_failure_is_the_last():
    once = after(Failure.DECODE_FAILED)
    assert once.avoid == {DECODE}
    assert once.failed_modes == frozenset()
    assert once.may_retry
    assert not after(Failure.DECODE_FAILED, Failure.DECODE_FAILED).may_retry


def test_a_stale_ticket_excludes_nothing_but_costs_an_attempt():
    once = after(Failure.STALE_TICKET)
    assert (once.avoid, once.failed_modes, once.num_left) == (frozenset(), frozenset(), 1)
    assert not after(Failure.STALE_TICKET, Failure.DECODE_FAILED).may_retry


def test_after_lost_kv_the_same_worker_computes_all():
    once = after(Failure.KV_LOST)
    assert once.avoid == frozenset()
    assert once.failed_modes == EVERY_MODE
    assert once.num_left == 1


@pytest.mark.parametrize(
    ("failure", "avoid", "modes"),
    [
        (Failure.PREFILL_FAILED, {PREFILL}, set()),
        (Failure.MODE_FAILED, set(), {"pull"}),
        (Failure.PREFILL_REJECTED, set(), EVERY_MODE),
    ],
)
def test_a_prefill_failure_costs_no_attempt_and_excludes_its_cause(failure, avoid, modes):
    once = after(failure)
    assert (once.avoid, once.failed_modes, once.num_left) == (avoid, modes, 2)


def test_the_second_prefill_failure_ends_handoffs():
    twice = after(Failure.PREFILL_FAILED, Failure.PREFILL_FAILED)
    assert twice.failed_modes == EVERY_MODE
    assert twice.may_retry


def test_a_stream_that_went_on_may_be_tried_again_where_it_failed_before():
    failover = after(Failure.PREFILL_FAILED, Failure.DECODE_FAILED)
    failover.record(Attempt(WorkerId("d1")), Failure.DECODE_FAILED, has_progressed=True)
    assert (failover.avoid, failover.failed_modes) == ({"d1"}, frozenset())
    assert failover.may_retry
    failover.record(Attempt(DECODE), Failure.DECODE_FAILED)
    assert not failover.may_retry, "two workers failed at the same token"
