"""A degraded answer is counted, written into its request's trace, and logged once per cause."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.clock import Clock, Instant
    from baton.gateway.metrics import FallbackCause, GatewayMetrics
    from baton.gateway.request_context import RequestContext

LOG_AGAIN_AFTER_S: Final = 30.0

log = logging.getLogger(__name__)


class Fallbacks:
    """Notes that a request is served in another way than intended."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock) -> None:
        self._metrics, self._clock = metrics, clock
        self._logged_at: dict[FallbackCause, Instant] = {}

    def note(self, context: RequestContext, cause: FallbackCause, reason: str) -> None:
        """Note one, for people (`reason`) and for machines (`cause`)."""
        self._metrics.fallbacks[cause].inc()
        context.trace.fallbacks.append(f"{cause}: {reason}")
        now = self._clock.now()
        last = self._logged_at.get(cause)
        if last is None or now - last >= LOG_AGAIN_AFTER_S:
            self._logged_at[cause] = now
            log.warning("falling back (%s): %s [request %s]", cause, reason, context.id)
