"""How a server is loaded: how many at once, or how many a second, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Arrival = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True)
class Closed:
    """So many conversations at once: when one ends, the next begins."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Open:
    """So many requests a second, whether or not the server keeps up.

    `burst`: this many arrive together. Beyond `max_in_flight` (None: no bound) arrivals wait, and
    their waiting is recorded.
    """

    requests_per_s: float
    arrival: Arrival = "poisson"
    burst_size: int = 1
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """When the workload says."""

    max_in_flight: int | None = None


Load: TypeAlias = Closed | Open | Replay


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: no more is sent after `num_requests` or `duration_s`, whichever is first.

    What is under way then has `drain_s`, and each request `request_timeout_s`.
    """

    num_requests: int | None
    duration_s: float | None
    drain_s: float
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A whole run. `num_warm_up` requests come first, and are not counted."""

    load: Load
    limits: Limits
    num_warm_up: int


def describe_load(load: Load) -> str:
    """For people."""
    match load:
        case Closed(concurrency):
            return f"closed loop, {concurrency} at once"
        case Open(rate, arrival, burst_size):
            how = f"bursts of {burst_size}" if arrival == "burst" else arrival
            return f"open loop, {rate:g} requests/s, {how}{_bound(load)}"
        case Replay():
            return f"as recorded{_bound(load)}"


def _bound(load: Open | Replay) -> str:
    return "" if load.max_in_flight is None else f", at most {load.max_in_flight} at once"


def arrival_times(load: Open, seed: int) -> Iterator[float]:
    """Ascending times, without end; the first is at 0, except for Poisson arrivals."""
    match load.arrival:
        case "poisson":
            yield from _poisson(load.requests_per_s, seed)
        case "constant":
            yield from (i / load.requests_per_s for i in count())
        case "burst":
            size = load.burst_size
            yield from (i // size * size / load.requests_per_s for i in count())
        case other:
            assert_never(other)


def _poisson(requests_per_s: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += rng.exponential(1 / requests_per_s)
        yield now
