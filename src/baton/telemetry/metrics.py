"""A worker's instruments, in a registry of the caller's.

No request or peer ids in labels. Combinations of labels exist from the start, at 0 (of handoffs:
`handoff_metrics`), and the children are kept: counting looks up no label. Edges of latency buckets
are vLLM's, so that boards can show both.

`HeldBlockTime`: memory that handoffs hold on prefill workers, in blocks times seconds, by mode.

    hold ──resize (as blocks are allocated, or some freed)──► prefill_done ──► release
    └─────────────── `computing` ───────────────┘└──── `waiting` ────┘

`computing` is the same work in every mode; `waiting`, from the end of prefill on, is what the mode
costs. A page is one layer's part of a block: block-seconds times layers are page-seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.auth.ticket import HandoffMode
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.trace import RequestSpan, compute_durations

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from baton.clock import Instant
    from baton.telemetry.transfers import TransferTable

ROLES: Final = ("colocated", "prefill", "decode")
OUTCOMES: Final = ("stop", "length", "prefilled", "declined", "cancelled", "failed")
ERROR_STATUSES: Final = (400, 401, 403, 404, 405, 409, 413, 500, 502, 503, 504)

FIRST_TOKEN_EDGES_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_EDGES_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_EDGES_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class WorkerMetrics:
    """What one worker counts. Owned by the event loop's thread.

    `paths` and `fallback_causes` give the label values that exist; others count as `other`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        paths: ReceivePaths,
        fallback_causes: Sequence[str],
        transfers: TransferTable,
    ) -> None:
        self._requests = RequestInstruments(registry)
        self._handoffs = HandoffInstruments(registry, paths, fallback_causes, transfers)
        self._token_gap = Histogram(
            "baton_worker_inter_token_latency_seconds",
            "Time between two tokens of one answer.",
            buckets=TOKEN_GAP_EDGES_S,
            registry=registry,
        )
        errors = Counter(
            "baton_worker_error_responses",
            "Requests answered with an error, by HTTP status.",
            ["status"],
            registry=registry,
        )
        self._errors = {status: errors.labels(str(status)) for status in ERROR_STATUSES}

    def token_gap(self, seconds: float, num_tokens: int) -> None:
        """Count `num_tokens` that came together, `seconds` after the one before."""
        for _ in range(num_tokens):
            self._token_gap.observe(seconds / num_tokens)

    def landed(self, trace: RequestSpan) -> None:
        """Count what a request's handoff took, if its KV is here. Once for each request."""
        self._handoffs.landed(trace)

    def error_response(self, status: int) -> None:
        """Count an error that was answered."""
        self._errors.get(status, self._errors[500]).inc()

    def finished(self, trace: RequestSpan) -> None:
        """Count a request that has ended, whatever its outcome; `landed` counts its handoff."""
        self._requests.finished(trace)
        if trace.role in {"prefill", "decode"}:
            self._handoffs.finished(trace)


