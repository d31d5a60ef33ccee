"""Real agents measure their links, and choose by what they measured."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.clock import Instant, MachineClock
from baton.errors import TransferError
from baton.handoff import probing
from baton.handoff.interface import KVLanded
from baton.handoff.link_page import describe_links
from baton.handoff.peer_transports import LinkOptions, PeerTransportState
from baton.handoff.probing import STEP_TIMEOUT_S
from baton.handoff.session.actions import TransferHandle
from baton.ids import new_ticket_id
from baton.testing.faulty_transport import Fault, FaultPlan
from baton.transfer.interface import TransferId, WriteCompleted
from baton.transfer.links.choice import Backoff
from baton.transfer.links.probes import ProbeBounds, ProbeBuffer
from tests.integration.handoff_nodes import CLOCK, FIRST, make_handoff, node
from tests.integration.test_handoff_failover import (
    BOTH,
    Tally,
    Wrapped,
    cut,
    wait_until,
)
from tests.integration.test_handoff_untrusted_peers import peers_of
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.handoff.agent_loop import AgentLoop
    from baton.handoff.messages import TransferOp
    from baton.telemetry.transfers import TransferTime
    from baton.transfer.interface import DeviceAccess, TransferEvent, Transport
    from tests.integration.handoff_nodes import Node

MEASURED = LinkOptions()


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


def hand_over(prefill: Node, decode: Node, seed: int = 1) -> tuple[str | None, str | None]:
    """One handoff; what was expected to carry it, and what did."""
    prefill.scribble(seed)
    handoff = make_handoff(prefill, decode, num_ready=101, seed=seed)
    handoff.start_receive()
    handoff.start_send()
    handoff.prefill_done()
    handoff.check_landed()
    traces = handoff.receiving.trace, handoff.sending.trace
    first, second = [(trace.expected_transport, trace.transport) for trace in traces]
    assert first == second, "the two workers disagree about what was used"
    return first


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_workers_that_meet_measure_all_that_they_share(op: TransferOp, key: Credentials) -> None:
    tallies = Tally(), Tally()
    with (
        node("p", kinds=BOTH, key=key, links=MEASURED, observer=tallies[0]) as prefill,
        node("d", kinds=BOTH, key=key, op=op, links=MEASURED, observer=tallies[1]) as decode,
    ):
        assert hand_over(prefill, decode) == ("shared", "shared")
        expected, tally = {
            "WRITE": ({("push", "shared"), ("push", "tcp")}, tallies[0]),
            "READ": ({("pull", "shared")}, tallies[1]),
        }[op]
        wait_until(lambda: set(tally.probed) == expected)
        for latency_s, rate in tally.probed.values():
            assert 0 < latency_s < 20
            assert 1e6 < rate < 1e12
        used = []
        for seed in range(3):  # which one is cheaper for so little is this machine's business
            expected, carrier = hand_over(prefill, decode, seed)
            assert expected == carrier
            used.append(carrier)
        assert {*used} <= {outcome.transport for outcome in tally.outcomes}
        num_carried = sum(outcome.num_transfers for outcome in tally.outcomes)
        assert len(tally.transfers) == num_carried
        for transfer in tally.transfers:
            assert 0 < transfer.seconds < 20
            assert transfer.num_bytes > 0
        most = max(outcome.num_bytes for outcome in tally.outcomes)
        assert max(transfer.num_bytes for transfer in tally.transfers) <= most


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_measured_links_are_described_by_who_uses_them(op: TransferOp, key: Credentials) -> None:
    with (
        node("p", kinds=("tcp",), key=key, links=MEASURED) as prefill,
        node("d", kinds=("tcp",), key=key, op=op, links=MEASURED) as decode,
    ):
        assert prefill.agent.describe_links().result(30) == []
        hand_over(prefill, decode)
        user, peer, direction = {
            "WRITE": (prefill, decode, "push"),
            "READ": (decode, prefill, "pull"),
        }[op]
        wait_until(lambda: any(asyncio.run(describe_links(user.agent)).links))
        (link,) = asyncio.run(describe_links(user.agent)).links
        assert (link.peer, link.direction, link.transport) == (peer.ref.worker, direction, "tcp")
        assert link.num_probes + link.num_transfers > 0
        assert 0 <= link.latency_s < 1
        assert 1e6 < 1 / link.byte_s < 1e13
        assert asyncio.run(describe_links(peer.agent)).links == ()
    assert user.agent.describe_links().result(30) == []


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_worker_that_measures_nothing_meets_one_that_does(
    op: TransferOp, key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """The measuring one shows its memory for probes; the other has none, and lands none."""
    with (
        node("p", kinds=BOTH, key=key, links=MEASURED) as prefill,
        node("d", kinds=BOTH, key=key, op=op) as decode,
    ):
        for seed in range(3):
            hand_over(prefill, decode, seed)
        for seed in range(3):
            hand_over(decode, prefill, seed)
    assert "unexpected error" not in caplog.text


def test_a_handoff_that_waits_comes_before_the_probes(key: Credentials) -> None:
    tally = Tally()
    with (
        node("p", kinds=BOTH, key=key, links=MEASURED, observer=tally) as prefill,
        node("d", kinds=BOTH, key=key, links=MEASURED) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        prefill.agent.start_send(send_order(ticket, num_tokens=20))  # before the two meet
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        threading.Event().wait(0.5)
        assert not tally.probed
        prefill.agent.abort(ticket.id, "enough")
        wait_until(lambda: len(tally.probed) == 2)


def test_a_transport_that_brings_other_bytes_is_found_by_the_probes(key: Credentials) -> None:
    wrapped = Wrapped("shared", FaultPlan(1, {Fault.FLIP_BIT: 1.0}))
    tally = Tally()
    with (
        node("p", kinds=BOTH, key=key, links=MEASURED, observer=tally, wrap=wrapped) as prefill,
        node("d", kinds=BOTH, key=key, links=MEASURED) as decode,
    ):
        decode.agent.decline(make_ticket(prefill.ref, decode.ref), "only to meet")
        wait_until(lambda: ("push", "tcp") in tally.probed)
        wait_until(lambda: bool(wrapped.made[0].injected))
        threading.Event().wait(0.2)
        assert ("push", "shared") not in tally.probed
        expected, used = hand_over(prefill, decode)
        assert used == "tcp"
        assert tally.used == {"tcp": tally.used["tcp"]}
        assert bool(tally.mismatches) == (expected == "shared")


class Late:
    """Wraps a transport: each write's end is told 30 ms later. Polled on the agent's timer."""

    readiness_fd = None

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._late: list[tuple[float, TransferEvent]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def poll(self) -> list[TransferEvent]:
        events: list[TransferEvent] = []
        for event in self._inner.poll():
            if isinstance(event, WriteCompleted):
                self._late.append((CLOCK.now() + 0.03, event))
            else:
                events.append(event)
        due = [event for at, event in self._late if at <= CLOCK.now()]
        self._late = [each for each in self._late if each[0] > CLOCK.now()]
        return [*events, *due]


def test_a_slow_transport_is_left_for_a_faster_one(key: Credentials) -> None:
    """Listed first, and guessed to be faster: measured, it is not."""
    tally = Tally()
    with (
        node(
            "p", kinds=BOTH, key=key, links=MEASURED, observer=tally,
            wrap=lambda transport: Late(transport) if transport.kind == "shared" else transport,
        ) as prefill,
        node("d", kinds=BOTH, key=key, links=MEASURED) as decode,
    ):  # fmt: skip
        decode.agent.decline(make_ticket(prefill.ref, decode.ref), "only to meet")
        wait_until(lambda: len(tally.probed) == 2)
        assert hand_over(prefill, decode) == ("tcp", "tcp")
        assert not tally.mismatches


def test_one_that_was_cut_is_on_trial_before_it_is_used_again(key: Credentials) -> None:
    with (
        node("p", kinds=BOTH, key=key, links=MEASURED) as prefill,
        node("d", kinds=BOTH, key=key, links=MEASURED) as decode,
    ):
        assert hand_over(prefill, decode) == ("shared", "shared")
        cut(prefill, "shared")
        threading.Event().wait(0.1)
        assert hand_over(prefill, decode, 2)[1] == "tcp"
        (peer_transport, _) = prefill.agent.loop._peer_transports.of(peers_of(prefill, "d")[0])
        assert peer_transport.state is not PeerTransportState.UP
        wait_until(lambda: peer_transport.state is PeerTransportState.UP)
        assert peer_transport.backoff.num_failures == 1, (
            "it has proved itself, and carried nothing yet"
        )
        expected, used = hand_over(prefill, decode, 3)
        assert expected == used


def test_a_handoff_waits_for_its_only_transport_to_be_on_trial(key: Credentials) -> None:
    with (
        node("p", kinds=("tcp",), key=key, links=MEASURED) as prefill,
        node("d", kinds=("tcp",), key=key, links=MEASURED) as decode,
    ):
        hand_over(prefill, decode)
        second = make_handoff(prefill, decode, num_ready=101, seed=5)
        second.start_receive()
        second.wait_until_granted()
        loop = prefill.agent.loop

        def begin_while_it_is_attached_again() -> None:
            (peer,) = peers_of(prefill, "d")
            table = loop._peer_transports
            table.penalize(peer, "tcp", "the connection broke")
            (route,) = table.of(peer)
            route.backoff.until = Backoff().until
            assert table.tick() == []
            assert route.state is PeerTransportState.ATTACHING
            loop.sending.start_send(second.sending)
            loop.sending.prefill_done(second.sending.ticket.id, FIRST, None, None)

        loop.call(begin_while_it_is_attached_again)
        second.check_landed()


def test_one_that_was_cut_is_used_again_where_there_is_no_memory_to_probe_it(
    key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_device: DeviceAccess | None = None) -> ProbeBuffer:
        raise TransferError("there is not that much memory")

    with node("d", kinds=("shared",), key=key, links=MEASURED) as decode:
        monkeypatch.setattr(ProbeBuffer, "allocate", refuse)
        with node("p", kinds=("shared",), key=key, links=MEASURED) as prefill:
            hand_over(prefill, decode)
            cut(prefill, "shared")
            (peer_transport,) = prefill.agent.loop._peer_transports.of(peers_of(prefill, "d")[0])
            wait_until(lambda: peer_transport.backoff.num_failures > 0)
            wait_until(lambda: peer_transport.state is PeerTransportState.UP)
            hand_over(prefill, decode, 2)


def test_surveys_stay_in_their_bounds(key: Credentials) -> None:
    tally = Tally()
    small = LinkOptions(bounds=ProbeBounds(0.15, 600_000))
    with (
        node("p", kinds=BOTH, key=key, links=small, observer=tally) as prefill,
        node("d", kinds=BOTH, key=key, links=small) as decode,
    ):
        decode.agent.decline(make_ticket(prefill.ref, decode.ref), "only to meet")
        wait_until(lambda: len(tally.probed) == 2)
        for peer_transport in prefill.agent.loop._peer_transports.of(
            next(iter(prefill.agent.loop._peers))
        ):
            assert 1 <= peer_transport.model.num_probes <= 12


def test_many_peers_take_turns_at_one_landing(key: Credentials) -> None:
    tallies = [Tally() for _ in range(3)]
    with (
        node("d", kinds=BOTH, key=key, links=MEASURED) as decode,
        node("p0", kinds=BOTH, key=key, links=MEASURED, observer=tallies[0]) as first,
        node("p1", kinds=BOTH, key=key, links=MEASURED, observer=tallies[1]) as second,
        node("p2", kinds=BOTH, key=key, links=MEASURED, observer=tallies[2]) as third,
    ):
        for prefill in (first, second, third):
            ticket = make_ticket(prefill.ref, decode.ref)
            decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
            prefill.agent.start_send(send_order(ticket, num_tokens=20, num_ready_tokens=20))
            prefill.agent.prefill_done(ticket.id, None)
        assert all(isinstance(event, KVLanded) for event in decode.wait_for(3))
        wait_until(lambda: all(len(tally.probed) == 2 for tally in tallies))


class AheadClock(MachineClock):
    """The machine's, ahead by what a test adds."""

    ahead_s = 0.0

    def now(self) -> Instant:
        return Instant(super().now() + self.ahead_s)


