"""What happened within the last minutes: growth of counters, shares of an error budget. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BUCKET_S: Final = 30.0


@dataclass(slots=True)
class GrowthWindow:
    """How much counters of several sources have grown within `window_s`, in sum.

    What a source had counted when it was seen first does not count. A counter that is lower than
    before belongs to a process that was restarted, and has grown from 0.
    """

    window_s: float
    _last: dict[str, float] = field(default_factory=dict)
    _steps: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, values: Mapping[str, float], now: float) -> float:
        """These are all sources' counters now: the growth within the window."""
        grown = 0.0
        for source, value in values.items():
            before = self._last.get(source, value)
            grown += value - before if value >= before else value
        self._last = dict(values)
        if grown:
            self._steps.append((now, grown))
        while self._steps and now - self._steps[0][0] > self.window_s:
            self._steps.popleft()
        return sum(each for _, each in self._steps)


@dataclass(slots=True)
class _Bucket:
    began_at: float
    num: int = 0
    num_missed: int = 0


@dataclass(slots=True)
class BudgetWindow:
    """Requests that missed one target, over up to `longest_s`.

    The burn rate is the share that missed over the share that may: at 1, the budget of a period
    lasts exactly that period.
    """

    allowed_share: float
    longest_s: float
    _buckets: deque[_Bucket] = field(default_factory=deque)
    _totals: tuple[int, int] = (0, 0)

    def note(self, num_in_all: int, num_missed_in_all: int, now: float) -> None:
        """So many requests have ended up to now, and so many of them missed the target."""
        num, num_missed = num_in_all - self._totals[0], num_missed_in_all - self._totals[1]
        self._totals = num_in_all, num_missed_in_all
        while self._buckets and now - self._buckets[0].began_at > self.longest_s:
            self._buckets.popleft()
        if not num:
            return
        if not self._buckets or now - self._buckets[-1].began_at >= BUCKET_S:
            self._buckets.append(_Bucket(now))
        self._buckets[-1].num += num
        self._buckets[-1].num_missed += num_missed

    def burn_rate(self, window_s: float, min_requests: int, now: float) -> float | None:
        """Within the last `window_s`; None where fewer requests than `min_requests` ended."""
        inside = [each for each in self._buckets if now - each.began_at <= window_s]
        num = sum(each.num for each in inside)
        if num < min_requests:
            return None
        return sum(each.num_missed for each in inside) / num / self.allowed_share
