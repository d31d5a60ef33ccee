"""Metrics and traces of requests, and the engine's own statistics."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.telemetry.trace import RequestSpan, Stamp
from baton.worker.errors import was_declined
from baton.worker.fence import MembershipFence, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from baton.clock import Clock, Instant
    from baton.engines.interface import EngineStats
    from baton.telemetry.metrics import WorkerMetrics


class TokenClock:
    """When one answer's last token came. Owned by the event loop's thread."""

    def __init__(self, trace: RequestSpan, observer: RequestObserver) -> None:
        self._trace, self._observer = trace, observer
        self._last: Instant | None = None

    def arrived(self, num_tokens: int) -> None:
        """`num_tokens` came together: stamp the first token ever, count the gaps of the others."""
        now = self._observer.clock.now()
        if self._last is None:
            self._trace.stamp(Stamp.FIRST_TOKEN, now)
            self._observer.landed(self._trace)
        else:
            self._observer.metrics.token_gap(now - self._last, num_tokens)
        self._last = now


class RequestObserver:
    """Stamps how requests end, and counts them. Owned by the event loop's thread."""

    def __init__(self, clock: Clock, metrics: WorkerMetrics) -> None:
        self.clock, self.metrics = clock, metrics
        self._landed: set[int] = set()

    def token_clock(self, trace: RequestSpan) -> TokenClock:
        """A clock for the tokens of one answer."""
        return TokenClock(trace, self)

    def landed(self, trace: RequestSpan) -> None:
        """Count what the request's handoff took, once: before its answer ends, if it has tokens."""
        if id(trace) not in self._landed:
            self._landed.add(id(trace))
            self.metrics.landed(trace)

    @contextmanager
    def watch(self, trace: RequestSpan) -> Iterator[None]:
        """Record how the request ends: the body sets `trace.outcome`, unless it raises."""
        try:
            yield
        except asyncio.CancelledError:
            trace.outcome = "cancelled"
            raise
        except BaseException as exc:
            trace.outcome = "declined" if was_declined(exc) else "failed"
            raise
        finally:
            trace.stamp(Stamp.FINISHED, self.clock.now())
            self.landed(trace)
            self._landed.discard(id(trace))
            self.metrics.finished(trace)


class EngineCollector(Collector):
    """Turns a snapshot of the engine into samples. `read_stats` must be thread-safe."""

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        stats = self._read_stats()
        yield _gauge(
            "baton_worker_inflight_requests",
            "Requests inside the engine.",
            "state",
            waiting=stats.num_waiting,
            running=stats.num_running,
            awaiting_kv=stats.num_awaiting_kv,
        )
        yield _gauge(
            "baton_worker_blocks",
            "KV blocks; a cached one is free too, unless a request uses it.",
            "state",
            free=stats.num_free_blocks,
            reserved=stats.num_reserved_blocks,
            quarantined=stats.num_quarantined_blocks,
            held=stats.num_held_blocks,
            cached=stats.num_cached_blocks,
            exported=stats.num_exported_blocks,
            imported=stats.num_imported_blocks,
        )
        yield GaugeMetricFamily(
            "baton_worker_blocks_capacity", "KV blocks that exist.", stats.num_blocks
        )
        yield from _counters(stats)


class LeaseCollector(Collector):
    """What became of held prompts, as the handoff agent counted it. Thread-safe."""

    def __init__(self, read_num_lapsed: Callable[[], int]) -> None:
        self._read_num_lapsed = read_num_lapsed

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield CounterMetricFamily(
            "baton_handoff_leases_lapsed",
            "Computed prompts whose decode worker did not renew their lease.",
            self._read_num_lapsed(),
        )


class FenceCollector(Collector):
    """Whether a worker that announces itself is fenced."""

    def __init__(self, fence: MembershipFence, clock: Clock) -> None:
        self._fence, self._clock = fence, clock

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield GaugeMetricFamily(
            "baton_worker_fenced",
            "1 while no gateway has accepted this worker in time, so that it serves nothing.",
            self._fence.look(self._clock.now()) is not Standing.SERVING,
        )
        yield CounterMetricFamily(
            "baton_worker_fences", "Times that this worker was fenced.", self._fence.num_fenced
        )


def _counters(stats: EngineStats) -> Iterator[Metric]:
    prompt = CounterMetricFamily(
        "baton_worker_prompt_tokens",
        "Prompt tokens by where their KV came from.",
        labels=["source"],
    )
    prompt.add_metric(["computed"], stats.computed_prompt_tokens)
    prompt.add_metric(["cached"], stats.cached_prompt_tokens)
    prompt.add_metric(["received"], stats.received_prompt_tokens)
    yield prompt
    yield CounterMetricFamily(
        "baton_worker_output_tokens", "Tokens sampled here.", stats.output_tokens
    )
    yield CounterMetricFamily(
        "baton_worker_preemptions", "Requests that gave their blocks up.", stats.num_preemptions
    )


def _gauge(name: str, help_text: str, label: str, **values: int) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
