from __future__ import annotations

import math

from baton.clock import Instant
from baton.handoff.interface import KVFailed, SendFailed
from baton.handoff.messages import Grant
from baton.handoff.session.actions import AnnounceReadable, Emit, SendFinished, TransferPlan
from baton.handoff.session.lease import LEASE_STAGE, Lease, LeaseHolder
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import SendSession
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, receive_order, send_order


def test_a_lease_begins_when_all_is_computed() -> None:
    lease = Lease(2.0)
    assert lease.renew(Instant(100.0))
    assert not lease.is_over(Instant(200.0))
    lease.hold(Instant(200.0))
    lease.hold(Instant(201.0))  # nothing: it is held already
    assert not lease.is_over(Instant(201.9))
    assert lease.is_over(Instant(202.0))


def test_a_renewal_that_comes_too_late_revives_nothing() -> None:
    lease = Lease(2.0)
    lease.hold(Instant(0.0))
    assert lease.renew(Instant(1.9))
    assert not lease.is_over(Instant(3.8))
    assert not lease.renew(Instant(3.9))
    assert lease.is_over(Instant(3.0)), "over is over"


def test_without_a_bound_it_never_ends() -> None:
    lease = Lease(math.inf)
    lease.hold(Instant(0.0))
    assert not lease.is_over(Instant(1e12))


def test_only_what_was_confirmed_counts_for_decode() -> None:
    lease_holder = LeaseHolder()
    assert lease_holder.holds(Instant(1e12)), "before a grant nothing is bounded"
    lease_holder.begin(Instant(10.0), 2.0)
    assert lease_holder.holds(Instant(11.9))
    assert not lease_holder.holds(Instant(12.0))
    lease_holder.confirmed(Instant(11.0))
    assert lease_holder.holds(Instant(12.9))
    lease_holder.confirmed(Instant(10.5))  # an older answer that was overtaken
    assert lease_holder.holds(Instant(12.9))
    assert not lease_holder.holds(Instant(13.0))


def make_held() -> SendSession:
    session = SendSession(
        send_order(make_ticket(), num_tokens=9, num_ready_tokens=9),
        num_layers=2,
        deadline=Instant(100.0),
        lease_s=2.0,
    )
    session.lease.hold(Instant(0.0))
    assert session.finish(None) == []
    return session


def test_a_session_whose_lease_ran_out_is_over_and_says_so() -> None:
    session = make_held()
    assert session.expire(Instant(1.9)) == []
    assert session.renew(Instant(1.9))
    assert session.expire(Instant(2.0)) == []
    _, emitted = session.expire(Instant(3.9))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert emitted.event.error.stage == LEASE_STAGE
    assert not session.renew(Instant(3.9))


def test_a_grant_finds_what_is_held_and_sends_all_of_it() -> None:
    session = make_held()
    grant = Grant(session.ticket, "sealed", PROMPT_HASH, 0, 9, 0, b"", "READ")
    assert session.granted(grant) == []
    assert session.begin(1) == [AnnounceReadable(0, 0, 9, num_layers=2)]
    for layer in range(2):
        said = session.announced(range(layer, layer + 1), 9)
    assert said == [SendFinished(None)]


def test_what_is_read_after_the_lease_is_not_consumed() -> None:
    order = receive_order(make_ticket(mode="pull"), start=0, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="sealed", num_layers=2, deadline=Instant(100.0))
    session.begin(TransferPlan("READ", order.blocks, staged=False))
    session.lease_holder.begin(Instant(0.0), 2.0)
    assert session.check_lease(Instant(1.9)) == []
    failed = session.check_lease(Instant(2.0))
    assert any(isinstance(a, Emit) and isinstance(a.event, KVFailed) for a in failed)
    assert session.phase is ReceivePhase.ENDED
