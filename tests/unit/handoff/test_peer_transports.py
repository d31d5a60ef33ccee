"""Routes to one peer. Its transport attaches when the test has it attach, and moves nothing."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.errors import TransferError
from baton.handoff.peer_transports import (
    PeerTransport,
    PeerTransportLost,
    PeerTransportState,
    PeerTransportTable,
    PeerTransportUp,
    Reachability,
)
from baton.handoff.prefill_sender import PrefillSender
from baton.handoff.probing import PROBE_AGAIN_S, STEP_TIMEOUT_S, LinkProber
from baton.testing.clocks import ManualClock
from baton.transfer.interface import RemoteAttached
from baton.transfer.links.choice import NullObserver
from baton.transfer.links.cost_model import NETWORK, TransferShape
from baton.transfer.links.probes import ProbeBounds
from baton.transfer.transports.tcp.transport import TcpTransport
from tests.unit.handoff.test_send_session import make_written_session

MIB_100 = SimpleNamespace(shape=TransferShape(100 << 20, 1), predicted_s=0.1)


class IdleTransport:
    capabilities = TcpTransport.capabilities

    def __init__(self, kind: str = "tcp") -> None:
        self.kind, self._ids = kind, count()

    def attach(self, _descriptor: object) -> int:
        return next(self._ids)

    def detach(self, remote: int) -> None:
        pass


class Route:
    """A table with one peer, and one route to it, with or without another one."""

    def __init__(self, other: str | None = None) -> None:
        self.clock, self.transport = ManualClock(), IdleTransport()
        transports = [self.transport]
        if other is not None:
            transports.append(IdleTransport(other))
        self.table = PeerTransportTable(
            tuple(transports),
            clock=self.clock,
            rule="measured",
            preferred_op="WRITE",
            probed_transports={each.kind for each in transports},
            observer=NullObserver(),
        )
        regions = tuple(SimpleNamespace(transport=each.kind) for each in transports)
        self.peer = SimpleNamespace(
            name="d",
            dialed=None,
            hello=SimpleNamespace(preferred_op="WRITE", probe_buffers=regions),
            negotiated=SimpleNamespace(theirs=SimpleNamespace(regions=regions)),
            encoded_views={},
        )
        assert self.table.attach_all(self.peer) == []
        self.only, *others = self.table.of(self.peer)
        for each in others:
            self.table.attached(each.transport, each.remotes[RAW])

    def attached(self) -> PeerTransportUp | None:
        return self.table.attached(self.transport, self.only.remotes[RAW])

    def fail_and_attach_again(self) -> None:
        self.table.lost(self.transport, self.only.remotes[RAW], TransferError("it broke"))
        assert self.only.state is PeerTransportState.DOWN
        self.clock.advance(1.0)
        assert self.table.tick() == []
        assert self.only.state is PeerTransportState.ATTACHING


def test_a_route_that_is_probed_before_it_is_used_again_is_waited_for() -> None:
    route = Route()
    route.attached()
    assert route.table.reach(route.peer) is Reachability.READY
    route.fail_and_attach_again()
    assert route.attached() is not None
    assert route.table.reach(route.peer) is Reachability.WAITING
    assert route.table.reach(route.peer, {"tcp"}) is Reachability.NONE
    assert route.table.probed(route.peer, "tcp", NETWORK) == PeerTransportUp(route.peer)
    assert route.table.reach(route.peer) is Reachability.READY


def test_who_waits_for_a_route_learns_that_its_probes_failed() -> None:
    route = Route()
    route.attached()
    route.fail_and_attach_again()
    route.attached()
    route.table.penalize(route.peer, "tcp", "no answer to a probe")
    assert route.table.reach(route.peer) is Reachability.NONE
    assert route.table.tick() == [PeerTransportLost(route.peer, "tcp")]
    assert route.table.tick() == [], "reported once"


def test_a_route_that_was_up_is_not_reported_as_no_handoff_waits_for_it() -> None:
    route = Route()
    route.attached()
    route.table.penalize(route.peer, "tcp", "a probe brought other bytes")
    assert route.table.tick() == []


def test_handoffs_over_another_route_do_not_fail_over_from_one_whose_probes_failed() -> None:
    route = Route("other")
    route.attached()
    route.fail_and_attach_again()
    route.attached()
    assert route.only.state is PeerTransportState.HALF_OPEN
    session = make_written_session()
    outgoing = SimpleNamespace(
        session=session, granted=SimpleNamespace(peer=route.peer), waits=False
    )
    sender = PrefillSender.__new__(PrefillSender)
    sender._context = SimpleNamespace(peer_transports=route.table)
    sender._of = lambda _: [outgoing]
    route.table.penalize(route.peer, "tcp", "no answer to a probe")
    (lost,) = route.table.tick()
    sender.transport_down(lost)
    assert session.excluded == set()
    assert session.order.trace.reroutes == []


def test_a_half_open_route_is_not_being_attached() -> None:
    """Who could read over it has the peer write meanwhile."""
    route = Route()
    assert route.table.is_attaching(route.peer)
    route.attached()
    route.fail_and_attach_again()
    assert route.table.is_attaching(route.peer)
    route.attached()
    assert not route.table.is_attaching(route.peer)


def make_prober(route: Route) -> LinkProber:
    target = SimpleNamespace(has_memory=True)
    peers = SimpleNamespace(send=lambda *_: None)
    return LinkProber(route.table, peers, target, ProbeBounds())


def test_a_half_open_route_is_probed_though_data_is_moving_and_others_are_not() -> None:
    """Handoffs may wait for it, on a worker that is never idle."""
    route = Route()
    prober = make_prober(route)
    route.attached()
    prober.ask(route.peer)
    prober.step(num_handoffs=1, is_moving=True)
    assert prober.active is None
    route.fail_and_attach_again()
    route.attached()
    prober.ask(route.peer)
    prober.step(num_handoffs=1, is_moving=True)
    assert prober.active is not None


def test_a_route_that_failed_before_it_was_measured_is_measured_once_it_works() -> None:
    route = Route()
    prober = make_prober(route)
    route.fail_and_attach_again()
    route.attached()
    prober.ask(route.peer)
    prober.step(num_handoffs=0, is_moving=False)
    assert prober.active is not None
    assert prober.active.is_half_open
    prober.active = None  # its two probes were right
    assert route.table.probed(route.peer, "tcp", NETWORK) == PeerTransportUp(route.peer)
    prober.ask(route.peer)
    assert len(prober.waiting) == 1
    prober.step(num_handoffs=0, is_moving=False)
    assert prober.active is not None
    assert not prober.active.is_half_open
    prober.active = None
    prober.ask(route.peer)
    assert not prober.waiting


def test_a_half_open_route_that_cannot_be_probed_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    route = Route()
    prober = make_prober(route)
    route.attached()
    route.fail_and_attach_again()
    route.attached()
    prober.ask(route.peer)

    def refuse(_: object) -> int:
        raise TransferError("too many open files")

    monkeypatch.setattr(route.transport, "attach", refuse)
    prober.step(num_handoffs=0, is_moving=False)
    assert route.table.reach(route.peer) is Reachability.NONE
    assert PeerTransportLost(route.peer, "tcp") in route.table.tick()


def test_a_route_that_is_attached_slowly_is_probed_again_after_a_pause() -> None:
    route = Route()
    prober = make_prober(route)
    route.attached()
    prober.ask(route.peer)
    prober.step(num_handoffs=0, is_moving=False)
    assert prober.active is not None
    route.clock.advance(STEP_TIMEOUT_S + 0.1)
    for _ in range(2):
        prober.step(num_handoffs=0, is_moving=False)
        assert prober.active is None
    route.clock.advance(PROBE_AGAIN_S)
    prober.step(num_handoffs=0, is_moving=False)
    assert prober.active is not None


def test_the_time_to_attach_is_not_taken_from_the_time_to_answer() -> None:
    route = Route()
    prober = make_prober(route)
    route.attached()
    prober.ask(route.peer)
    prober.step(num_handoffs=0, is_moving=False)
    run = prober.active
    assert run is not None
    route.clock.advance(STEP_TIMEOUT_S - 0.1)
    prober.handle_transfer_event(route.transport, RemoteAttached(run.remote))
    route.clock.advance(STEP_TIMEOUT_S - 0.1)
    prober.step(num_handoffs=0, is_moving=False)
    assert prober.active is run


@pytest.mark.parametrize("is_idle_before", [False, True])
def test_what_is_under_way_when_a_transfer_fails_is_not_taken_for_a_later_one(
    is_idle_before: bool,
) -> None:
    route = PeerTransport("d", IdleTransport(), {}, "push", NETWORK)
    for _ in range(2):  # A and B, of two handoffs
        route.submitted(MIB_100, Instant(0.0), Instant(0.0))
    route.failed()  # A is refused: its client left, and its grant was closed
    route.submitted(MIB_100, Instant(1.0), Instant(1.0))  # C, with B under way
    assert route.ended(Instant(1.001)) == (None, None), "B"
    if is_idle_before:
        assert route.ended(Instant(1.1)) == (None, None), "C"
        assert route.model is NETWORK
    route.submitted(MIB_100, Instant(2.0), Instant(2.0))
    if not is_idle_before:
        assert route.ended(Instant(2.1)) == (None, None), "C"
    transfer, outcome = route.ended(Instant(2.2))
    assert transfer is not None
    num_waited = 1 if is_idle_before else 2
    assert (transfer.num_bytes, transfer.seconds) == (num_waited * (100 << 20), pytest.approx(0.2))
    assert (outcome is not None) == is_idle_before, "C was not timed, and D was under way with it"
