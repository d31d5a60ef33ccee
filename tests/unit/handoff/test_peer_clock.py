"""A peer's clock, as round trips over the link show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from baton.handoff.peers import NUM_ROUND_TRIPS, Peer

if TYPE_CHECKING:
    from baton.handoff.link import Link

LEAD_S = 1000.0
"""By which the peer's clock is ahead at first."""


@pytest.fixture(name="peer")
def peer_fixture() -> Peer:
    return Peer(cast("Link", None), dialed=None)


def exchange(peer: Peer, sent_at: float, lead_s: float, rtt_s: float) -> None:
    peer.measure_clock(sent_at, sent_at + rtt_s / 2 + lead_s, sent_at + rtt_s)


def test_the_shortest_round_trip_counts(peer: Peer) -> None:
    exchange(peer, 10.0, LEAD_S, rtt_s=0.001)
    peer.measure_clock(11.0, 11.0 + LEAD_S, 11.5)  # all of it on the way back
    assert peer.to_local(12.0 + LEAD_S) == pytest.approx(12.0)


def test_a_clock_that_drifts_is_followed_though_no_round_trip_is_as_short_again(peer: Peer) -> None:
    exchange(peer, 10.0, LEAD_S, rtt_s=0.0001)
    for second in range(3600):  # 100 ppm, as of two machines that no time server keeps together
        exchange(peer, 11.0 + second, LEAD_S + second * 1e-4, rtt_s=0.001)
    lead_s = LEAD_S + 3600 * 1e-4
    assert peer.to_local(3611.0 + lead_s) == pytest.approx(3611.0, abs=NUM_ROUND_TRIPS * 1e-3)


def test_an_answer_to_what_was_not_asked_yet_shows_nothing(peer: Peer) -> None:
    exchange(peer, 10.0, LEAD_S, rtt_s=0.001)
    peer.measure_clock(20.0, 5.0, 19.0)
    assert peer.to_local(12.0 + LEAD_S) == pytest.approx(12.0)
