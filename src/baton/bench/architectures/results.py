"""What the JSON has: schema `baton-bench-architectures/1`, described in docs/fair-benchmark.md."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from baton.bench.architectures.usage import CpuUse
from baton.bench.files import RunManifest
from baton.bench.load.client_load import ClientLoad
from baton.bench.load.figures import Figures, Slo

ARM: Final = {"configuration": "arm"}
"""The JSON keeps the name that `--arm` has."""

SCHEMA: Final = "baton-bench-architectures/1"

Judgement: TypeAlias = Literal["wins", "loses", "undecided"]


class Stages(msgspec.Struct, frozen=True, rename={"exposed_transfer_s": "visible_transfer_s"}):
    """Medians over a cell's requests, in seconds; None where no trace has it.

    `exposed_transfer_s`: what the handoff added to prefill; below 0: it was hidden altogether.
    """

    queue_s: float | None
    prefill_s: float | None
    exposed_transfer_s: float | None
    decode_queue_s: float | None


NO_STAGES: Final = Stages(None, None, None, None)


class Proof(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "told_by"}):
    """That KV moved, by the traces of the requests that were answered.

    `num_tails`: prompts of which decode had all but a part of a block, which it computed itself.
    `source`: of a peer there are no traces; its servers' metrics tell sums, or nobody tells.

    needed = prompt - cached on decode. `num_not_handed_over`: answered without enough KV from
    prefill. `num_untraced`: no trace was found. `fallbacks`: causes, and how often.
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
        """In words; None where it is proved."""
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
    """One arm under one load, once.

    `run`: its file, of schema baton-bench-serve/1, with every request. `ended_early`: why it is not
    whole. `proof` is of disaggregated arms only. `num_tokens`: prompts and answers of all requests
    that `cpu` was spent on, warm-up too. `energy_j`: of the whole machine meanwhile, None where it
    cannot be read.
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
        """Whether its figures enter the comparison."""
        return self.ended_early is None and self.figures.num_complete > 0

    @property
    def unproved(self) -> str | None:
        """Why it is doubtful that KV moved, of figures that are compared; else None."""
        return None if self.proof is None or not self.is_usable else self.proof.problem


class ConfigurationInfo(msgspec.Struct, frozen=True):
    """An arm, as it was. `peer`: whose servers; None: Baton's."""

    name: str
    num_both: int
    num_prefill: int
    num_decode: int
    cores: dict[str, tuple[int, ...]]
    peer: str | None = None


class LevelInfo(msgspec.Struct, frozen=True):
    """A load: one of the two is set, or neither where requests come as a trace recorded them."""

    key: str
    words: str
    concurrency: int | None
    requests_per_s: float | None


class Trouble(msgspec.Struct, frozen=True, rename=ARM):
    """Something that went wrong: an arm that failed, and when."""

    configuration: str
    repetition: int
    message: str


class Estimate(msgspec.Struct, frozen=True):
    """A mean over repetitions with its 95 % interval (None: one repetition tells none)."""

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


class Point(msgspec.Struct, frozen=True, rename=ARM):
    """One metric of one arm under one load. None: nothing was measured."""

    metric: str
    configuration: str
    level: str
    estimate: Estimate | None


class Contrast(msgspec.Struct, frozen=True, rename=ARM):
    """An arm against replication under one load: ratio, its 95 % interval, and what it means."""

    metric: str
    configuration: str
    level: str
    ratio: float | None
    low: float | None
    high: float | None
    judgement: Judgement


class Crossover(msgspec.Struct, frozen=True, rename=ARM):
    """Where, along concurrency, an arm comes to be ahead of replication, or falls behind it.

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
    """Of 1,000 tokens, in the currency of the given price: the arm's *whole* cost each time.

    The two are not to be added. `*_own`: of disaggregated arms, the cost of prefill workers for
    input, of decode workers for output: those two add up to the whole.
    """

    configuration: str
    level: str
    per_1000_input: float | None
    per_1000_output: float | None
    per_1000_input_own: float | None
    per_1000_output_own: float | None


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """What the cells say together."""

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
    """The whole benchmark. `is_partial`: it ended before its time, and `ended` says why."""

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
