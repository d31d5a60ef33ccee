from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.rank_reports import merge_transfers
from baton.gateway.transfer_feed import WINDOW_S, TransferFeed
from baton.gateway.transfer_page import MOST_LISTED, TransferPage, TransferPageReply
from baton.gateway.upstream import Upstream
from baton.gateway.workers import Worker, Workers
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.telemetry.transfer_report import (
    MAX_ENTRIES,
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
from tests.unit.gateway.test_workers import info
from tests.unit.telemetry.test_transfers import landed_trace

KEY = Credentials.of(ClusterKey(b"k" * 32))
MIB = 1 << 20


class Fleet:
    """Workers that have reported, without a network."""

    def __init__(self, *names: str) -> None:
        addresses = tuple(
            WorkerAddress(f"http://10.0.0.5:{n}", Role.DECODE) for n in range(1, len(names) + 1)
        )
        self.clock = ManualClock()
        workers = Workers(addresses, GatewayMetrics())
        upstream = Upstream(GatewayOptions(addresses=addresses, credentials=KEY, tls="off"))
        self.feed = TransferFeed(workers, upstream, self.clock)
        self.page = TransferPage(self.feed, self.clock)
        self.tables: dict[str, TransferTable] = {}
        self.workers: dict[str, Worker] = {}
        for name, worker in zip(names, workers.all, strict=True):
            workers.register(worker, info(worker=WorkerId(name)))
            self.workers[name] = worker
            self.tables[name] = TransferTable(Epoch("1" * 32), self.clock)

    def handoff(
        self, decode: str, took_s: float, peer: str = "p0", distance: str = "same_host"
    ) -> None:
        """4 MiB that took so long; half of it was exposed."""
        trace = landed_trace(peer, done=1.0 + took_s / 2, landed=1.0 + took_s)
        landed = LandedHandoff.of(trace)
        assert landed is not None
        labels = HandoffLabels(distance, "tcp", "push", "WRITE")
        self.tables[decode].handoff(trace, labels, landed)

    def report(self, name: str, report: TransferReport | None = None) -> None:
        merged = merge_transfers({0: report or self.tables[name].report()}, self.tables.keys())
        self.feed.reports[self.workers[name]] = merged
        asyncio.run(self.feed.note_reports())

    def show(self) -> TransferPageReply:
        return asyncio.run(self.page.show())


def test_a_pair_has_its_figures_since_the_start_and_of_the_last_minute() -> None:
    fleet = Fleet("d0")
    fleet.handoff("d0", 0.1)
    fleet.report("d0")
    (pair,) = fleet.show().handoffs
    assert (pair.prefill, pair.decode, pair.mode, pair.operation) == ("p0", "d0", "push", "WRITE")
    assert (pair.total.num, pair.recent.num) == (1, 0), "it was before the gateway looked"
    assert pair.recent.transfer_s.p50 is None
    fleet.clock.advance(5.0)
    fleet.handoff("d0", 1.0)
    fleet.report("d0")
    (pair,) = fleet.show().handoffs
    assert (pair.total.num, pair.recent.num) == (2, 1)
    assert (pair.total.num_bytes, pair.recent.num_bytes) == (8 * MIB, 4 * MIB)
    assert pair.recent.transfer_s.p50 == pytest.approx(1.0, rel=0.01)
    assert pair.recent.s_per_mib.p99 == pytest.approx(0.25, rel=0.01)
    assert pair.recent.bytes_per_s.p99 == pytest.approx(4 * MIB, rel=0.01)
    assert pair.recent.exposed_share.p50 == pytest.approx(0.5, rel=0.01)
    assert pair.recent.exposed_s == pytest.approx(0.5)
    fleet.clock.advance(WINDOW_S)
    (pair,) = fleet.show().handoffs
    assert (pair.total.num, pair.recent.num) == (2, 0), "a worker that reports no more is idle"


def test_a_worker_that_was_started_again_counts_from_zero() -> None:
    fleet = Fleet("d0")
    for _ in range(3):
        fleet.handoff("d0", 0.1)
    fleet.report("d0")
    fleet.tables["d0"] = TransferTable(Epoch("2" * 32), fleet.clock)
    fleet.handoff("d0", 0.1)
    fleet.report("d0")
    (pair,) = fleet.show().handoffs
    assert (pair.total.num, pair.recent.num) == (1, 0)


def test_an_entry_that_was_dropped_in_between_is_recent_as_a_whole() -> None:
    fleet = Fleet("d0")
    for _ in range(3):
        fleet.handoff("d0", 0.1)
    fleet.report("d0")
    for number in range(MAX_ENTRIES):
        fleet.handoff("d0", 0.1, f"other-{number}")
    fleet.handoff("d0", 0.2)
    fleet.report("d0")
    (pair,) = [each for each in fleet.show().handoffs if each.prefill == "p0"]
    assert (pair.total.num, pair.recent.num) == (1, 1)


def test_distances_merge_all_pairs_with_their_histograms() -> None:
    fleet = Fleet("d0", "d1")
    for name in ("d0", "d1"):
        fleet.report(name)
    for _ in range(98):
        fleet.handoff("d0", 0.01)
    for _ in range(2):
        fleet.handoff("d1", 1.0)
    fleet.handoff("d1", 5.0, distance="cross_zone")
    for name in ("d0", "d1"):
        fleet.report(name)
    near, far = sorted(fleet.show().handoffs_by_distance, key=lambda each: each.num_pairs)[::-1]
    assert (near.distance, far.distance) == ("same_host", "cross_zone")
    assert (near.num_pairs, near.total.num, near.recent.num) == (2, 100, 100)
    assert near.recent.transfer_s.p50 == pytest.approx(0.01, rel=0.01)
    assert near.recent.transfer_s.p99 == pytest.approx(1.0, rel=0.01)
    assert sum(near.total_histograms.transfer_s.counts) == 100
    assert far.total_histograms.s_per_mib.quantile(0.5) == pytest.approx(1.25, rel=0.01)


def test_a_link_names_a_servers_rank_as_the_server() -> None:
    fleet = Fleet("d0", "v0")
    outcome = Outcome("v0/1", "same_rack", "tcp", "pull", 1, MIB, 0.1, 0.2, refined=True)
    fleet.tables["d0"].link(outcome, LinkLabels("same_rack", "tcp", "READ"))
    for name in ("d0", "v0"):
        fleet.report(name)
    page = fleet.show()
    (link,), (distance,) = page.links, page.links_by_distance
    assert (link.worker, link.peer, link.operation) == ("d0", "v0", "READ")
    assert link.total.observed_ratio.p50 == pytest.approx(2.0, rel=0.01)
    assert link.total.bytes_per_s.p50 == pytest.approx(5 * MIB, rel=0.01)
    assert (distance.distance, distance.operation, distance.num_links) == ("same_rack", "READ", 1)
    assert link.drift is not None
    assert (link.drift.state, link.drift.ranks, link.num_rank_pairs) == ("learning", "1 to 0", 1)


def test_the_busiest_pairs_are_listed_and_all_count() -> None:
    names = [f"d{n}" for n in range(MOST_LISTED // MAX_ENTRIES + 1)]
    fleet = Fleet(*names)
    for name in names:
        fleet.report(name)
        for number in range(MAX_ENTRIES):
            fleet.handoff(name, 0.1, f"p{number}")
        fleet.report(name)
    for _ in range(2):
        fleet.handoff("d0", 0.1, "p7")
    fleet.report("d0")
    page = fleet.show()
    assert len(page.handoffs) == MOST_LISTED
    assert page.num_left_out == len(names) * MAX_ENTRIES - MOST_LISTED
    assert (page.handoffs[0].prefill, page.handoffs[0].decode) == ("p7", "d0")
    (distance,) = page.handoffs_by_distance
    assert distance.total.num == len(names) * MAX_ENTRIES + 2


def test_segments_are_shown_from_their_sender_to_their_receiver() -> None:
    fleet = Fleet("p0", "d0")
    fleet.tables["p0"].segments("d0", "same_rack", "tcp", SegmentCounts(1000, 5, 1, 10 * MIB))
    fleet.report("p0")
    (pair,) = fleet.show().segments
    assert (pair.sender, pair.receiver, pair.distance) == ("p0", "d0", "same_rack")
    assert (pair.total.num, pair.total.lost_share) == (1000, 0.004)
    assert (pair.recent.num, pair.recent.lost_share) == (0, None), (
        "it was before the gateway looked"
    )
    fleet.clock.advance(5.0)
    fleet.tables["p0"].segments("d0", "same_rack", "tcp", SegmentCounts(100, 2, 0, MIB))
    fleet.report("p0")
    (pair,) = fleet.show().segments
    assert (pair.recent.num, pair.recent.num_retransmitted, pair.recent.lost_share) == (
        100,
        2,
        0.02,
    )
    fleet.clock.advance(5.0)
    table = TransferTable(Epoch("2" * 32), fleet.clock)
    table.segments("d0", "same_rack", "tcp", SegmentCounts(10, 0, 0, 100))
    fleet.report("p0", table.report())
    (pair,) = fleet.show().segments
    assert (pair.total.num, pair.recent.num) == (10, 0), "another life of the worker"


def stored(num: int, used_bytes: int = 5, *, is_available: bool = True) -> TransferReport:
    """A worker's report after so many hits, as many misses in the first of its two tiers."""
    tier = StoreTier(
        tier="shared", used_bytes=used_bytes, capacity_bytes=10, num_hits=num, num_misses=num,
        read_bytes=num * MIB, written_bytes=0,
    )  # fmt: skip
    lower = StoreTier(
        tier="redis", used_bytes=7, capacity_bytes=0, num_hits=0, num_misses=0,
        read_bytes=0, written_bytes=num, is_available=is_available,
    )  # fmt: skip
    report = StoreReport(tiers=(tier, lower), num_prompts_found=3 * num, num_prompts_missing=num)
    return TransferReport(epoch="1" * 32, store=report)


def test_tiers_have_their_figures_by_worker_and_of_all_workers() -> None:
    fleet = Fleet("d0", "d1", "no store")
    for name in fleet.workers:
        fleet.report(name)
    store = fleet.show().store
    assert (store.tiers, store.worker_tiers) == ((), ())
    assert store.total_prompts.found_share is None
    fleet.report("d0", stored(10))
    fleet.report("d1", stored(20, used_bytes=9, is_available=False))
    fleet.clock.advance(5.0)
    fleet.report("d0", stored(30))
    store = fleet.show().store
    shared, redis = store.tiers
    assert (shared.tier, shared.num_workers, shared.num_unavailable) == ("shared", 2, 0)
    assert (shared.fullest, shared.used_bytes, shared.capacity_bytes) == ("d1", 9, 10)
    assert (shared.total.num_hits, shared.total.hit_share) == (50, 0.5)
    assert shared.total.read_bytes == 50 * MIB
    assert (redis.num_unavailable, redis.total.hit_share, redis.capacity_bytes) == (1, None, 0)
    names = [(each.worker, each.tier) for each in store.worker_tiers]
    assert names == [("d0", "shared"), ("d0", "redis"), ("d1", "shared"), ("d1", "redis")]
    assert store.total_prompts.num_found == 150
    assert store.total_prompts.found_share == 0.75
    fleet.clock.advance(WINDOW_S - 5.0)
    fleet.report("d0", stored(31))
    fleet.report("d1", stored(20))
    shared, _ = fleet.show().store.tiers
    assert shared.recent.num_hits == 31 - 10, "d1 was idle"
    assert fleet.show().store.recent_prompts.num_missing == 31 - 10
    fleet.clock.advance(WINDOW_S)
    shared, _ = fleet.show().store.tiers
    assert (shared.recent.num_hits, shared.recent.hit_share) == (0, None)


def test_what_was_lost_between_two_workers_is_of_the_last_minute() -> None:
    fleet = Fleet("p0", "d0")
    sender = fleet.workers["p0"]
    assert fleet.feed.find_lost_share(sender, "d0") is None, "it has not reported"
    for num_retransmitted in (500, 30):
        counts = SegmentCounts(1000, num_retransmitted, 20, 1_000_000)
        fleet.tables["p0"].segments("d0", "same_rack", "tcp", counts)
        fleet.tables["p0"].segments("other", "same_rack", "tcp", counts)
        fleet.report("p0")
        fleet.clock.advance(5.0)
    assert fleet.feed.find_lost_share(sender, "d0") == pytest.approx(0.01)
    assert fleet.feed.find_lost_share(fleet.workers["d0"], "p0") is None
    fleet.clock.advance(WINDOW_S)
    assert fleet.feed.find_lost_share(sender, "d0") is None, "nothing was sent"


def test_only_the_latest_report_of_a_worker_is_kept_decoded() -> None:
    fleet = Fleet("d0")
    for number in range(8):
        for took_s in range(1, 50):
            fleet.handoff("d0", took_s / 25, f"p{number}")
    bodies = [msgspec.json.encode(fleet.tables["d0"].report())]
    for _ in range(12):
        fleet.handoff("d0", 1.0)
        bodies.append(msgspec.json.encode(fleet.tables["d0"].report()))
    tracemalloc.start()
    fleet.report("d0", msgspec.json.decode(bodies[0], type=TransferReport))
    one_bytes, _ = tracemalloc.get_traced_memory()
    for body in bodies[1:]:
        fleet.clock.advance(5.0)
        fleet.report("d0", msgspec.json.decode(body, type=TransferReport))
    all_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all_bytes < 4 * one_bytes
    assert sum(pair.recent.num for pair in fleet.show().handoffs) == 12


def test_the_report_of_many_ranks_may_be_larger_than_that_of_one() -> None:
    fleet = Fleet("d0")
    tables = [TransferTable(Epoch(f"{rank}" * 32), fleet.clock) for rank in range(8)]
    for _ in range(2):
        for rank, table in enumerate(tables):
            for number in range(MAX_ENTRIES // 6):
                peer = f"{rank}-p{number}"
                outcome = Outcome(peer, "same_rack", "tcp", "pull", 1, MIB, 0.1, 0.2, refined=True)
                table.link(outcome, LinkLabels("same_rack", "tcp", "READ"))
        merged = merge_transfers({n: table.report() for n, table in enumerate(tables)}, ())
        fleet.feed.reports[fleet.workers["d0"]] = merged
        asyncio.run(fleet.feed.note_reports())
    (distance,) = fleet.show().links_by_distance
    assert (distance.num_links, distance.recent.num) == (8 * (MAX_ENTRIES // 6),) * 2


def test_streams_go_on_while_the_page_is_computed() -> None:
    names = [f"d{n}" for n in range(10)]
    fleet = Fleet(*names)
    for name in names:
        for number in range(20):
            fleet.handoff(name, 0.1, f"p{number}")
        fleet.report(name)
    turns = 0

    async def scenario() -> None:
        async def stream() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(stream())
        first = await fleet.page.show()
        num_turns = turns
        assert await fleet.page.show() == first
        assert turns - num_turns < num_turns, "what is known of each worker is not computed again"
        other.cancel()

    asyncio.run(scenario())
    assert turns > 2 * len(names)


def test_figures_stay_from_one_report_to_the_next() -> None:
    fleet = Fleet("d0")
    for took_s in (0.1, 0.2, 0.3):
        fleet.handoff("d0", took_s)
        fleet.report("d0")
        fleet.clock.advance(WINDOW_S / 2)
    (pair,) = fleet.show().handoffs
    assert (pair.total.num, pair.recent.num) == (3, 2)
