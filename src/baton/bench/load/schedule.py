"""When an open loop sends: seconds since the run's beginning. Pure."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, assert_never

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.bench.load.plan import Open


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
