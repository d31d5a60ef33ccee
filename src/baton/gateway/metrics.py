"""The gateway's metrics. Children are cached: a look-up by labels costs more than the count."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from enum import StrEnum
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from baton.gateway.fallbacks import FallbackCause
from baton.gateway.queue_metrics import QueueMetrics
from baton.gateway.target_metrics import TargetMetrics
from baton.gateway.trace_metrics import TraceMetrics
from baton.router.health import EjectionCause, HealthState
from baton.router.placement import Mode, NonDisaggregableField
from baton.router.rebalance import MoveCause
from baton.telemetry.log_limit import WARNINGS
from baton.telemetry.metrics import FIRST_TOKEN_EDGES_S, REQUEST_EDGES_S, TOKEN_GAP_EDGES_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.gateway.workers import Workers
    from baton.ids import WorkerId
    from baton.protocol.worker_http import Role
    from baton.router.handoff_costs import HandoffCosts
    from baton.router.load import FleetLoad


class SecondsHistogram:
    """Counts seconds into buckets; bucket `i` ends at `edges_s[i]`, inclusive.

    `prometheus_client.Histogram` takes a lock, and 5 calls for each value.
    """

    __slots__ = ("_counts", "_edges_s", "_sum_s")

    def __init__(self, edges_s: tuple[float, ...]) -> None:
        self._edges_s = edges_s
        self._counts = [0] * (len(edges_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges_s, seconds)] += 1
        self._sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """For each edge and `+Inf`: how many values were not longer."""
        names = (*(str(edge) for edge in self._edges_s), "+Inf")
        return list(zip(names, accumulate(self._counts), strict=True))

    @property
    def sum_s(self) -> float:
        """All values together."""
        return self._sum_s


class SecondsCollector(Collector):
    """One `SecondsHistogram` for each model and mode, as Prometheus reads them."""

    def __init__(self, name: str, documentation: str, edges_s: tuple[float, ...]) -> None:
        self._name, self._documentation, self._edges_s = name, documentation, edges_s
        self._children: dict[tuple[str, str], SecondsHistogram] = {}

    def child(self, model: str, mode: str) -> SecondsHistogram:
        """The histogram of one model and mode, made on first use."""
        return self._children.setdefault((model, mode), SecondsHistogram(self._edges_s))

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=("model", "mode"))
        for labels, histogram in self._children.items():
            family.add_metric(labels, histogram.buckets(), histogram.sum_s)
        yield family


class RouterCollector(Collector):
    """What the router knows: requests at workers, errors of its predictions, closed loops."""

    def __init__(self, load: FleetLoad, workers: Workers) -> None:
        self._load, self._workers = load, workers

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        labels = ("model", "worker")
        under_way = GaugeMetricFamily(
            "baton_router_requests",
            "Requests of this gateway at a worker: prompts to compute, and answers under way.",
            labels=(*labels, "part"),
        )
        errors = GaugeMetricFamily(
            "baton_router_cost_error_ratio",
            "Mean difference of the latest predicted and seen costs, over the larger of the two.",
            labels=(*labels, "cost"),
        )
        for info in (worker.info for worker in self._workers.all):
            if info is None:
                continue
            model, worker = info.served_model_name, info.worker
            activity = self._load.find(worker, model)
            if activity is None:
                continue
            under_way.add_metric((model, worker, "prefill"), activity.num_prefills)
            under_way.add_metric((model, worker, "decode"), activity.num_decodes)
            errors.add_metric((model, worker, "prefill"), activity.prefill_cost.error)
            errors.add_metric((model, worker, "step"), activity.step_cost.error)
            errors.add_metric((model, worker, "load"), activity.load_cost.error)
        for model, costs in self._load.models.items():
            for worker, error in _mean_errors(costs.handoffs).items():
                errors.add_metric((model, worker, "handoff"), error)
        closed_loops = GaugeMetricFamily(
            "baton_router_closed_loops",
            "1 while clients are seen to wait for their answers before they ask again.",
            labels=("model",),
        )
        for model, costs in self._load.models.items():
            closed_loops.add_metric((model,), costs.arrivals.are_closed_loops)
        yield from (under_way, errors, closed_loops)


def _mean_errors(handoffs: HandoffCosts) -> dict[WorkerId, float]:
    """By receiving worker: the mean of its pairs' `WorkerCost.error`."""
    found: dict[WorkerId, list[float]] = {}
    for (_, decode), cost in handoffs.pairs.items():
        if cost.num_seen:
            found.setdefault(decode, []).append(cost.error)
    return {worker: fmean(errors) for worker, errors in found.items()}


