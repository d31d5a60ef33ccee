from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import HandoffMode
from baton.ids import WorkerId
from baton.router.failover import (
    EVERY_MODE,
    MAX_ATTEMPTS,
    MAX_PREFILL_FAILURES,
    MAX_RESUMES,
    Attempt,
    Failover,
    Failure,
)

WORKERS = [WorkerId(f"w{i}") for i in range(4)]
DECODE_FAILURES = [Failure.DECODE_FAILED, Failure.STALE_TICKET, Failure.KV_LOST]


@given(st.data())
def test_every_request_ends_and_no_cause_of_a_failure_is_asked_again(data: st.DataObject) -> None:
    failover, num_attempts = Failover(), 0
    while failover.may_retry:
        decodes = [worker for worker in WORKERS if worker not in failover.avoid]
        if not decodes:
            break
        modes = sorted(frozenset(get_args(HandoffMode)) - failover.failed_modes)
        decode = data.draw(st.sampled_from(decodes))
        prefills = [worker for worker in decodes if worker != decode] if modes else []
        if prefills and data.draw(st.booleans()):
            attempt = Attempt(
                decode, data.draw(st.sampled_from(prefills)), data.draw(st.sampled_from(modes))
            )
            failure = data.draw(st.sampled_from(Failure))
        else:
            attempt, failure = Attempt(decode), data.draw(st.sampled_from(DECODE_FAILURES))
        before = (failover.avoid, failover.failed_modes)
        failover.record(attempt, failure)
        num_attempts += 1
        assert before[0] <= failover.avoid
        assert before[1] <= failover.failed_modes
        match failure:
            case Failure.DECODE_FAILED:
                assert decode in failover.avoid
            case Failure.KV_LOST | Failure.TICKET_REFUSED if attempt.prefill is None:
                assert decode in failover.avoid
            case Failure.KV_LOST | Failure.TICKET_REFUSED | Failure.PREFILL_REJECTED:
                assert failover.failed_modes == EVERY_MODE
            case Failure.MODE_FAILED:
                assert attempt.mode in failover.failed_modes
            case Failure.PREFILL_FAILED:
                assert attempt.prefill in failover.avoid or failover.failed_modes == EVERY_MODE
            case Failure.STALE_TICKET:
                assert before == (failover.avoid, failover.failed_modes)
    assert num_attempts <= MAX_ATTEMPTS + MAX_PREFILL_FAILURES


@given(st.lists(st.tuples(st.sampled_from(WORKERS), st.booleans()), max_size=40))
def test_a_stream_goes_on_a_bounded_number_of_times(attempts: list[tuple[WorkerId, bool]]) -> None:
    """Each part of it may be tried as often as a new request; who failed last is not asked next."""
    failover, num_since, num_attempts = Failover(), 0, 0
    for decode, has_progressed in attempts:
        if not failover.may_retry:
            break
        if decode in failover.avoid:
            continue
        failover.record(Attempt(decode), Failure.DECODE_FAILED, has_progressed=has_progressed)
        num_attempts += 1
        num_since = 1 if has_progressed else num_since + 1
        assert decode in failover.avoid
        assert num_since <= MAX_ATTEMPTS
        if has_progressed:
            assert failover.avoid == {decode}
    assert num_attempts <= (MAX_RESUMES + 1) * MAX_ATTEMPTS
