"""What the JSON has: schema `baton-bench-architectures/1`, described in docs/fair-benchmark.md.

And the metrics that are compared: how each is read from a cell, and which way is better. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from baton.bench.architectures.usage import CpuUse
from baton.bench.files import RunManifest
from baton.bench.load.records import Figures, Slo, Spread
from baton.bench.load.runner import ClientLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ARM: Final = {"configuration": "arm"}
"""The JSON has the name of the flag, `--arm`."""

SCHEMA: Final = "baton-bench-architectures/1"

Judgement: TypeAlias = Literal["wins", "loses", "undecided"]


class Stages(msgspec.Struct, frozen=True):
    """Medians over a cell's requests in seconds; None where no trace has it.

    `exposed_transfer_s`: the part of the transfer that prefill does not hide; below 0: all hidden.
    """

    queue_s: float | None
    prefill_s: float | None
    exposed_transfer_s: float | None
    decode_queue_s: float | None


NO_STAGES: Final = Stages(None, None, None, None)


class Proof(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "told_by"}):
    """The proof that KV moved, by the traces of the answered requests.

    needed = prompt - cached on decode. `num_not_handed_over`: answered without enough KV from
    prefill. `num_untraced`: no trace was found. `fallbacks`: causes, counted. `num_tails`: prompts
    of which decode had all but a part of a block, which it computed itself. `source`: a peer has no
    traces; its servers' metrics give sums, or nothing.
    """

    num_requests: int
    num_untraced: int
    num_not_handed_over: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_needed_tokens: int
    num_received_tokens: int
    num_bytes: int
    modes: dict[str, int]
    transports: dict[str, int]
    fallbacks: dict[str, int]
    source: Literal["traces", "metrics", "none"] = "traces"
    num_tails: int = 0

    @property
    def is_proved(self) -> bool:
        """Whether every answer was decoded from KV that came from prefill."""
        return self.num_requests > 0 and not self.num_untraced and not self.num_not_handed_over

    @property
    def problem(self) -> str | None:
        """Why it is not proved; None where it is."""
        if self.is_proved:
            return None
        if not self.num_requests:
            return "no request was answered"
        if self.source == "none":
            return "not shown by the peer"
        parts = []
        if self.num_not_handed_over:
            causes = ", ".join(f"{num} x {cause}" for cause, num in self.fallbacks.items())
            parts.append(
                f"{self.num_not_handed_over} of {self.num_requests} requests were not handed over"
                f"{f' ({causes})' if causes else ''}"
            )
        if self.num_untraced:
            parts.append(f"{self.num_untraced} of {self.num_requests} left no trace")
        return "; ".join(parts)


class Cell(msgspec.Struct, frozen=True, kw_only=True, rename=ARM):
    """One configuration under one load, once.

    `run`: its file, of schema baton-bench-serve/1, with every request. `ended_early`: why it is
    incomplete. `proof`: of disaggregated configurations only. `num_tokens`: prompts and answers of
    all requests in `cpu`, warm-up included. `energy_j`: of the whole machine, None where unknown.
    """

    configuration: str
    level: str
    repetition: int
    run: str
    figures: Figures
    client: ClientLoad
    cpu: CpuUse
    num_tokens: int
    load: tuple[float, float, float]
    stages: Stages
    proof: Proof | None
    ended_early: str | None
    energy_j: float | None = None

    @property
    def is_usable(self) -> bool:
        """Whether its figures are compared."""
        return self.ended_early is None and self.figures.num_complete > 0

    @property
    def unproved(self) -> str | None:
        """Why it is doubtful that KV moved, of figures that are compared; else None."""
        return None if self.proof is None or not self.is_usable else self.proof.problem


class ConfigurationInfo(msgspec.Struct, frozen=True):
    """A configuration as it ran. `peer`: the project of the servers; None: Baton's."""

    name: str
    num_both: int
    num_prefill: int
    num_decode: int
    cores: dict[str, tuple[int, ...]]
    peer: str | None = None


class LevelInfo(msgspec.Struct, frozen=True):
    """A load: one of the two is set, or neither for a trace's own arrivals."""

    key: str
    words: str
    concurrency: int | None
    requests_per_s: float | None


class Trouble(msgspec.Struct, frozen=True, rename=ARM):
    """A trial that failed."""

    configuration: str
    repetition: int
    message: str


class Estimate(msgspec.Struct, frozen=True):
    """A mean over repetitions with its 95 % interval (None: of one repetition)."""

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


class Point(msgspec.Struct, frozen=True, rename=ARM):
    """One metric of one configuration under one load. None: nothing was measured."""

    metric: str
    configuration: str
    level: str
    estimate: Estimate | None


class Contrast(msgspec.Struct, frozen=True, rename=ARM):
    """A configuration against replication under one load: ratio, 95 % interval, judgement."""

    metric: str
    configuration: str
    level: str
    ratio: float | None
    low: float | None
    high: float | None
    judgement: Judgement


class Crossover(msgspec.Struct, frozen=True, rename=ARM):
    """Where, along concurrency, a configuration gets ahead of replication, or falls behind it.

    `at` is interpolated between loads; `low` and `high` bound it in 95 % of the resamplings that
    end like it; `share` of all resamplings do.
    """

    metric: str
    configuration: str
    kind: Literal["ahead", "behind", "ahead_from", "behind_from"]
    at: float | None
    low: float | None
    high: float | None
    share: float


class Cost(msgspec.Struct, frozen=True, rename=ARM):
    """Cost of 1,000 tokens, in the currency of the price: the *whole* cost each time.

    Do not add the two. `*_own`: of disaggregated configurations, the cost of prefill workers for
    input and of decode workers for output: these add up to the whole.
    """

    configuration: str
    level: str
    per_1000_input: float | None
    per_1000_output: float | None
    per_1000_input_own: float | None
    per_1000_output_own: float | None


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Conclusions from all cells."""

    slo: Slo
    slo_words: str
    points: tuple[Point, ...]
    contrasts: tuple[Contrast, ...]
    crossovers: tuple[Crossover, ...]
    costs: tuple[Cost, ...]
    headline: str
    verdict: tuple[str, ...]
    cautions: tuple[str, ...]


class Findings(msgspec.Struct, frozen=True, kw_only=True, rename={"configurations": "arms"}):
    """The whole benchmark. `is_partial`: it ended early, for the reason `ended`."""

    schema: str = SCHEMA
    is_partial: bool
    ended: str | None
    manifest: RunManifest
    engine: str
    model: str
    num_workers: int
    workload: str
    workload_words: str
    seed: str
    num_repetitions: int
    duration_s: float
    order: tuple[str, ...]
    configurations: tuple[ConfigurationInfo, ...]
    levels: tuple[LevelInfo, ...]
    cells: tuple[Cell, ...]
    troubles: tuple[Trouble, ...]
    warnings: tuple[str, ...]
    analysis: Analysis
    settle_s: float = 0.0


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


def describe_failed(findings: Findings, configuration: str, level: str) -> str | None:
    """How many cells of a configuration and load have no figures; None: all have some."""
    of_both = configuration, level
    cells = [each for each in findings.cells if (each.configuration, each.level) == of_both]
    num_failed = sum(not each.is_usable for each in cells)
    return f"{num_failed} of {len(cells)} failed" if num_failed else None


def metric_of(key: str) -> Metric:
    """By its key."""
    return next(metric for metric in METRICS if metric.key == key)
