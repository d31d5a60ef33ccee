"""Which figures are compared, and which way is better. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.bench.architectures.results import Cell
    from baton.bench.load.figures import Figures, Spread


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of each cell; None where it has none. `scale`: from the number to `unit`."""

    key: str
    title: str
    short: str
    unit: str
    better: Literal["more", "less"]
    read: Callable[[Cell, int], float | None]
    scale: float = 1.0

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.better == "more" else -1


def _latency(
    short: str, title: str, read: Callable[[Figures], Spread | None]
) -> tuple[Metric, ...]:
    def p50(cell: Cell, num_workers: int) -> float | None:
        del num_workers
        spread = read(cell.figures)
        return None if spread is None else spread.p50

    def p99(cell: Cell, num_workers: int) -> float | None:
        del num_workers
        spread = read(cell.figures)
        return None if spread is None else spread.p99

    return (
        Metric(f"{short.lower()}_p50", f"{title}, median", f"{short} p50", "ms", "less", p50, 1e3),
        Metric(f"{short.lower()}_p99", f"{title}, p99", f"{short} p99", "ms", "less", p99, 1e3),
    )


def _goodput(cell: Cell, num_workers: int) -> float | None:
    goodput = cell.figures.goodput
    return None if goodput is None else goodput.requests_per_s / num_workers


def cpu_per_1000_tokens(cell: Cell, num_workers: int) -> float | None:
    """CPU seconds of all servers for 1,000 tokens, prompts and answers together.

    Seconds and tokens both include the warm-up and the drain.
    """
    del num_workers
    return cell.cpu.servers_s / cell.num_tokens * 1000 if cell.num_tokens else None


def joules_per_1000_tokens(cell: Cell, num_workers: int) -> float | None:
    """Energy of the whole machine for 1,000 tokens; None where it cannot be read."""
    del num_workers
    if cell.energy_j is None or not cell.num_tokens:
        return None
    return cell.energy_j / cell.num_tokens * 1000


THROUGHPUT: Final = Metric(
    "throughput",
    "Throughput",
    "throughput",
    "output tokens/s",
    "more",
    lambda cell, _: cell.figures.output_tokens_per_s,
)
GOODPUT: Final = Metric(
    "goodput",
    "Goodput per worker, within the SLO",
    "goodput/worker",
    "requests/s",
    "more",
    _goodput,
)
ENERGY: Final = Metric(
    "energy", "Energy of the machine", "energy", "J per 1,000 tokens", "less",
    joules_per_1000_tokens,
)  # fmt: skip
METRICS: Final = (
    THROUGHPUT,
    GOODPUT,
    *_latency("TTFT", "Time to first token", lambda figures: figures.ttft_s),
    *_latency("TPOT", "Time per output token", lambda figures: figures.tpot_s),
    *_latency("ITL", "Gap between tokens (ITL)", lambda figures: figures.itl_s),
    Metric("cpu", "CPU of all servers", "CPU", "s per 1,000 tokens", "less", cpu_per_1000_tokens),
    ENERGY,
)


def measured_metrics(cells: Iterable[Cell]) -> tuple[Metric, ...]:
    """All metrics; energy only where a cell has it."""
    has_energy = any(cell.energy_j is not None for cell in cells)
    return tuple(metric for metric in METRICS if has_energy or metric is not ENERGY)


def metric_of(key: str) -> Metric:
    """By its key."""
    return next(metric for metric in METRICS if metric.key == key)
