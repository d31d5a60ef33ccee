from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton.ids import Epoch
from baton.telemetry.handoff_metrics import MAX_LABEL_SETS, ReceivePaths
from baton.telemetry.links import LinkInstruments
from baton.telemetry.metrics import WorkerMetrics, set_worker_info
from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.transfer_report import DISTANCES
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock

PATHS = ReceivePaths(("shared", "tcp"), frozenset({"shared"}), ("push", "pull"), "WRITE")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return make_metrics(registry, PATHS)


def make_metrics(
    registry: CollectorRegistry, paths: ReceivePaths, table: TransferTable | None = None
) -> WorkerMetrics:
    table = table or TransferTable(Epoch("1" * 32), ManualClock())
    links = LinkInstruments(registry, paths, table)
    for transport in paths.transports:
        links.sent(transport, ())
    return WorkerMetrics(registry, paths, ("computed locally",), table)


def leg(
    name: str, outcome: str | None, *stamps: Stamp, transport: str | None = None
) -> RequestSpan:
    trace = RequestSpan(request_id="r", worker="w", epoch="e", role=name, outcome=outcome)
    trace.transport = transport
    for at, stamp in enumerate(stamps):
        trace.stamp(stamp, float(at))
    return trace


RECEIVED = (Stamp.PAGES_RESERVED, Stamp.LAST_LAYER_LANDED, Stamp.KV_READY)


@pytest.mark.parametrize(
    ("trace", "result"),
    [
        (leg("prefill", "prefilled"), "completed"),
        (leg("prefill", "declined"), "declined"),
        (leg("prefill", "failed"), "failed"),
        (leg("prefill", "cancelled"), "aborted"),
        (leg("decode", "stop", *RECEIVED), "completed"),
        (leg("decode", "cancelled", *RECEIVED), "completed"),
        (leg("decode", "length", Stamp.PAGES_RESERVED), "failed"),
        (leg("decode", "length"), "declined"),
        (leg("decode", "failed"), "failed"),
        (leg("decode", "cancelled"), "aborted"),
    ],
)
def test_how_a_handoff_ended(
    metrics: WorkerMetrics, registry: CollectorRegistry, trace: RequestSpan, result: str
) -> None:
    trace.transport = "tcp"
    metrics.finished(trace)
    labels = {"role": trace.role, "transport": "tcp", "result": result}
    assert registry.get_sample_value("baton_handoffs_total", labels) == 1


