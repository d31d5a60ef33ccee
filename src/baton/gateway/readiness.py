"""When clients may come: somebody decodes, and prefill workers had time to introduce themselves.

A decode worker alone answers every request, so the gateway does not wait for ever. But a first
request that it takes a moment before a prefill worker is known would be served without a handoff,
which nobody expects who has just started both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.gateway.workers import Unseen
from baton.router.fleet import Role

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.workers import Workers

PATIENCE_S: Final = 15.0
"""Once somebody decodes, for workers that were listed and have never answered."""


class Readiness:
    """Owner: the event loop's thread."""

    def __init__(self, workers: Workers, clock: Clock) -> None:
        self._workers, self._clock = workers, clock
        self._patient_until: Instant | None = None

    def why_not(self) -> str | None:
        """What is waited for; None if the gateway is ready."""
        workers = self._workers
        if not workers.fleet.can_decode:
            return workers.why_not_ready()
        now = self._clock.now()
        if self._patient_until is None:
            self._patient_until = Instant(now + PATIENCE_S)
        is_patient = now < self._patient_until
        return workers.why_not_ready() if is_patient and self._awaits_prefill() else None

    def _awaits_prefill(self) -> bool:
        return any(
            isinstance(worker.state, Unseen) and worker.address.role is not Role.DECODE
            for worker in self._workers.all
        )
