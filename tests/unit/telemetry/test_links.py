from __future__ import annotations

from msgspec import structs
from prometheus_client import CollectorRegistry

from baton.ids import Epoch
from baton.telemetry.drift import DEFAULTS
from baton.telemetry.handoff_metrics import ReceivePaths
from baton.telemetry.links import MAX_LABEL_SETS, LinkInstruments
from baton.telemetry.transfer_report import DISTANCES, MAX_IDLE_S, LinkDrift, SegmentCounts
from baton.telemetry.transfers import Outcome, PeerSegments, TransferTable, TransferTime
from baton.testing.clocks import ManualClock
from baton.transfer.links.choice import Chooser, LinkObserver
from baton.transfer.links.cost_model import LinkModel, TransferShape

MODELS = {"shared": LinkModel(1e-5, 1e-7, 1e-10), "tcp": LinkModel(1e-4, 1e-7, 1e-9)}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, f"{name} {labels} does not exist from the start"
    return found


def observer(
    registry: CollectorRegistry,
    *transports: str,
    local: frozenset[str] = frozenset(),
    clock: ManualClock | None = None,
) -> tuple[LinkInstruments, TransferTable]:
    table = TransferTable(Epoch("1" * 32), clock or ManualClock())
    return LinkInstruments(registry, ReceivePaths(transports, local), table), table


def outcome(
    predicted_s: float, observed_s: float, *, refined: bool = True, distance: str = "same_zone"
) -> Outcome:
    return Outcome("p0", distance, "tcp", "push", 1, 1000, predicted_s, observed_s, refined)


def test_a_link_that_becomes_slower_has_drifted() -> None:
    registry = CollectorRegistry()
    instruments: LinkObserver
    instruments, table = observer(registry, "shared", "tcp")
    push = {"operation": "WRITE", "transport": "tcp"}
    times_s = {"p0": 1e-3, "p1": 1e-3}
    for number in range(DEFAULTS.num_reference + 50):
        if number == DEFAULTS.num_reference:
            assert value(registry, "baton_link_drifted", **push) == 0
            times_s["p1"] = 3e-3
        for peer, seconds in times_s.items():
            instruments.transferred(
                TransferTime(peer, "same_zone", "tcp", "push", 1 << 20, seconds)
            )
    assert value(registry, "baton_link_drifted", **push) == 1
    steady, drifted = (each.drift for each in table.report().links)
    assert steady is not None
    assert drifted is not None
    assert (steady.state, drifted.state) == ("steady", "drifted")
    assert drifted.ratio is not None
    assert 2.9 < drifted.ratio < 3.1


def test_a_link_that_is_not_used_any_more_has_not_drifted() -> None:
    """Its peer was drained, or has another name now: no transfer comes that would show an end."""
    registry, clock = CollectorRegistry(), ManualClock()
    instruments: LinkObserver
    instruments, table = observer(registry, "tcp", clock=clock)
    push = {"operation": "WRITE", "transport": "tcp"}
    usual = TransferTime("d1", "same_zone", "tcp", "push", 1 << 20, 1e-3)
    slow = structs.replace(usual, seconds=3e-3)
    for number in range(DEFAULTS.num_reference + 50):
        instruments.transferred(usual if number < DEFAULTS.num_reference else slow)
    clock.advance(MAX_IDLE_S - 1)
    assert value(registry, "baton_link_drifted", **push) == 1
    (rare,) = (each.drift for each in table.report().links)
    assert rare is not None
    assert (rare.state, rare.since_s) == ("drifted", MAX_IDLE_S - 1)
    clock.advance(8.0)
    assert value(registry, "baton_link_drifted", **push) == 0
    (idle,) = (each.drift for each in table.report().links)
    assert idle == LinkDrift(state="steady", ratio=None, since_s=7.0)
    instruments.transferred(slow)
    assert value(registry, "baton_link_drifted", **push) == 1, "it is used again, and is slow"
    (used,) = (each.drift for each in table.report().links)
    assert used is not None
    assert used.state == "drifted"
    assert used.ratio is not None


