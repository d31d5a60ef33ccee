"""How a server is loaded: a concurrency or a rate, arrival times, and limits. Pure."""

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
    """This many conversations at once: when one ends, the next begins."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Open:
    """This many requests per second, whether or not the server keeps up.

    `burst_size`: this many arrive together. Beyond `max_in_flight` (None: no limit) arrivals wait,
    and the wait is recorded.
    """

    requests_per_s: float
    arrival: Arrival = "poisson"
    burst_size: int = 1
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """At the workload's own arrival times."""

    max_in_flight: int | None = None


Load: TypeAlias = Closed | Open | Replay


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: nothing is sent after `num_requests` or `duration_s`, whichever is first.

    Requests in flight then have `drain_s`; each request has `request_timeout_s`.
    """

    num_requests: int | None
    duration_s: float | None
    drain_s: float
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A whole run. `num_warm_up` requests are sent first, then `settle_s` of the load itself.

    Neither is counted. What is measured begins where the settling ended, with other requests.
    """

    load: Load
    limits: Limits
    num_warm_up: int
    settle_s: float = 0.0


def describe_load(load: Load) -> str:
    """One line for reports."""
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
    """Ascending times in seconds since the run's beginning, without end."""
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
