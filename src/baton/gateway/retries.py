"""Retries take turns within the gateway's retry budget, first come first served.

What ends a request otherwise (its deadline, its client) ends its wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from baton.router.failover import RetryBudget, RetryVerdict

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.metrics import GatewayMetrics


class Retries:
    """Owner: the event loop's thread."""

    def __init__(self, budget: RetryBudget, metrics: GatewayMetrics, clock: Clock) -> None:
        self.budget = budget
        self._metrics, self._clock = metrics, clock
        self._waiting: deque[asyncio.Future[Retry | None]] = deque()

    async def begin(self) -> Retry | None:
        """A retry, once there is room for it; None if there is none for a fleet that fails."""
        turn: asyncio.Future[Retry | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self.wake()
        try:
            retry = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and (unused := turn.result()) is not None:
                unused.end()
            raise
        if retry is None:
            self._metrics.refused_retries.inc()
        return retry

    def wake(self) -> None:
        """Let those go on that need not wait any longer."""
        while self._waiting:
            if self._waiting[0].done():  # its request was given up
                self._waiting.popleft()
                continue
            verdict = self.budget.begin(self._clock.now())
            if verdict is RetryVerdict.WAIT:
                return
            is_granted = verdict is RetryVerdict.GRANTED
            self._waiting.popleft().set_result(Retry(self) if is_granted else None)


class Retry:
    """One that is under way, until its first `end`."""

    def __init__(self, retries: Retries) -> None:
        self._retries: Retries | None = retries

    def end(self, *, has_failed: bool = False) -> None:
        """It has its first token, was given up, or failed."""
        retries, self._retries = self._retries, None
        if retries is not None:
            retries.budget.end(has_failed=has_failed)
            retries.wake()
