"""One point a second of what the dashboard draws over time, and the latest minutes of them.

This is all that runs while no page is open, so that one which opens shows the last minutes.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING, Final

from baton.gateway.dashboard.events import Point, TargetShown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.gateway.completions import Completions
    from baton.gateway.request_context import Services
    from baton.gateway.request_history import RequestHistory
    from baton.router.load import EndedRequest

TARGETS_WINDOW_S: Final = 30
"""One sample of what was counted a second."""
NUM_POINTS: Final = 300
"""Five minutes: 20 KB."""
P50: Final = 0.5
P99: Final = 0.99


class Series:
    """The latest points. Owner: the event loop's thread."""

    def __init__(
        self, services: Services, records: RequestHistory, completions: Completions
    ) -> None:
        self._services, self._clock = services, services.clock
        self._records, self._completions = records, completions
        self._before_s = self._clock.now()
        self._num_before = self._num_failed_before = 0
        self._tokens_before = self._sum_tokens()
        self.points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._targets = services.metrics.targets
        self._counted: deque[dict[tuple[str, str], tuple[int, int]]] = deque(
            maxlen=TARGETS_WINDOW_S + 1
        )

    def sample(self) -> Point:
        """Add the point of the time since the last one."""
        records, now = self._records, self._clock.now()
        since_s = max(1e-3, now - self._before_s)
        ended = list(self._ended_since(self._before_s))
        num, num_failed = records.num_added, records.num_failed
        tokens = self._sum_tokens()
        computed, cached, output = (
            _round((num - before) / since_s)
            for num, before in zip(tokens, self._tokens_before, strict=True)
        )
        ttft_s = sorted(each.ttft_s for each in ended)
        tpot_s = sorted(each.tpot_s for each in ended)
        split = [each for each in ended if each.prefill_s is not None]
        point = Point(
            at=round(self._clock.unix_now(), 3),
            requests=_round((num - self._num_before) / since_s),
            failed=_round((num_failed - self._num_failed_before) / since_s),
            num_inflight=self._completions.num_inflight,
            num_waiting=self._services.admission.queue.num_requests,
            ttft_p50_s=_quantile(ttft_s, P50),
            ttft_p99_s=_quantile(ttft_s, P99),
            tpot_p50_s=_quantile(tpot_s, P50),
            waited_s=_mean(each.waited_s for each in split),
            prefill_s=_mean(each.prefill_s or 0.0 for each in split),
            handoff_s=_mean(
                max(0.0, each.ttft_s - each.waited_s - (each.prefill_s or 0.0)) for each in split
            ),
            computed_tokens=computed,
            cached_tokens=cached,
            answer_tokens=output,
        )
        self._tokens_before = tokens
        self._before_s, self._num_before, self._num_failed_before = now, num, num_failed
        self.points.append(point)
        totals = self._targets.totals.items()
        self._counted.append({key: (each.num, each.num_missed) for key, each in totals})
        return point

    def targets(self) -> tuple[TargetShown, ...]:
        """Each target of a model that had requests, and those of the last `TARGETS_WINDOW_S`."""
        latest, before = self._counted[-1], self._counted[0]
        shown = []
        for (model, objective), (num, num_missed) in sorted(latest.items()):
            num_before, num_missed_before = before.get((model, objective), (0, 0))
            shown.append(
                TargetShown(
                    model,
                    objective,
                    self._targets.totals[model, objective].target_s,
                    float(len(self._counted) - 1),
                    num - num_before,
                    num_missed - num_missed_before,
                )
            )
        return tuple(shown)

    def _sum_tokens(self) -> tuple[int, int, int]:
        """Of all answers: of their prompts computed, and cached, and of themselves."""
        costs = self._services.load.models.values()
        return (
            sum(each.num_computed_tokens for each in costs),
            sum(each.num_cached_tokens for each in costs),
            sum(each.num_output_tokens for each in costs),
        )

    def _ended_since(self, before_s: float) -> Iterable[EndedRequest]:
        for model in self._services.workers.fleet.models:
            for each in reversed(self._services.load.costs(model).ended):
                if each.at <= before_s:
                    break
                yield each


def _quantile(ordered: list[float], share: float) -> float | None:
    return _round(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return _round(fmean(found)) if found else None


def _round(value: float) -> float:
    """To a microsecond, or as many digits of a rate: JSON stays short."""
    return round(value, 6)
