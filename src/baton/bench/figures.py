"""Samples → figures. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.pair import Taken
    from baton.bench.workload import Workload


class Spread(msgspec.Struct, frozen=True):
    """Of the rounds' medians: the median, and the extremes."""

    median: float
    min: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """What one row's samples say.

    `gb_per_s` in 1e9 bytes. `p50_us` and `p99_us` over all samples of all rounds.
    `*_cpu_s_per_gb` is user and system time of each process, its spinning included.
    `us_per_descriptor` is the whole transfer's time by its number of descriptors.
    """

    gb_per_s: Spread
    p50_us: float
    p99_us: float
    driver_cpu_s_per_gb: float
    owner_cpu_s_per_gb: float
    us_per_descriptor: float


class Latency(msgspec.Struct, frozen=True):
    """What the samples say where nothing is moved, and a rate would mean nothing.

    `p50_us` and `p99_us` over all samples of all rounds; `*_cpu_us` for one transfer.
    """

    p50_us: float
    p50_us_of_rounds: Spread
    p99_us: float
    driver_cpu_us: float
    owner_cpu_us: float


def compute_figures(workload: Workload, rounds: Sequence[Taken]) -> Figures:
    """Figures of one row; at least one round."""
    samples = sorted(sample for taken in rounds for sample in taken.samples_s)
    num_gb = sum(taken.num_moves for taken in rounds) * workload.num_bytes / 1e9
    rates = [workload.num_bytes / 1e9 / statistics.median(taken.samples_s) for taken in rounds]
    p50_s = statistics.median(samples)
    return Figures(
        gb_per_s=Spread(statistics.median(rates), min(rates), max(rates)),
        p50_us=p50_s * 1e6,
        p99_us=find_percentile(samples, 0.99) * 1e6,
        driver_cpu_s_per_gb=sum(taken.driver_cpu_s for taken in rounds) / num_gb,
        owner_cpu_s_per_gb=sum(taken.owner_cpu_s for taken in rounds) / num_gb,
        us_per_descriptor=p50_s * 1e6 / workload.num_descriptors,
    )


def compute_latency(rounds: Sequence[Taken]) -> Latency:
    """Latency of one row; at least one round."""
    samples = sorted(sample for taken in rounds for sample in taken.samples_s)
    medians = [statistics.median(taken.samples_s) * 1e6 for taken in rounds]
    num_moves = sum(taken.num_moves for taken in rounds)
    return Latency(
        p50_us=statistics.median(samples) * 1e6,
        p50_us_of_rounds=Spread(statistics.median(medians), min(medians), max(medians)),
        p99_us=find_percentile(samples, 0.99) * 1e6,
        driver_cpu_us=sum(taken.driver_cpu_s for taken in rounds) * 1e6 / num_moves,
        owner_cpu_us=sum(taken.owner_cpu_s for taken in rounds) * 1e6 / num_moves,
    )


def find_percentile(ascending: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least this fraction of them does not exceed."""
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]
