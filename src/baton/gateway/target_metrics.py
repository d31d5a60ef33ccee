"""Requests that ended, and those that missed a target of their model (`router.targets`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter

from baton.gateway.errors import OK, SERVER_ERROR
from baton.router.load import MIN_STREAMED, find_itl
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Instant
    from baton.gateway.request_context import RequestContext


@dataclass(slots=True)
class TargetTotals:
    """Of one model and objective, since the gateway's start. `num_missed` includes failures."""

    target_s: float
    num: int = 0
    num_missed: int = 0


class TargetMetrics:
    """By model and objective, `ttft`, `tpot` or `itl`. Owner: the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("model", "objective")
        self._requests = Counter(
            "baton_gateway_target_requests",
            "Requests that ended, of models with this target (router.targets).",
            labels,
            registry=registry,
        )
        self._misses = Counter(
            "baton_gateway_target_misses",
            "Those of them that missed it, or failed.",
            labels,
            registry=registry,
        )
        self.totals: dict[tuple[str, str], TargetTotals] = {}

    def knows(self, model: str) -> bool:
        """Whether requests of a model were counted before."""
        return any(name == model for name, _ in self.totals)

    def ended(self, context: RequestContext, model: str, code: int, now: Instant) -> None:
        """A request ended with this status, and counts as one of `model`.

        Refusals that are the client's fault do not count.
        """
        has_failed = code >= SERVER_ERROR
        if not has_failed and code != OK:
            return
        for objective, target_s, seconds in _compare(context, now):
            if has_failed or seconds is not None:
                is_missed = has_failed or (seconds is not None and seconds > target_s)
                self._count((model, objective), target_s, is_missed=is_missed)

    def _count(self, key: tuple[str, str], target_s: float, *, is_missed: bool) -> None:
        totals = self.totals.setdefault(key, TargetTotals(target_s))
        totals.num += 1
        totals.num_missed += is_missed
        self._requests.labels(*key).inc()
        self._misses.labels(*key).inc(is_missed)


def _compare(context: RequestContext, now: Instant) -> Iterator[tuple[str, float, float | None]]:
    """Objective, target, and the request's time; None: it cannot be known."""
    targets = context.model_targets
    first_at = context.trace.stamps.get(Stamp.FIRST_TOKEN)
    if targets.ttft_s is not None:
        yield "ttft", targets.ttft_s, _find_ttft(context, targets.ttft_s, now)
    if targets.tpot_s is not None:
        has_pace = first_at is not None and context.num_streamed >= MIN_STREAMED
        num_gaps = context.num_streamed - 1
        yield (
            "tpot",
            targets.tpot_s,
            (now - first_at) / num_gaps if has_pace and first_at is not None else None,
        )
    if targets.itl_s is not None:
        yield "itl", targets.itl_s, find_itl(context.token_gaps)


def _find_ttft(context: RequestContext, target_s: float, now: Instant) -> float | None:
    """An answer in one piece whose first token is not known had it before its end."""
    first_at = context.trace.stamps.get(Stamp.FIRST_TOKEN)
    if first_at is not None:
        return first_at - context.received_at
    whole_s = now - context.received_at
    return whole_s if whole_s <= target_s else None