WORKER_STATES: Final = ("pending", "draining", "down", "rejected", *HealthState)


class HealthCollector(Collector):
    """What is thought of each worker: of its states, the present one is 1."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        states = GaugeMetricFamily(
            "baton_gateway_worker_state",
            "1 for the state that a worker is in.",
            labels=("url", "role", "state"),
        )
        for worker in self._workers.all:
            for state in WORKER_STATES:
                labels = (str(worker.url), worker.address.role, state)
                states.add_metric(labels, state == worker.standing)
        yield states


MODES: Final[tuple[Mode, ...]] = ("push", "pull", "pool", "reference", "colocated")
COMMON_CODES: Final = (200, 400, 404, 413, 499, 500, 502, 503, 504)
CLIENT_LEFT_CODE: Final = 499
"""Never sent: what is counted when the client had already left."""

NO_MODEL: Final = ""
NO_MODE: Final = "none"


class Phase(StrEnum):
    """How far a request has come, as a gateway can see it: the KV's way is part of `PREFILL`."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class WaitOutcome(StrEnum):
    """How the wait of a request for a worker ended."""

    SERVED = "served"
    EXPIRED = "expired"
    LEFT = "left"
    REFUSED = "refused"


class BrokenStreamCause(StrEnum):
    """Why a stream ended with an error event."""

    WORKER_LOST = "worker_lost"
    WORKER_REPORTED = "worker_reported"
    DEADLINE = "deadline"
    INTERNAL = "internal"


class ResumeResult(StrEnum):
    """What became of a stream whose decode worker failed after a part of it was sent.

    `NO_WORKER`: none could take it, or too many failed. `NOT_KEPT`: it was too long to be kept.
    """

    RESUMED = "resumed"
    DIFFERED = "differed"
    REFUSED = "refused"
    SAMPLED = "sampled"
    NOT_KEPT = "not_kept"
    NO_WORKER = "no_worker"


class MoveResult(StrEnum):
    """What became of the move of a stream.

    `NOT_COPIED`: its KV did not reach the other worker; it went on where it was. `ENDED`: so did
    the stream, meanwhile. `LOST`: the other worker failed after the cut.
    """

    MOVED = "moved"
    NOT_COPIED = "not_copied"
    ENDED = "ended"
    LOST = "lost"


