"""Reports of a server's ranks as one: what is added, what is counted once, and the worst pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.gateway.rank_reports import merge_links, merge_transfers, worker_of
from baton.ids import Epoch
from baton.protocol.worker_http import MeasuredLink, MeasuredLinks
from baton.telemetry.transfer_report import (
    LinkDrift,
    SegmentCounts,
    StoreReport,
    StoreTier,
    TransferReport,
)
from baton.telemetry.transfers import (
    HandoffLabels,
    LandedHandoff,
    LinkLabels,
    Outcome,
    TransferTable,
)
from baton.testing.clocks import ManualClock
from tests.unit.telemetry.test_transfers import landed_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
NAMES = {"p0", "d0"}


class Rank:
    """What one rank of a decode worker counts."""

    def __init__(self, epoch: str, num_lapsed_leases: int = 0) -> None:
        self.table = TransferTable(Epoch(epoch), ManualClock(), lambda: num_lapsed_leases)

    def handoff(self, took_s: float, transport: str = "tcp") -> None:
        """4 MiB from p0, half of whose time was exposed."""
        trace = landed_trace("p0", done=1.0 + took_s / 2, landed=1.0 + took_s)
        landed = LandedHandoff.of(trace)
        assert landed is not None
        self.table.handoff(trace, HandoffLabels("same_host", transport, "push", "WRITE"), landed)

    def read(self, peer: str, took_s: float) -> None:
        """1 MiB."""
        outcome = Outcome(peer, "same_host", "tcp", "pull", 1, MIB, 0.1, took_s, refined=True)
        self.table.link(outcome, LinkLabels("same_host", "tcp", "READ"))


def merge(ranks: Sequence[Rank]) -> TransferReport:
    return merge_transfers({n: rank.table.report() for n, rank in enumerate(ranks)}, NAMES)


def test_a_handoff_of_all_ranks_is_one_with_the_bytes_of_all() -> None:
    ranks = Rank("a"), Rank("b")
    for number in range(10):
        for rank, took_s in zip(ranks, (0.1, 0.2), strict=True):
            rank.handoff(took_s + number * 1e-4)
    (pair,) = merge(ranks).handoffs
    (of_second,) = ranks[1].table.report().handoffs
    assert (pair.num, pair.num_bytes) == (10, 2 * of_second.num_bytes)
    assert (pair.seconds, pair.exposed_s) == (of_second.seconds, of_second.exposed_s)
    assert sum(pair.transfer_s.counts) == 20
    assert pair.transfer_s.quantile(0.25) == pytest.approx(0.1, rel=0.02)
    assert pair.transfer_s.quantile(0.75) == pytest.approx(0.2, rel=0.02)


def test_a_rank_over_another_transport_is_an_entry_of_its_own() -> None:
    """This is what a look at the first rank alone does not show."""
    ranks = Rank("a"), Rank("b")
    ranks[0].handoff(0.1, "shared")
    ranks[1].handoff(0.1, "tcp")
    found = {each.transport: each.num for each in merge(ranks).handoffs}
    assert found == {"shared": 1, "tcp": 1}


def test_a_link_is_the_sum_of_its_pairs_of_ranks() -> None:
    ranks = Rank("a"), Rank("b")
    for number, rank in enumerate(ranks):
        rank.read("p0/0", 0.1)
        rank.read(f"p0/{number}", 0.3)
    (link,) = merge(ranks).links
    # Rank 0 has read from rank 0 alone, rank 1 from both.
    assert (link.peer, link.num_rank_pairs, link.num, link.num_bytes) == ("p0", 3, 4, 4 * MIB)
    assert link.observed_s == pytest.approx(0.8)
    assert sum(link.transfer_s.counts) == 4


@pytest.mark.parametrize("slow", [0, 1])
def test_a_link_has_drifted_when_one_of_its_pairs_has(slow: int) -> None:
    reports = []
    for number in range(2):
        rank = Rank("a")
        rank.read(f"p0/{number}", 0.1)
        report = rank.table.report()
        drift = LinkDrift(state="steady", ratio=1.4, since_s=5.0)
        if number == slow:
            drift = LinkDrift(state="drifted", ratio=1.3, since_s=2.0)
        links = tuple(msgspec.structs.replace(link, drift=drift) for link in report.links)
        reports.append(msgspec.structs.replace(report, links=links))
    (link,) = merge_transfers(dict(enumerate(reports)), NAMES).links
    assert link.drift == LinkDrift(
        state="drifted", ratio=1.3, since_s=2.0, ranks=f"{slow} to {slow}"
    )


def test_a_rank_keeps_its_number_where_others_are_silent() -> None:
    rank = Rank("a")
    rank.read("p0", 0.1)
    (link,) = merge_transfers({1: rank.table.report()}, NAMES).links
    assert link.drift is not None
    assert (link.drift.ranks, link.num_rank_pairs) == ("0 to 1", 1)
    (link,) = merge_transfers({0: rank.table.report()}, NAMES).links
    assert link.drift is not None
    assert link.drift.ranks == "", "between two workers of one rank each"


def test_counts_of_faults_and_the_lives_of_all_ranks() -> None:
    ranks = Rank("a", num_lapsed_leases=3), Rank("b", num_lapsed_leases=2)
    for rank in ranks:
        rank.table.digest_failures(2)
    report = merge(ranks)
    assert (report.num_digest_failures, report.num_lapsed_leases) == (4, 3)
    assert report.epoch == "a b"
    assert merge(ranks[:1]).epoch == "a", "a rank that has not reported yet is another life"


@pytest.mark.parametrize(
    ("peer", "worker"), [("p0", "p0"), ("p0/0", "p0"), ("p0/12", "p0"), ("gone/3", "gone"),
                         ("p0/x", "p0/x"), ("a/1", "a/1")]
)  # fmt: skip
def test_a_peer_is_a_worker_or_one_of_its_ranks(peer: str, worker: str) -> None:
    assert worker_of(peer, {*NAMES, "a/1"}) == worker


def test_a_handoff_waits_for_the_slowest_pair() -> None:
    def link(peer: str, byte_s: float) -> MeasuredLink:
        return MeasuredLink(peer, "pull", "tcp", 1e-4, byte_s, 1, 1)

    reports = [MeasuredLinks((link(f"p0/{n}", byte_s),)) for n, byte_s in enumerate((1e-9, 3e-9))]
    merged = merge_links(dict(enumerate(reports)), NAMES)
    assert merged == MeasuredLinks((link("p0", 3e-9),))


def test_segments_of_all_ranks_are_added() -> None:
    ranks = Rank("a"), Rank("b")
    for number, rank in enumerate(ranks):
        rank.table.segments(f"p0/{number}", "same_rack", "tcp", SegmentCounts(100, 3, 1, MIB))
    ranks[1].table.segments("p0", "same_rack", "nixl", SegmentCounts(7, 0, 0, 10))
    tcp, nixl = merge(ranks).segments
    assert (tcp.peer, tcp.transport) == ("p0", "tcp")
    assert tcp.sent == SegmentCounts(200, 6, 2, 2 * MIB)
    assert nixl.sent.num == 7


def test_a_stores_entries_are_added_and_its_prompts_counted_once() -> None:
    def report(used_bytes: int, *, is_available: bool) -> TransferReport:
        tier = StoreTier(
            tier="shared", used_bytes=used_bytes, capacity_bytes=100, num_hits=3, num_misses=1,
            read_bytes=MIB, written_bytes=2, is_available=is_available,
        )  # fmt: skip
        store = StoreReport(tiers=(tier,), num_prompts_found=5, num_prompts_missing=used_bytes)
        return TransferReport(epoch="a", store=store)

    ranks = {0: report(9, is_available=True), 1: report(11, is_available=False)}
    store = merge_transfers(ranks, NAMES).store
    assert store is not None
    (tier,) = store.tiers
    assert (tier.used_bytes, tier.capacity_bytes, tier.is_available) == (11, 100, False)
    assert (tier.num_hits, tier.num_misses, tier.read_bytes) == (6, 2, 2 * MIB)
    assert (store.num_prompts_found, store.num_prompts_missing) == (5, 11)
    assert merge_transfers({0: TransferReport(epoch="a")}, NAMES).store is None
