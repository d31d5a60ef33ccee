from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import WorkerMetrics, set_worker_info
from baton.telemetry.trace import RequestSpan, Stamp


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(registry, ("shared", "tcp"), ("computed locally",))


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
        metrics.finished(trace)
    name = "baton_handoff_transport_mismatch_total"
    assert registry.get_sample_value(name, {"expected": "shared", "used": "tcp"}) == 1
    assert registry.get_sample_value(name, {"expected": "tcp", "used": "shared"}) == 0
    received = registry.get_sample_value("baton_handoff_received_bytes_total", {"transport": "tcp"})
    assert received == 200


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
