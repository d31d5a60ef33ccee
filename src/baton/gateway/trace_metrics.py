"""How many traces were kept, exported and lost."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from baton.gateway.tail_sampling import KeptKind


class TraceMetrics:
    """Owner: the event loop's thread; counters may be increased by any.

    Lost: `workers` is a trace whose workers' spans were not fetched, as too many were pending;
    `queue` one that found the queue of the export full; `collector` one that the collector did not
    accept.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.invalid_contexts = Counter(
            "baton_gateway_invalid_trace_contexts",
            "Requests whose traceparent does not follow W3C Trace Context and was ignored.",
            registry=registry,
        )
        kept = Counter(
            "baton_gateway_kept_traces",
            "Requests whose traces are remembered longer than others.",
            ("cause",),
            registry=registry,
        )
        self.kept = {kind: kept.labels(kind) for kind in KeptKind}
        self.exported = Counter(
            "baton_gateway_exported_traces",
            "Traces that the OpenTelemetry collector has accepted.",
            registry=registry,
        )
        lost = Counter(
            "baton_gateway_lost_traces",
            "Traces that were to be kept or exported, and were not.",
            ("cause",),
            registry=registry,
        )
        self.lost = {cause: lost.labels(cause) for cause in ("workers", "queue", "collector")}
