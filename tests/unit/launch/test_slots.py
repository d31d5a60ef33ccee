"""What an operator sees of one position of a launch."""

from types import SimpleNamespace

from baton.clock import Instant
from baton.launch.restarts import RestartHistory, RestartPolicy
from baton.launch.slots import ProcessSlot


def slot_of(*, is_ready, is_ended, reason):
    child = SimpleNamespace(
        pid=7, is_ready=is_ready, is_ended=is_ended, preempted=None, phase="loading the model"
    )
    restarts = RestartHistory(RestartPolicy(max_restarts=0))
    restarts.next_delay_s(Instant(1.0))
    return ProcessSlot("w-0", lambda _: (), child, restarts, Instant(0.0), reason=reason)


def seen(slot):
    member = slot.describe(Instant(5.0), "here")
    return member.state, member.reason


def test_a_worker_that_serves_again_has_no_reason_for_its_state():
    """Its restarter forgets why the one before ended some turns of the event loop later."""
    reason = "ended too often (exit code 7)"
    assert seen(slot_of(is_ready=False, is_ended=True, reason=reason)) == ("failed", reason)
    assert seen(slot_of(is_ready=True, is_ended=False, reason=reason)) == ("ready", "")