def test_every_choice_mismatch_and_error_is_counted() -> None:
    registry = CollectorRegistry()
    instruments: LinkObserver
    instruments, table = observer(registry, "shared", "tcp", local=frozenset({"shared"}))
    push = {"operation": "WRITE", "transport": "tcp"}
    link = {"distance": "same_zone", **push}
    pair = {"operation": "WRITE", "expected": "shared", "used": "tcp"}
    assert value(registry, "baton_link_choices_total", **push) == 0
    assert value(registry, "baton_link_mismatches_total", **pair) == 0
    choice = Chooser("measured").choose(TransferShape(1000, 1), MODELS, ["tcp"])
    assert choice is not None
    instruments.chosen("push", choice)
    assert value(registry, "baton_link_choices_total", **push) == 1
    assert value(registry, "baton_link_mismatches_total", **pair) == 1
    instruments.carried(outcome(0.1, 0.2))
    instruments.carried(outcome(0.1, 9.0, refined=False))
    assert value(registry, "baton_link_bytes_total", **link) == 2000
    assert value(registry, "baton_link_predicted_seconds_total", **link) == 0.2
    assert value(registry, "baton_link_observed_seconds_total", **link) == 9.2
    assert value(registry, "baton_link_model_relative_error_count", **link) == 1
    assert value(registry, "baton_link_model_relative_error_sum", **link) == 0.5
    assert [each.num for each in table.report().links] == [2]
    instruments.failed("push", "tcp")
    assert value(registry, "baton_link_failures_total", **push) == 1
    instruments.measured("push", "tcp", LinkModel(1e-4, 1e-6, 1 / 3e9))
    assert value(registry, "baton_link_latency_seconds", **push) == 1e-4
    assert value(registry, "baton_link_bandwidth_bytes_per_second", **push) == 3e9


def test_an_unknown_transport_makes_no_new_label() -> None:
    registry = CollectorRegistry()
    instruments, _ = observer(registry, "shared")
    instruments.failed("pull", "carrier-pigeon")
    other = {"operation": "READ", "transport": "other"}
    assert value(registry, "baton_link_failures_total", **other) == 1
    instruments.carried(outcome(0.1, 0.1))
    other = dict.fromkeys(("distance", "transport", "operation"), "other")
    assert value(registry, "baton_link_bytes_total", **other) == 1000


def test_transports_of_one_host_have_no_far_distances_and_sets_of_labels_are_bounded() -> None:
    registry = CollectorRegistry()
    instruments, _ = observer(registry, "shared", "tcp", local=frozenset({"shared"}))
    carried = [
        sample.labels
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "baton_link_bytes_total"
    ]
    assert len(carried) == MAX_LABEL_SETS // 2
    assert not [
        labels
        for labels in carried
        if labels["transport"] == "shared" and labels["distance"] == "cross_zone"
    ]
    registry = CollectorRegistry()
    instruments, _ = observer(registry, *(f"transport-{n}" for n in range(9)), "tcp")
    own = {"distance": "cross_zone", "transport": "tcp", "operation": "WRITE"}
    instruments.carried(outcome(0.1, 0.1, distance="cross_zone"))
    assert value(registry, "baton_link_bytes_total", **own) == 1000, "the others left it room"
    for number in range(9):
        for distance in DISTANCES:
            seen = outcome(0.1, 0.1, distance=distance)
            instruments.carried(structs.replace(seen, transport=f"transport-{number}"))
    other = dict.fromkeys(("distance", "transport", "operation"), "other")
    assert value(registry, "baton_link_bytes_total", **other) > 0
    samples = next(f for f in registry.collect() if f.name == "baton_link_bytes").samples
    totals = [each for each in samples if each.name == "baton_link_bytes_total"]
    assert len(totals) == MAX_LABEL_SETS


def test_segments_are_counted_by_distance_and_reported_by_peer() -> None:
    registry = CollectorRegistry()
    instruments: LinkObserver
    instruments, table = observer(registry, "shared", "tcp", local=frozenset({"shared"}))
    name = "baton_link_segments_total"
    tcp = {"distance": "same_rack", "transport": "tcp"}
    assert registry.get_sample_value(name, tcp) is None, "not known yet"
    instruments.sent("tcp", ())
    assert value(registry, name, **tcp) == 0
    first = PeerSegments("d0", "", SegmentCounts(100, 2, 1, 150_000))
    instruments.sent("tcp", (first, PeerSegments("d1", "same_rack", SegmentCounts(50))))
    instruments.sent("tcp", (PeerSegments("d0", "same_rack", SegmentCounts(900, 8, 0, 1_350_000)),))
    assert value(registry, name, **tcp) == 950
    assert value(registry, "baton_link_retransmitted_segments_total", **tcp) == 8
    unknown = {"distance": "unknown", "transport": "tcp"}
    assert value(registry, "baton_link_duplicate_segments_total", **unknown) == 1
    d1, d0 = table.report().segments
    assert (d1.peer, d1.sent.num, d1.sent.lost_share) == ("d1", 50, 0.0)
    assert (d0.peer, d0.distance, d0.transport) == ("d0", "same_rack", "tcp")
    assert d0.sent == SegmentCounts(1000, 10, 1, 1_500_000)
    assert d0.sent.lost_share == 0.009


def test_segments_of_a_transport_that_is_not_configured_count_as_other() -> None:
    registry = CollectorRegistry()
    instruments, _ = observer(registry, "shared")
    instruments.sent("carrier-pigeon", (PeerSegments("d0", "<b>", SegmentCounts(5)),))
    other = {"distance": "unknown", "transport": "other"}
    assert value(registry, "baton_link_segments_total", **other) == 5