def step_loop_until(loop: AgentLoop, condition: Callable[[], bool]) -> None:
    deadline = CLOCK.now() + 10.0
    while not condition():
        assert CLOCK.now() < deadline, "not in 10 s"
        loop.step()


@pytest.mark.parametrize("num_probes", [0, 5])
def test_a_link_is_measured_though_handoffs_leave_no_room_for_longer_than_a_probe_may_take(
    key: Credentials, num_probes: int
) -> None:
    """Before the first probe, or after some."""
    tally, clock = Tally(), AheadClock()
    with (
        node(
            "p", kinds=("tcp",), key=key, links=MEASURED, observer=tally, clock=clock,
            is_stepped=True,
        ) as prefill,
        node("d", kinds=("tcp",), key=key, links=MEASURED) as decode,
    ):  # fmt: skip
        loop = prefill.agent.loop
        step_until = partial(step_loop_until, loop)
        decode.agent.decline(make_ticket(prefill.ref, decode.ref), "only to meet")
        step_until(lambda: loop._prober.active is not None)
        run = loop._prober.active
        assert run is not None
        step_until(lambda: len(run.series.samples) >= num_probes)
        write = TransferHandle("tcp", TransferId(1 << 40))
        loop.sending.writes[write] = run.peer_transport, new_ticket_id()
        step_until(lambda: run.is_ready and not run.is_in_flight)
        clock.ahead_s = STEP_TIMEOUT_S + 0.1
        step_until(lambda: loop._prober.active is None)
        assert bool(tally.probed) == bool(num_probes)
        del loop.sending.writes[write]
        step_until(lambda: ("push", "tcp") in tally.probed)


