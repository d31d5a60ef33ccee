"""What happens to a leg's trace and to the metrics while it is answered, and when it ends."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.telemetry.trace import RequestSpan, Stamp
from baton.worker.error_responses import was_declined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Clock, Instant
    from baton.telemetry.metrics import WorkerMetrics


class TokenClock:
    """When one answer's last token came. Owned by the event loop's thread."""

    def __init__(self, trace: RequestSpan, clock: Clock, metrics: WorkerMetrics) -> None:
        self._trace, self._clock, self._metrics = trace, clock, metrics
        self._last: Instant | None = None

    def arrived(self, num_tokens: int) -> None:
        """`num_tokens` came together: stamp the first token ever, count the gaps of the others."""
        now = self._clock.now()
        if self._last is None:
            self._trace.stamp(Stamp.FIRST_TOKEN, now)
        else:
            self._metrics.token_gap(now - self._last, num_tokens)
        self._last = now


class RequestObserver:
    """Stamps how legs end, and counts them. Owned by the event loop's thread."""

    def __init__(self, clock: Clock, metrics: WorkerMetrics) -> None:
        self._clock, self._metrics = clock, metrics

    def token_clock(self, trace: RequestSpan) -> TokenClock:
        """A clock for the tokens of one answer."""
        return TokenClock(trace, self._clock, self._metrics)

    @contextmanager
    def watch(self, trace: RequestSpan) -> Iterator[None]:
        """Record how the leg ends: the body sets `trace.outcome`, unless it raises."""
        try:
            yield
        except asyncio.CancelledError:
            trace.outcome = "cancelled"
            raise
        except BaseException as exc:
            trace.outcome = "declined" if was_declined(exc) else "failed"
            raise
        finally:
            trace.stamp(Stamp.FINISHED, self._clock.now())
            self._metrics.finished(trace)