class ModelMetrics:
    """The instruments of one model and mode: what is touched on the hot path."""

    def __init__(self, owner: GatewayMetrics, model: str, mode: str) -> None:
        self.time_to_first_token = owner.time_to_first_token.child(model, mode)
        self.inter_token_latency = owner.inter_token_latency.child(model, mode)
        self.duration = owner.duration.child(model, mode)
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
        self.registry.register(WARNINGS)
        by_mode = ("model", "mode")
        self.requests = Counter(
            "baton_gateway_requests",
            "Completion requests by final status.",
            (*by_mode, "code"),
            registry=self.registry,
        )
        self.time_to_first_token = SecondsCollector(
            "baton_gateway_time_to_first_token_seconds",
            "From the request's arrival to the first token of its answer, where that is known.",
            FIRST_TOKEN_EDGES_S,
        )
        self.inter_token_latency = SecondsCollector(
            "baton_gateway_inter_token_latency_seconds",
            "Between two chunks of a stream.",
            TOKEN_GAP_EDGES_S,
        )
        self.duration = SecondsCollector(
            "baton_gateway_request_duration_seconds",
            "From the request's arrival to the last byte of its answer.",
            REQUEST_EDGES_S,
        )
        for histograms in (self.time_to_first_token, self.inter_token_latency, self.duration):
            self.registry.register(histograms)
        self._add_totals()
        self.queue = QueueMetrics(self.registry)
        self.targets = TargetMetrics(self.registry)
        self.traces = TraceMetrics(self.registry)
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self.of(NO_MODEL, NO_MODE)

    def _add_totals(self) -> None:
        self.inflight = Gauge(
            "baton_gateway_inflight_requests",
            "Completion requests that are being served; of several answers each counts.",
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
        resumed = Counter(
            "baton_gateway_resumed_streams",
            "Streams that lost their decode worker, by what became of them.",
            ("result",),
            registry=self.registry,
        )
        self.resumed_streams = {result: resumed.labels(result) for result in ResumeResult}
        self.resumed_tokens = Counter(
            "baton_gateway_resumed_tokens",
            "Tokens (or events, without ids) that clients had of streams whose workers were lost.",
            registry=self.registry,
        )
        moved = Counter(
            "baton_gateway_moved_streams",
            "Moves of running streams from one worker to another, by what became of them.",
            ("cause", "result"),
            registry=self.registry,
        )
        self.moved_streams = {
            (cause, result): moved.labels(cause, result)
            for cause in MoveCause
            for result in MoveResult
        }
        self.move_pause = Histogram(
            "baton_gateway_move_pause_seconds",
            "From the last event of the worker that had a stream to the first of the next one.",
            buckets=TOKEN_GAP_EDGES_S,
            registry=self.registry,
        )
        self.refused_retries = Counter(
            "baton_gateway_refused_retries",
            "Requests that failed without another attempt: too many others had needed one.",
            registry=self.registry,
        )
        self.early_first_tokens = Counter(
            "baton_gateway_early_first_tokens",
            "Streams that began with the prefill worker's token, before decode's.",
            registry=self.registry,
        )
        self.split_prompts = Counter(
            "baton_gateway_split_prompts",
            "Prompts that were given to two workers, each to compute a part at the same time.",
            registry=self.registry,
        )
        self.multiplexed_streams = Counter(
            "baton_gateway_multiplexed_streams",
            "Streams whose worker sent them with others, over one connection.",
            registry=self.registry,
        )
        self.kv_events_not_followed = Counter(
            "baton_gateway_kv_events_not_followed",
            "Worker incarnations whose KV events cannot be followed at their advertised endpoint.",
            registry=self.registry,
        )
        self._add_health()
        self._worker_up = Gauge(
            "baton_gateway_worker_up",
            "1 while requests may be placed on this worker.",
            ("url", "role"),
            registry=self.registry,
        )

    def _add_health(self) -> None:
        self.silent_workers = Counter(
            "baton_gateway_silent_workers",
            "Workers whose requests were given up, as nothing was received from them any more.",
            registry=self.registry,
        )
        self.preempted_workers = Counter(
            "baton_gateway_preempted_workers",
            "Workers that drained because their machines were to be taken.",
            registry=self.registry,
        )
        ejections = Counter(
            "baton_gateway_ejections",
            "Workers that were taken out: their process gone, not well, late, or failing requests.",
            ("cause",),
            registry=self.registry,
        )
        self.ejections = {cause: ejections.labels(cause) for cause in EjectionCause}
        self.waiting = Gauge(
            "baton_gateway_waiting_requests",
            "Completion requests that wait for a worker to come back.",
            registry=self.registry,
        )
        waits = Counter(
            "baton_gateway_worker_waits",
            "Waits for a worker, by how they ended.",
            ("outcome",),
            registry=self.registry,
        )
        self.waits = {outcome: waits.labels(outcome) for outcome in WaitOutcome}
        self.wait_seconds = Histogram(
            "baton_gateway_worker_wait_seconds",
            "How long requests waited for a worker.",
            buckets=FIRST_TOKEN_EDGES_S,
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

    def forget_worker(self, url: str, role: Role) -> None:
        """A worker is known no longer: its series end."""
        self._worker_up.remove(url, role)

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    async def exposition_in_parts(self) -> bytes:
        """The same; streams go on between its families, of which many workers make large ones."""
        parts = []
        for family in self.registry.collect():
            parts.append(generate_latest(_OneFamily(family)))
            await asyncio.sleep(0)
        return b"".join(parts)


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        yield self._family
