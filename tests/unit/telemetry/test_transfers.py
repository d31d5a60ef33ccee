from __future__ import annotations

import msgspec
import pytest

from baton.ids import Epoch
from baton.router.topology import Distance
from baton.router.topology import name_distance as name_of_places
from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.transfer_report import DISTANCES, MAX_ENTRIES, TransferReport
from baton.telemetry.transfers import (
    HandoffLabels,
    LandedHandoff,
    LinkLabels,
    Outcome,
    TransferTable,
    name_distance,
)
from baton.testing.clocks import ManualClock

LABELS = HandoffLabels("same_rack", "tcp", "push", "WRITE")
EPOCH = Epoch("1" * 32)


def landed_trace(
    peer: str = "p0", *, ready: float = 1.0, done: float = 1.5, landed: float = 2.0
) -> RequestSpan:
    """A decode worker's trace: all but `landed` are prefill's instants."""
    trace = RequestSpan(request_id="req-1", worker="d0", epoch=EPOCH, role="decode", peer=peer)
    trace.transport = trace.expected_transport = "tcp"
    trace.num_bytes = 4 << 20
    trace.peer_stamps = {Stamp.FIRST_LAYER_READY: ready, Stamp.PREFILL_DONE: done}
    trace.stamp(Stamp.LAST_LAYER_LANDED, landed)
    trace.stamp(Stamp.KV_READY, landed)
    return trace


def add(table: TransferTable, trace: RequestSpan, labels: HandoffLabels = LABELS) -> None:
    landed = LandedHandoff.of(trace)
    assert landed is not None
    table.handoff(trace, labels, landed)


def outcome(peer: str = "p0", *, refined: bool = True) -> Outcome:
    return Outcome(peer, "same_rack", "tcp", "pull", 2, 2 << 20, 0.1, 0.2, refined)


def test_the_names_of_distances_are_the_routers() -> None:
    assert [str(each) for each in Distance] == list(DISTANCES)
    assert [name_distance(text) for text in (None, "", "next_door", "same_host")] == [
        *["unknown"] * 3,
        "same_host",
    ]


def test_figures_of_a_handoff() -> None:
    assert LandedHandoff.of(landed_trace()) == LandedHandoff(1.0, 0.25, 0.5, 0.5)
    hidden = LandedHandoff.of(landed_trace(done=2.5))
    assert hidden == LandedHandoff(1.0, 0.25, 0.0, 0.0)
    apart = LandedHandoff.of(landed_trace(ready=2.1, done=2.2))
    assert apart == LandedHandoff(0.0, None, 0.0, None), "no time is negative"


def test_a_handoff_that_did_not_land_or_was_sent_has_no_figures() -> None:
    trace = landed_trace()
    del trace.stamps[Stamp.LAST_LAYER_LANDED]
    assert LandedHandoff.of(trace) is None
    sent = landed_trace()
    sent.role = "prefill"
    assert LandedHandoff.of(sent) is None


def test_a_report_has_each_pair_with_its_sums_and_histograms() -> None:
    table = TransferTable(EPOCH, ManualClock())
    add(table, landed_trace())
    add(table, landed_trace(landed=3.0))
    table.link(outcome(), LinkLabels("same_rack", "tcp", "READ"))
    table.link(outcome(refined=False), LinkLabels("same_rack", "tcp", "READ"))
    report = msgspec.json.decode(msgspec.json.encode(table.report()), type=TransferReport)
    (pair,), (link,) = report.handoffs, report.links
    assert (pair.peer, pair.num, pair.num_bytes) == ("p0", 2, 8 << 20)
    assert (pair.seconds, pair.exposed_s) == (3.0, 2.0)
    assert pair.transfer_s.quantile(1.0) == pytest.approx(2.0, rel=0.01)
    assert pair.s_per_mib.quantile(0.0) == pytest.approx(0.25, rel=0.01)
    assert pair.exposed_share.quantile(1.0) == pytest.approx(0.75, rel=0.01)
    assert (link.peer, link.num, link.num_bytes) == ("p0", 2, 4 << 20)
    assert (link.predicted_s, link.observed_s) == (0.2, 0.4)
    assert link.s_per_mib.quantile(0.5) == pytest.approx(0.1, rel=0.01)
    assert sum(link.observed_ratio.counts) == 1, "a time of submitting measures no link"
    assert link.observed_ratio.quantile(0.5) == pytest.approx(2.0, rel=0.01)


def test_the_last_mismatch_is_shown_with_its_age() -> None:
    clock = ManualClock()
    table = TransferTable(EPOCH, clock)
    trace = landed_trace()
    trace.expected_transport = "shared"
    add(table, trace)
    clock.advance(7.0)
    (pair,) = table.report().handoffs
    assert pair.num_mismatches == 1
    assert pair.last_mismatch is not None
    assert msgspec.structs.astuple(pair.last_mismatch) == ("shared", "tcp", 7.0, "req-1")


def test_peers_that_were_idle_for_longest_are_dropped() -> None:
    table = TransferTable(EPOCH, ManualClock())
    for number in range(MAX_ENTRIES):
        add(table, landed_trace(f"p{number}"))
    add(table, landed_trace("p0"))
    add(table, landed_trace("new" * 1000))
    report = table.report()
    peers = [each.peer for each in report.handoffs]
    assert len(peers) == MAX_ENTRIES
    assert (peers[0], peers[-2]) == ("p2", "p0")
    assert report.num_forgotten == 1
    assert msgspec.json.decode(msgspec.json.encode(report), type=TransferReport) == report


def test_a_ticket_names_a_distance_only_where_both_workers_report_their_place() -> None:
    assert name_of_places("z/r/h", "z/r/other") == "same_rack"
    assert name_of_places("//h", "//other") == "same_zone"
    assert name_of_places("", "z/r/h") == name_of_places("z/r/h", "") == ""
