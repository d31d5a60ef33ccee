"""Pull, and the leases under which prefill holds what decode has not taken: two real agents."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVSent, SendFailed
from baton.handoff.prefill_sender import LEASE_OVER
from baton.handoff.session.lease import LAPSED_REASON, LEASE_STAGE
from baton.transfer.links.choice import NullObserver
from tests.integration.handoff_nodes import CLOCK, Handoff, Node, make_handoff, node

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.telemetry.transfers import Direction
    from baton.transfer.links.choice import Choice

KEY = Credentials.of(ClusterKey(b"k" * 32))
LEASE_S = 0.6
NEVER = Instant(math.inf)


@dataclass
class MutableLease:
    """A `WriteLease` that a test ends."""

    until: Instant = NEVER


class Directions(NullObserver):
    """Which way a node moved pages itself."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def chosen(self, direction: Direction, choice: Choice) -> None:
        self.seen.add(direction)


@pytest.fixture(params=["shared", "tcp"])
def pair(request: pytest.FixtureRequest) -> Generator[tuple[Node, Node]]:
    kinds = (request.param,)
    with ExitStack() as stack:
        yield (
            stack.enter_context(node("p", kinds=kinds, key=KEY, lease_s=LEASE_S)),
            stack.enter_context(
                node(
                    "d", kinds=kinds, key=KEY, lease_s=LEASE_S, block_size=32, observer=Directions()
                )
            ),
        )


def held(pair: tuple[Node, Node]) -> Handoff:
    """A prompt that prefill has computed, and nobody has asked for yet."""
    prefill, decode = pair
    prefill.scribble(1)
    handoff = make_handoff(prefill, decode, mode="pull")
    handoff.start_send()
    handoff.compute(48, 101)
    handoff.prefill_done()
    return handoff


def expect_lapse(handoff: Handoff) -> None:
    (event,) = handoff.prefill.wait_for()
    assert isinstance(event, SendFailed)
    assert (event.error.stage, str(event.error)) == (LEASE_STAGE, LAPSED_REASON)


def expect_failure(handoff: Handoff) -> None:
    """Decode hears of it long before its own deadline of 60 s."""
    failed, quiescent = handoff.decode.wait_for(2)
    assert isinstance(failed, KVFailed)
    assert quiescent == BlocksQuiescent(handoff.sending.ticket.id)


def test_what_is_held_is_read_once_decode_has_room(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    handoff.start_receive()
    handoff.check_landed()
    observer = handoff.decode.agent._observer
    assert isinstance(observer, Directions)
    assert observer.seen == {"pull"}, "prefill wrote, where decode could have read"


def test_a_queued_request_keeps_the_lease_alive(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    handoff.decode.agent.renew_lease(handoff.sending.ticket)
    assert handoff.prefill.stays_silent(3 * LEASE_S), "its lease ran out under a renewing peer"
    handoff.start_receive()
    handoff.check_landed()


def test_a_prompt_that_nobody_asks_for_is_released_within_its_lease(
    pair: tuple[Node, Node],
) -> None:
    handoff = held(pair)
    expect_lapse(handoff)
    handoff.start_receive()
    expect_failure(handoff)


def test_a_renewal_after_the_lease_is_answered_with_a_failure(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    expect_lapse(handoff)
    handoff.decode.agent.renew_lease(handoff.sending.ticket)
    threading.Event().wait(0.5)  # for the renewal and its answer
    handoff.start_receive()
    expect_failure(handoff)


def test_a_request_that_is_cancelled_in_the_queue_gives_the_blocks_back_at_once(
    pair: tuple[Node, Node],
) -> None:
    handoff = held(pair)
    handoff.decode.agent.renew_lease(handoff.sending.ticket)
    handoff.decode.agent.decline(handoff.sending.ticket, "the client left")
    (event,) = handoff.prefill.wait_for()
    assert isinstance(event, SendFailed)
    assert event.error.stage != LEASE_STAGE


def test_a_decode_worker_that_dies_in_the_queue_costs_one_lease(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    handoff.decode.agent.renew_lease(handoff.sending.ticket)
    assert handoff.prefill.stays_silent(2 * LEASE_S)
    handoff.decode.agent.stop()
    expect_lapse(handoff)


def test_a_lease_covers_push_as_well(pair: tuple[Node, Node]) -> None:
    """A decode worker that is told of a request, and never grants, does not hold prefill's blocks
    until the deadline."""
    prefill, decode = pair
    handoff = make_handoff(prefill, decode)
    handoff.start_send()
    handoff.compute(101)
    assert prefill.stays_silent(2 * LEASE_S), "a lease before all was computed"
    handoff.prefill_done()
    expect_lapse(handoff)


def test_another_decode_worker_cannot_renew_it(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    kinds = tuple(t.kind for t in handoff.prefill.agent.options.transports)
    with node("stranger", kinds=kinds, key=KEY, lease_s=LEASE_S, block_size=32) as stranger:
        stranger.agent.renew_lease(handoff.sending.ticket)
        expect_lapse(handoff)


def test_a_request_that_is_taken_ends_its_lease(pair: tuple[Node, Node]) -> None:
    handoff = held(pair)
    handoff.start_receive()
    handoff.check_landed()
    assert handoff.prefill.stays_silent(2 * LEASE_S)
    assert KVSent(handoff.sending.ticket.id)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_nothing_is_written_past_the_membership_lease(kind: str) -> None:
    lease = MutableLease()
    with (
        node("p", kinds=(kind,), key=KEY, write_lease=lease) as prefill,
        node("d", kinds=(kind,), key=KEY) as decode,
    ):
        end_lease_in_mid_handoff(prefill, decode, lease)


def end_lease_in_mid_handoff(prefill: Node, decode: Node, lease: MutableLease) -> None:
    prefill.scribble(1)
    handoff = make_handoff(prefill, decode)
    handoff.start_receive()
    handoff.start_send()
    handoff.wait_until_granted()
    handoff.compute(48)
    handoff.wait_until_written()
    num_bytes = handoff.sending.trace.num_bytes
    lease.until = CLOCK.now()
    handoff.compute(101)
    handoff.prefill_done()
    (event,) = prefill.wait_for()
    assert isinstance(event, SendFailed)
    assert (event.error.stage, str(event.error)) == ("submit", LEASE_OVER)
    expect_failure(handoff)
    assert handoff.sending.trace.num_bytes == num_bytes


def test_a_fenced_worker_gives_up_what_it_sends_receives_and_holds(
    pair: tuple[Node, Node],
) -> None:
    prefill, decode = pair
    holding = held(pair)
    granting = make_handoff(prefill, decode)
    granting.start_receive()
    granting.wait_until_granted()
    prefill.agent.abort_all("fenced")
    (event,) = prefill.wait_for()
    assert isinstance(event, SendFailed)
    assert event.ticket == holding.sending.ticket.id
    decode.agent.abort_all("fenced")
    expect_failure(granting)
