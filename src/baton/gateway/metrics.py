"""What a gateway counts. Children are cached: a look-up by labels costs more than the count."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.gateway.inter_token_histogram import InterTokenCollector
from baton.router.placement import NonDisaggregableField
from baton.telemetry.metrics import FIRST_TOKEN_EDGES_S, REQUEST_EDGES_S, TOKEN_GAP_EDGES_S

if TYPE_CHECKING:
    from baton.router.fleet import Role
    from baton.router.placement import Mode

MODES: Final[tuple[Mode, ...]] = ("push", "pull", "pool", "reference", "colocated")
COMMON_CODES: Final = (200, 400, 404, 413, 499, 500, 502, 503, 504)
CLIENT_LEFT_CODE: Final = 499
"""Never sent: what is counted when nobody was left to send it to."""

NO_MODEL: Final = ""
NO_MODE: Final = "none"


class Phase(StrEnum):
    """How far a request has come, as a gateway can see it: the KV's way is part of `PREFILL`."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class FallbackCause(StrEnum):
    """Why a request was not served in the way that was intended for it."""

    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_LOST = "prefill_lost"
    PREFILL_OVERLOADED = "prefill_overloaded"
    PREFILL_REJECTED = "prefill_rejected"
    PREFILL_FAILED = "prefill_failed"
    HANDOFF_FAILED = "handoff_failed"
    PREFILL_UNAVAILABLE = "prefill_unavailable"
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_LOST = "decode_lost"
    DECODE_FAILED = "decode_failed"
    STALE_TICKET = "stale_ticket"
    MODE_UNUSABLE = "mode_unusable"


class BrokenStreamCause(StrEnum):
    """Why a stream ended with an error event."""

    WORKER_LOST = "worker_lost"
    WORKER_REPORTED = "worker_reported"
    DEADLINE = "deadline"
    INTERNAL = "internal"


class ModelMetrics:
    """The instruments of one model and mode: what is touched on the hot path."""

    def __init__(self, owner: GatewayMetrics, model: str, mode: str) -> None:
        self.time_to_first_token = owner.time_to_first_token.labels(model, mode)
        self.inter_token_latency = owner.inter_token_latency.child(model, mode)
        self.duration = owner.duration.labels(model, mode)
        self._requests = {c: owner.requests.labels(model, mode, str(c)) for c in COMMON_CODES}
        self._owner, self._model, self._mode = owner, model, mode

    def count(self, code: int) -> None:
        """One request ended with this status."""
        child = self._requests.get(code)
        if child is None:
            child = self._owner.requests.labels(self._model, self._mode, str(code))
            self._requests[code] = child
        child.inc()


class GatewayMetrics:
    """All instruments, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_mode = ("model", "mode")
        self.requests = Counter(
            "baton_gateway_requests",
            "Completion requests by final status.",
            (*by_mode, "code"),
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "baton_gateway_time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer.",
            by_mode,
            buckets=FIRST_TOKEN_EDGES_S,
            registry=self.registry,
        )
        self.inter_token_latency = InterTokenCollector(
            "baton_gateway_inter_token_latency_seconds",
            "Between two chunks of a stream.",
            TOKEN_GAP_EDGES_S,
        )
        self.registry.register(self.inter_token_latency)
        self.duration = Histogram(
            "baton_gateway_request_duration_seconds",
            "From the request's arrival to the last byte of its answer.",
            by_mode,
            buckets=REQUEST_EDGES_S,
            registry=self.registry,
        )
        self._add_totals()
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self.of(NO_MODEL, NO_MODE)

    def _add_totals(self) -> None:
        self.inflight = Gauge(
            "baton_gateway_inflight_requests",
            "Completion requests that are being served.",
            registry=self.registry,
        )
        disconnects = Counter(
            "baton_gateway_client_disconnects",
            "Clients that left before their answer was complete.",
            ("phase",),
            registry=self.registry,
        )
        self.disconnects = {phase: disconnects.labels(phase) for phase in Phase}
        fallbacks = Counter(
            "baton_gateway_fallbacks",
            "Requests that were served in another way than intended.",
            ("cause",),
            registry=self.registry,
        )
        self.fallbacks = {cause: fallbacks.labels(cause) for cause in FallbackCause}
        non_disaggregable = Counter(
            "baton_gateway_non_disaggregable_requests",
            "Requests that a vLLM worker served alone because of one of their fields.",
            ("field",),
            registry=self.registry,
        )
        self.non_disaggregable = {
            field: non_disaggregable.labels(field) for field in NonDisaggregableField
        }
        broken = Counter(
            "baton_gateway_broken_streams",
            "Streams that ended with an error event.",
            ("cause",),
            registry=self.registry,
        )
        self.broken_streams = {cause: broken.labels(cause) for cause in BrokenStreamCause}
        self.early_first_tokens = Counter(
            "baton_gateway_early_first_tokens",
            "Streams that began with the prefill worker's token, before decode's.",
            registry=self.registry,
        )
        self.kv_events_not_followed = Counter(
            "baton_gateway_kv_events_not_followed",
            "Lives of workers whose KV events could not be followed from where they were told.",
            registry=self.registry,
        )
        self._worker_up = Gauge(
            "baton_gateway_worker_up",
            "1 while requests may be placed on this worker.",
            ("url", "role"),
            registry=self.registry,
        )

    def of(self, model: str, mode: str) -> ModelMetrics:
        """The instruments of one model and mode, made on first use."""
        found = self._models.get((model, mode))
        if found is None:
            found = self._models[model, mode] = ModelMetrics(self, model, mode)
        return found

    def preregister(self, model: str) -> None:
        """Let a model's series begin at 0, so that rates are right from the first request."""
        for mode in (*MODES, NO_MODE):
            self.of(model, mode)

    def worker_up(self, url: str, role: Role, *, up: bool) -> None:
        """Note whether a worker may be given requests."""
        self._worker_up.labels(url, role).set(up)

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)