def test_a_link_whose_probe_was_not_answered_is_measured_later(
    key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PROBE_AGAIN_S", 1.0)  # peers are given up after three
    tally, clock = Tally(), AheadClock()
    lossy = Wrapped("tcp", FaultPlan(1, {Fault.DROP_NOTIFICATION: 1.0}, max_faults=1))
    with (
        node(
            "p", kinds=("tcp",), key=key, links=MEASURED, observer=tally, clock=clock,
            is_stepped=True,
        ) as prefill,
        node("d", kinds=("tcp",), key=key, links=MEASURED, wrap=lossy) as decode,
    ):  # fmt: skip
        loop = prefill.agent.loop
        decode.agent.decline(make_ticket(prefill.ref, decode.ref), "only to meet")
        step_loop_until(loop, lambda: lossy.made[0].injected[Fault.DROP_NOTIFICATION] == 1)
        clock.ahead_s = STEP_TIMEOUT_S + 0.1
        step_loop_until(loop, lambda: loop._prober.active is None)
        loop.step()
        assert loop._prober.active is None
        assert not tally.probed
        clock.ahead_s += 1.1
        step_loop_until(loop, lambda: ("push", "tcp") in tally.probed)


def test_a_probe_whose_turn_does_not_come_is_made_later(key: Credentials) -> None:
    tally = Tally()
    with (
        node("d", kinds=("tcp",), key=key, links=MEASURED) as decode,
        node("p", kinds=("tcp",), key=key, links=MEASURED, observer=tally) as prefill,
    ):
        target, busy = decode.agent.loop._probe_target, new_ticket_id()
        decode.agent.loop.call(lambda: target.try_take(busy))
        hand_over(prefill, decode)
        threading.Event().wait(1.5 * STEP_TIMEOUT_S)
        assert not tally.probed
        decode.agent.loop.call(lambda: target.release_window(busy))
        wait_until(lambda: set(tally.probed) == {("push", "tcp")})


def test_an_observer_that_fails_keeps_no_pages_of_what_was_written(key: Credentials) -> None:
    class Failing(Tally):
        def transferred(self, transfer: TransferTime) -> None:
            raise RuntimeError("a label that does not exist")

    with (
        node("d", kinds=("tcp",), key=key) as decode,
        node("p", kinds=("tcp",), key=key, observer=Failing()) as prefill,
    ):
        hand_over(prefill, decode)
        wait_until(lambda: not prefill.agent.loop.sending.num_sessions)
