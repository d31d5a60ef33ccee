"""Rates and latencies of the last minute, from readings of a gateway's `/metrics`. Reads no clock.

Counters and buckets only grow while a gateway runs: the difference of two readings is what happened
between them. One that shrinks shows that the gateway was started again: earlier readings are void.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.ops.gateway_pages import PageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WINDOW_S: Final = 60.0
TTFT: Final = "baton_gateway_time_to_first_token_seconds_bucket"
ITL: Final = "baton_gateway_inter_token_latency_seconds_bucket"
REQUESTS: Final = "baton_gateway_requests_total"
FALLBACKS: Final = "baton_gateway_fallbacks_total"
IN_FLIGHT: Final = "baton_gateway_inflight_requests"
BUCKETS: Final = (TTFT, ITL)
NAMES: Final = (*BUCKETS, REQUESTS, FALLBACKS, IN_FLIGHT)
SERVER_ERROR: Final = "5"
"""First digit of a status."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All models and modes together. Buckets: how many values were at most `edge`, by edge."""

    at: float
    num_requests: float
    num_failed: float
    num_fallbacks: float
    num_in_flight: float
    ttft: Mapping[float, float]
    itl: Mapping[float, float]

    def is_after(self, earlier: Reading) -> bool:
        """Whether the gateway has run from one to the other."""
        return (
            self.num_requests >= earlier.num_requests
            and self.num_failed >= earlier.num_failed
            and all(self.ttft.get(edge, 0) >= number for edge, number in earlier.ttft.items())
        )


class Quantiles(msgspec.Struct, frozen=True):
    """Of one latency, in seconds; None: nothing was measured."""

    p50_s: float | None
    p99_s: float | None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What happened within `window_s`; None: since the gateway's start, and so without a rate."""

    window_s: float | None
    num_requests: int
    num_failed: int
    num_fallbacks: int
    num_in_flight: int
    ttft: Quantiles
    itl: Quantiles

    @property
    def requests_per_s(self) -> float | None:
        """None: over no known time."""
        return self.num_requests / self.window_s if self.window_s else None


class TrafficWindow:
    """The readings of the last minute, at most one for each second or so."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> Traffic:
        """Take a reading; what happened since the one before the window's start."""
        if self._readings and not reading.is_after(self._readings[-1]):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 1 and self._readings[1].at <= reading.at - WINDOW_S:
            self._readings.popleft()
        earliest = self._readings[0]
        return _between(None if earliest is reading else earliest, reading)


def read_metrics(body: bytes, at: float) -> Reading:
    """Read a gateway's `/metrics`.

    Raises:
        PageError: it is not in Prometheus's format, or no gateway's.
    """
    sums: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    num_failed, found = 0.0, False
    buckets: dict[str, dict[float, float]] = {name: {} for name in BUCKETS}
    for name, labels, edge, value in _samples(body):
        found = True
        if edge is not None:
            buckets[name][edge] = buckets[name].get(edge, 0.0) + value
            continue
        sums[name] += value
        if name == REQUESTS and labels.get("code", "").startswith(SERVER_ERROR):
            num_failed += value
    if not found:
        raise PageError("/metrics has none of a gateway's families: is this a gateway's URL?")
    return Reading(
        at=at,
        num_requests=sums[REQUESTS],
        num_failed=num_failed,
        num_fallbacks=sums[FALLBACKS],
        num_in_flight=sums[IN_FLIGHT],
        ttft=buckets[TTFT],
        itl=buckets[ITL],
    )


def compute_quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile of cumulative buckets, linear within a bucket; None if they are empty.

    Of what is beyond the last edge: that edge.
    """
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    if total <= 0:
        return None
    wanted, low, num_below = share * total, 0.0, 0.0
    for edge in edges:
        if buckets[edge] >= wanted and buckets[edge] > num_below:
            if math.isinf(edge):
                return low
            return low + (edge - low) * (wanted - num_below) / (buckets[edge] - num_below)
        low, num_below = edge, buckets[edge]
    return low


_Sample: TypeAlias = tuple[str, dict[str, str], float | None, float]
"""Name, labels, edge (of buckets alone) and value."""


def _samples(body: bytes) -> Iterator[_Sample]:
    # Most lines are of other families: they are not parsed.
    text = body.decode(errors="replace")
    wanted = "\n".join(line for line in text.split("\n") if line.startswith(NAMES))
    try:
        for family in text_string_to_metric_families(f"{wanted}\n"):
            for sample in family.samples:
                if sample.name in NAMES:
                    yield _check_sample(sample.name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError) as exc:  # what the parser raises
        raise PageError(f"/metrics is not in Prometheus's format: {exc}") from exc


def _check_sample(name: str, labels: dict[str, str], value: float) -> _Sample:
    edge = float(labels["le"]) if name in BUCKETS else None
    if not math.isfinite(value) or (edge is not None and math.isnan(edge)):
        raise ValueError(f"{name} is {value:g}")
    return name, labels, edge, value


def _between(earlier: Reading | None, now: Reading) -> Traffic:
    return Traffic(
        window_s=None if earlier is None else now.at - earlier.at,
        num_requests=round(now.num_requests - (earlier.num_requests if earlier else 0)),
        num_failed=round(now.num_failed - (earlier.num_failed if earlier else 0)),
        num_fallbacks=round(now.num_fallbacks - (earlier.num_fallbacks if earlier else 0)),
        num_in_flight=round(now.num_in_flight),
        ttft=_quantiles(earlier.ttft if earlier else {}, now.ttft),
        itl=_quantiles(earlier.itl if earlier else {}, now.itl),
    )


def _quantiles(earlier: Mapping[float, float], now: Mapping[float, float]) -> Quantiles:
    new = {edge: number - earlier.get(edge, 0.0) for edge, number in now.items()}
    return Quantiles(compute_quantile(new, 0.5), compute_quantile(new, 0.99))
