"""What a route reports of transfers that end in order, or fail in any order."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.handoff.peer_transports import PeerTransport
from baton.transfer.links.cost_model import NETWORK, TransferShape

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9)),
        st.tuples(st.just("end"), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.just(("drop", 0)),
    ),
    max_size=30,
)


@dataclass
class Transfer:
    num_bytes: int
    began_at: float
    bytes_in_flight: int  # its own, and those that were under way before it
    may_be_timed: bool


@given(STEPS)
def test_what_is_reported_is_what_happened(steps: list[tuple[str, int]]) -> None:
    route = PeerTransport("d", SimpleNamespace(kind="tcp"), {}, "push", NETWORK)
    under_way: list[Transfer] = []
    period: list[Transfer] | None = []  # None: one of these failed
    for now, (what, number) in enumerate(steps):
        if what == "submit":
            choice = SimpleNamespace(shape=TransferShape(number, 1), predicted_s=1.0)
            if not under_way:
                period = []
            in_flight = sum(each.num_bytes for each in under_way) + number
            under_way.append(Transfer(number, now, in_flight, may_be_timed=True))
            if period is not None:
                period.append(under_way[-1])
            route.submitted(choice, Instant(now), Instant(now))
        elif what == "drop":
            route.drop()
        elif under_way and what == "fail":
            under_way.pop(number % len(under_way))
            route.failed()
        elif under_way:
            ended = under_way.pop(0)
            transfer, outcome = route.ended(Instant(now))
            if transfer is not None:
                assert ended.may_be_timed
                assert transfer.num_bytes == ended.bytes_in_flight
                assert transfer.seconds == now - ended.began_at
            else:
                assert period is None, "no transfer failed since the route was idle"
            assert (outcome is not None) == (period is not None and not under_way)
            if outcome is not None and period is not None:
                assert outcome.num_bytes == sum(each.num_bytes for each in period)
                assert outcome.observed_s == now - period[0].began_at
        if what in {"fail", "drop"}:
            period = None
            for each in under_way:
                each.may_be_timed = False