def test_a_transport_other_than_expected_is_counted(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    for expected in ("shared", "tcp"):
        trace = leg("decode", "stop", *RECEIVED, transport="tcp")
        trace.expected_transport, trace.num_bytes = expected, 100
        trace.mode, trace.operation, trace.distance = "push", "WRITE", "same_host"
        metrics.landed(trace)
    name = "baton_handoff_transport_mismatch_total"
    assert registry.get_sample_value(name, {"expected": "shared", "used": "tcp"}) == 1
    assert registry.get_sample_value(name, {"expected": "tcp", "used": "shared"}) == 0
    labels = {
        "distance": "same_host",
        "transport": "tcp",
        "mode": "push",
        "operation": "WRITE",
    }
    assert registry.get_sample_value("baton_handoff_received_bytes_total", labels) == 200


def landed(distance: str | None, transport: str, mode: str, operation: str | None) -> RequestSpan:
    """2 MiB that took 2 s from prefill's first layer on, of which 1 s after its end."""
    trace = leg("decode", "stop", *RECEIVED, transport=transport)
    trace.expected_transport, trace.num_bytes = transport, 2 << 20
    trace.mode, trace.operation, trace.distance = mode, operation, distance
    trace.peer_stamps = {Stamp.FIRST_LAYER_READY: -1.0, Stamp.PREFILL_DONE: 0.0}
    return trace


def test_what_a_handoff_took_is_counted_by_distance_transport_mode_and_operation(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    metrics.landed(landed("cross_zone", "tcp", "pull", "READ"))
    labels = {
        "distance": "cross_zone",
        "transport": "tcp",
        "mode": "pull",
        "operation": "READ",
    }

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"baton_handoff_{name}", labels | more)

    assert value("transfer_seconds_sum") == 2.0
    assert value("transfer_seconds_bucket", le="1.0") == 0
    assert value("transfer_seconds_bucket", le="2.0") == 1
    assert value("transfer_seconds_per_mib_sum") == 1.0
    assert value("exposed_share_sum") == 0.5
    assert value("exposed_seconds_total") == 1.0
    assert value("received_bytes_total") == 2 << 20


def label_sets(registry: CollectorRegistry) -> list[tuple[str, ...]]:
    name = "baton_handoff_transfer_seconds_count"
    samples = [sample for family in registry.collect() for sample in family.samples]
    return [tuple(sample.labels.values()) for sample in samples if sample.name == name]


def test_sets_of_labels_of_handoffs_without_a_failure_exist_from_the_start(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    all_usual = [
        (distance, transport, mode, operation)
        for mode, operation in (("push", "WRITE"), ("pull", "READ"))
        for transport, distances in (("shared", DISTANCES[:2]), ("tcp", DISTANCES))
        for distance in distances
    ]
    usual = set(all_usual[: MAX_LABEL_SETS // 2 - 1])
    assert set(label_sets(registry)) == usual | {("other",) * 4}
    metrics.landed(landed("same_rack", "tcp", "pull", "WRITE"))
    metrics.landed(landed(None, "tcp", "push", "WRITE"))
    metrics.landed(landed("same_rack", "a client's text", "push", "WRITE"))
    assert set(label_sets(registry)) == usual | {
        ("other",) * 4,
        ("same_rack", "tcp", "pull", "WRITE"),
        ("unknown", "tcp", "push", "WRITE"),
    }


def test_a_worker_has_fewer_than_2000_series_whatever_it_is_configured_for_and_sees() -> None:
    transports = ("cuda_ipc", "shared", "nixl", "tcp")
    local = frozenset({"cuda_ipc", "shared"})
    registry = CollectorRegistry()
    metrics = make_metrics(
        registry, ReceivePaths(transports, local, ("push", "pull", "pool", "reference"), "READ")
    )
    for mode in ("push", "pull", "reference"):
        for operation in ("WRITE", "READ"):
            for transport in transports:
                for distance in (*DISTANCES, None):
                    metrics.landed(landed(distance, transport, mode, operation))
    pooled = landed(None, "", "pool", None)
    pooled.transport = pooled.expected_transport = None
    metrics.landed(pooled)
    found = label_sets(registry)
    assert len(found) == MAX_LABEL_SETS
    assert ("other",) * 4 in found
    samples = [
        sample
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    assert 1000 < len(samples) < 1900, "100 are for the engine, the store and others"


def test_handoffs_over_any_of_several_transports_are_counted_by_their_own_labels() -> None:
    transports, local = ("shared", "nixl", "tcp"), frozenset({"shared"})
    registry = CollectorRegistry()
    metrics = make_metrics(
        registry, ReceivePaths(transports, local, ("push", "pull", "reference"), "READ")
    )
    occurring = {
        (distance, transport, mode, "READ")
        for distance, transport in (
            ("same_rack", "nixl"),
            ("same_zone", "nixl"),
            ("same_zone", "tcp"),
        )
        for mode in ("push", "pull")
    }
    for distance, transport, mode, operation in occurring:
        metrics.landed(landed(distance, transport, mode, operation))
    assert occurring <= set(label_sets(registry))
    other = dict.fromkeys(("distance", "transport", "mode", "operation"), "other")
    assert registry.get_sample_value("baton_handoff_received_bytes_total", other) == 0


def test_the_report_by_pair_has_a_handoffs_labels_also_where_the_metrics_have_no_room() -> None:
    paths = ReceivePaths(
        ("cuda_ipc", "shared", "nixl", "tcp"), frozenset({"cuda_ipc", "shared"}), ("push", "pull")
    )
    registry, table = CollectorRegistry(), TransferTable(Epoch("1" * 32), ManualClock())
    metrics = make_metrics(registry, paths, table)
    for distance in DISTANCES:
        metrics.landed(landed(distance, "tcp", "push", "WRITE"))
        metrics.landed(landed(distance, "nixl", "pull", "READ"))
    assert len(label_sets(registry)) == MAX_LABEL_SETS
    trace = landed("cross_zone", "tcp", "pull", "READ")
    trace.expected_transport = "nixl"
    metrics.landed(trace)
    *_, entry = table.report().handoffs
    found = entry.distance, entry.transport, entry.mode, entry.operation
    assert found == ("cross_zone", "tcp", "pull", "READ")
    assert entry.last_mismatch is not None
    assert entry.last_mismatch.used == "tcp"
    assert len(label_sets(registry)) == MAX_LABEL_SETS
    other = dict.fromkeys(("distance", "transport", "mode", "operation"), "other")
    assert registry.get_sample_value("baton_handoff_received_bytes_total", other) == 2 << 20


def test_fallbacks_are_counted_by_cause_and_reasons_are_no_labels(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    trace = leg("decode", "stop", Stamp.PAGES_RESERVED)
    trace.fallbacks = ["computed locally: peer 10.0.0.7 lost", "something new"]
    metrics.finished(trace)
    name = "baton_handoff_fallbacks_total"
    assert registry.get_sample_value(name, {"cause": "computed locally"}) == 1
    assert registry.get_sample_value(name, {"cause": "other"}) == 1


def test_tokens_that_came_together_share_their_gap(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    metrics.token_gap(0.4, 4)
    name = "baton_worker_inter_token_latency_seconds"
    assert registry.get_sample_value(f"{name}_count") == 4
    assert registry.get_sample_value(f"{name}_sum") == pytest.approx(0.4)
    assert registry.get_sample_value(f"{name}_bucket", {"le": "0.1"}) == 4


def test_an_unknown_status_counts_as_the_workers_own_fault(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    metrics.error_response(599)
    name = "baton_worker_error_responses_total"
    assert registry.get_sample_value(name, {"status": "500"}) == 1


def test_worker_info_is_one(registry: CollectorRegistry) -> None:
    set_worker_info(registry, {"worker": "w0", "role": "both"})
    labels = {"worker": "w0", "role": "both"}
    assert registry.get_sample_value("baton_worker_info", labels) == 1
