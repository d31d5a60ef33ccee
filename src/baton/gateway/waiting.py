"""Requests that wait for a worker: all that could answer are down, restarting or draining.

They wait for a change of the fleet, first come first served, for a bounded time and up to a bounded
number. What ends a request otherwise (its deadline, its client) ends its wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from baton.clock import Clock, Instant
from baton.gateway.metrics import GatewayMetrics, WaitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.gateway.workers import Workers
    from baton.router.fleet import Fleet

MAX_WAITING: Final = 256
"""Requests at once; each holds its body."""


class WaitingRequests:
    """Owner: the event loop's thread."""

    def __init__(
        self, workers: Workers, metrics: GatewayMetrics, clock: Clock, wait_s: float
    ) -> None:
        self.workers, self._metrics, self._clock = workers, metrics, clock
        self._wait_s = wait_s
        self._waiting: dict[asyncio.Future[None], Callable[[Fleet], bool]] = {}
        workers.on_change = self._wake
        metrics.waiting.set_function(lambda: len(self._waiting))

    @property
    def num_free(self) -> int:
        """Requests that may wait beside those that do."""
        return MAX_WAITING - len(self._waiting)

    @property
    def has_much_room(self) -> bool:
        """Whether one may wait of which it is not known whether it can be served at all."""
        return 2 * self.num_free > MAX_WAITING

    def ends_at(self) -> Instant:
        """When a wait that begins now ends at the latest."""
        return Instant(self._clock.now() + self._wait_s)

    async def wait(self, is_served: Callable[[Fleet], bool], until: Instant) -> str | None:
        """Return once `is_served` holds of the fleet; else why it is not waited for any longer.

        What `is_served` raises, this does.
        """
        left_s = until - self._clock.now()
        if left_s <= 0:
            return self._expired
        if self.num_free <= 0:
            self._metrics.waits[WaitOutcome.REFUSED].inc()
            return f"{MAX_WAITING} requests wait for one already"
        outcome, began_at = WaitOutcome.LEFT, self._clock.now()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = is_served
        try:
            async with asyncio.timeout(left_s):
                await waiter
            outcome = WaitOutcome.SERVED
        except TimeoutError:
            outcome = WaitOutcome.EXPIRED
            return self._expired
        finally:
            del self._waiting[waiter]
            self._metrics.waits[outcome].inc()
            self._metrics.wait_seconds.observe(self._clock.now() - began_at)
        return None

    @property
    def _expired(self) -> str:
        return f"none came within {self._wait_s:g} s" if self._wait_s else "requests do not wait"

    def _wake(self, fleet: Fleet) -> None:
        """One that cannot be asked ends its own request, and keeps no other one waiting."""
        for waiter, is_served in self._waiting.items():
            if waiter.done():
                continue
            try:
                if is_served(fleet):
                    waiter.set_result(None)
            except Exception as exc:  # noqa: BLE001 - whoever waits raises it
                waiter.set_exception(exc)
