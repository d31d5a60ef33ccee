"""When clients may come: somebody decodes, and prefill workers had time to introduce themselves.

A decode worker alone answers every request, so the gateway does not wait for ever. But a first
request that it takes a moment before a prefill worker is known would be served without a handoff,
which nobody expects who has just started both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.gateway.workers import Pending
from baton.router.fleet import Role

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.workers import Workers

PREFILL_STARTUP_GRACE_S: Final = 15.0
"""Once somebody decodes, for workers that were listed and have never answered."""


class Readiness:
    """Owner: the event loop's thread."""

    def __init__(self, workers: Workers, clock: Clock) -> None:
        self._workers, self._clock = workers, clock
        self._grace_ends_at: Instant | None = None

    def why_not(self) -> str | None:
        """What is waited for; None if the gateway is ready."""
        workers = self._workers
        if not workers.fleet.can_decode:
            return workers.why_not_ready()
        now = self._clock.now()
        if self._grace_ends_at is None:
            self._grace_ends_at = Instant(now + PREFILL_STARTUP_GRACE_S)
        in_grace = now < self._grace_ends_at
        return workers.why_not_ready() if in_grace and self._is_prefill_pending() else None

    def _is_prefill_pending(self) -> bool:
        return any(
            isinstance(worker.state, Pending) and worker.address.role is not Role.DECODE
            for worker in self._workers.all
        )