class RequestInstruments:
    """Requests and their latencies, by role."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "baton_worker_requests",
            "Requests that have ended, by role and outcome.",
            ["role", "outcome"],
            registry=registry,
        )
        self._requests = {
            (role, outcome): requests.labels(role, outcome)
            for role in ROLES
            for outcome in OUTCOMES
        }
        self._first_token = _by_role(
            registry,
            "baton_worker_time_to_first_token_seconds",
            "Time from the request's arrival at this worker to its first token.",
            FIRST_TOKEN_EDGES_S,
        )
        self._queue = _by_role(
            registry,
            "baton_worker_request_queue_time_seconds",
            "Time from the request's arrival at this worker to the start of prefill.",
            REQUEST_EDGES_S,
        )
        self._prefill = _by_role(
            registry,
            "baton_worker_request_prefill_time_seconds",
            "Time of prefill, as this role saw it.",
            REQUEST_EDGES_S,
        )
        self._total = _by_role(
            registry,
            "baton_worker_e2e_request_latency_seconds",
            "Time from the request's arrival at this worker to its end.",
            REQUEST_EDGES_S,
        )

    def finished(self, trace: RequestSpan) -> None:
        """Count a request that has ended."""
        outcome = trace.outcome if trace.outcome in OUTCOMES else "failed"
        self._requests[trace.role, str(outcome)].inc()
        durations = compute_durations(trace)
        for histograms, seconds in (
            (self._first_token, durations.first_token_s),
            (self._queue, durations.queue_s),
            (self._prefill, durations.prefill_s),
            (self._total, durations.total_s),
        ):
            if seconds is not None:
                histograms[trace.role].observe(seconds)


def set_worker_info(registry: CollectorRegistry, facts: dict[str, str]) -> None:
    """Register `baton_worker_info`, which is 1 and carries `facts` as labels."""
    Gauge("baton_worker_info", "What this worker is.", list(facts), registry=registry).labels(
        **facts
    ).set(1)


def _by_role(
    registry: CollectorRegistry, name: str, help_text: str, edges: Sequence[float]
) -> dict[str, Histogram]:
    histogram = Histogram(name, help_text, ["role"], buckets=edges, registry=registry)
    return {role: histogram.labels(role) for role in ROLES}


Phase: TypeAlias = Literal["computing", "waiting"]
HeldBlockSeconds: TypeAlias = "dict[tuple[HandoffMode, Phase], float]"

MODES: Final[tuple[HandoffMode, ...]] = get_args(HandoffMode)
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


@dataclass(slots=True)
class _Hold:
    mode: HandoffMode
    since: Instant
    num_blocks: int = 0
    phase: Phase = "computing"


class HeldBlockTime:
    """What each handoff holds, and the sums of what all have held. Owned by the engine's thread.

    A block that several handoffs share counts for each. Keys that are not held are ignored.
    """

    def __init__(self) -> None:
        self._holds: dict[Hashable, _Hold] = {}
        self._sums: HeldBlockSeconds = {(mode, phase): 0.0 for mode in MODES for phase in PHASES}

    @property
    def block_seconds(self) -> HeldBlockSeconds:
        """Sums up to each hold's last change: what is held goes in when it is released."""
        return dict(self._sums)

    def hold(self, key: Hashable, mode: HandoffMode, at: Instant) -> None:
        """A handoff begins to hold blocks: none yet."""
        self._holds[key] = _Hold(mode, at)

    def resize(self, key: Hashable, num_blocks: int, at: Instant) -> None:
        """It holds so many blocks from now on."""
        hold = self._count(key, at)
        if hold is not None:
            hold.num_blocks = num_blocks

    def prefill_done(self, key: Hashable, at: Instant) -> None:
        """All of the prompt's KV is there: from now on its blocks only wait."""
        hold = self._count(key, at)
        if hold is not None:
            hold.phase = "waiting"

    def release(self, key: Hashable, at: Instant) -> None:
        """It holds nothing any more."""
        self._count(key, at)
        self._holds.pop(key, None)

    def __len__(self) -> int:
        return len(self._holds)

    def _count(self, key: Hashable, at: Instant) -> _Hold | None:
        hold = self._holds.get(key)
        if hold is None:
            return None
        self._sums[hold.mode, hold.phase] += hold.num_blocks * (at - hold.since)
        hold.since = at
        return hold


class HeldBlockTimeCollector(Collector):
    """Shows the sums at each scrape. `read` must be thread-safe."""

    def __init__(self, read: Callable[[], Mapping[tuple[HandoffMode, Phase], float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = CounterMetricFamily(
            "baton_handoff_held_block_seconds",
            "Blocks of prompts that are handed over, times how long they were held here.",
            labels=["mode", "phase"],
        )
        for labels, block_s in self._read().items():
            family.add_metric(labels, block_s)
        yield family
