"""Metrics of the gateway's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.router.fair_queue import PRIORITIES, Priority, RefusalCause
from baton.telemetry.metrics import FIRST_TOKEN_EDGES_S

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVING: Final = (RefusalCause.DISPLACED, RefusalCause.TARGET, RefusalCause.DEADLINE)
"""Why a request that waits may have to give up."""


class QueueMetrics:
    """What waits, for how long, and what does not wait."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Gauge(
            "baton_gateway_queued_requests",
            "Requests that wait in the gateway for a worker with room.",
            ("priority",),
            registry=registry,
        )
        self._tokens = Gauge(
            "baton_gateway_queued_tokens",
            "Tokens of their prompts and expected answers.",
            ("priority",),
            registry=registry,
        )
        wait = Histogram(
            "baton_gateway_queue_wait_seconds",
            "How long requests waited that were admitted then; those that did not wait are not in.",
            ("priority",),
            buckets=FIRST_TOKEN_EDGES_S,
            registry=registry,
        )
        self.wait = {priority: wait.labels(priority) for priority in PRIORITIES}
        refused = Counter(
            "baton_gateway_queue_refused",
            "Requests that were refused at once, as they could not wait.",
            ("cause",),
            registry=registry,
        )
        self.refused = {cause: refused.labels(cause) for cause in RefusalCause}
        expired = Counter(
            "baton_gateway_queue_expired",
            "Requests that waited, and were refused then.",
            ("cause",),
            registry=registry,
        )
        self.expired = {cause: expired.labels(cause) for cause in LEAVING}

    def show(self, count: Callable[[Priority], tuple[int, int]]) -> None:
        """Ask for requests and tokens of a class when metrics are read."""
        for priority in PRIORITIES:
            self._requests.labels(priority).set_function(_part(count, priority, 0))
            self._tokens.labels(priority).set_function(_part(count, priority, 1))


def _part(
    count: Callable[[Priority], tuple[int, int]], priority: Priority, part: int
) -> Callable[[], float]:
    return lambda: count(priority)[part]
