"""Results of benchmarks → what a gateway begins with (`router.costs_file`). Pure, but for `read_*`.

`baton bench serve` shows prefill (the time to first token by prompt length, of prompts that were
computed alone) and steps (the time between chunks by answers at once); `baton bench link` what a
handoff over a link takes, of which prefill hides a part. Workers that do both parts, no store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar, get_args

import msgspec
import numpy as np

from baton.bench.compare import read_side
from baton.bench.statistics import load_library
from baton.errors import ConfigError
from baton.gateway.learned_costs import (
    LEAST_SEEN,
    DistanceName,
    KeptCosts,
    KeptLine,
    KeptPromptLine,
)
from baton.kv.sizing.sizes import Terms, compute_sizes
from baton.planner.links import read_links
from baton.planner.sizing import find_model
from baton.router.handoff_costs import TYPICAL_TOKENS, KVShape, LinkCost, guess_exposed
from baton.router.learning import MOST_BEND
from baton.router.load import MIN_STREAMED
from baton.router.worker_activity import MOST_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.bench.load.job import Report
    from baton.bench.load.records import Record

_Line = TypeVar("_Line", bound=KeptLine)
NUM_ITERATIONS: Final = 8
LEAST_SPREAD: Final = 1.5
"""The largest size over the smallest: sizes that are more alike show no line."""


@dataclass(frozen=True, slots=True)
class FittedLine(Generic[_Line]):
    """`error`: the mean difference of `num_seen` samples to the line, as a share of the larger."""

    line: _Line
    num_seen: int
    error: float


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """One model's."""

    prefill: FittedLine[KeptPromptLine]
    step: FittedLine[KeptLine]
    handoff: dict[DistanceName, KeptLine]

    @property
    def kept(self) -> KeptCosts:
        """Its entry in the file."""
        return KeptCosts(self.prefill.line, self.step.line, handoff=self.handoff)


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Links by the distance of their workers, and what a token's KV takes on them."""

    by_distance: dict[DistanceName, LinkCost]
    shape: KVShape

    def guess_handoffs(self, prefill: KeptPromptLine) -> dict[DistanceName, KeptLine]:
        """Exposed seconds, as a gateway guesses them of links that its workers have measured."""
        token_s = prefill.each_s * (1.0 + prefill.bend * TYPICAL_TOKENS / 2)
        return {
            distance: KeptLine(*guess_exposed(link, self.shape, token_s))
            for distance, link in self.by_distance.items()
        }


@dataclass(frozen=True, slots=True)
class _Timeline:
    """When each request of a run was sent, had its first token and its last `[num]`, seconds."""

    sent_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Timeline:
        """What has no token computed its prompt until its end, as far as is known."""
        ends = [each.token_s or (each.ended_s,) for each in records]
        times = [(each.sent_s, end[0], end[-1]) for each, end in zip(records, ends, strict=True)]
        return cls(*np.array(times, dtype=np.float64).reshape(-1, 3).T)

    def is_computed_alone(self, record: Record) -> bool:
        """Whether no other prompt waited for its first token at the same time."""
        overlaps = (self.sent_s < record.token_s[0]) & (self.first_s > record.sent_s)
        return int(overlaps.sum()) == 1

    def count_answers(self, span_s: tuple[float, float]) -> float:
        """Answers at once, on the average."""
        return float(_overlap(self.first_s, self.last_s, span_s).sum()) / (span_s[1] - span_s[0])

    def sum_prompts_s(self, span_s: tuple[float, float], prefill_s: NDArray[np.float64]) -> float:
        """Of that time, what prompts took, which compute for `prefill_s` `[num]` at the end."""
        begins = np.maximum(self.sent_s, self.first_s - prefill_s)
        return float(_overlap(begins, self.first_s, span_s).sum())


def _overlap(
    begins: NDArray[np.float64], ends: NDArray[np.float64], span_s: tuple[float, float]
) -> NDArray[np.float64]:
    common: NDArray[np.float64] = np.minimum(ends, span_s[1]) - np.maximum(begins, span_s[0])
    return np.maximum(0.0, common)


def fit_prefill(reports: Sequence[Report]) -> FittedLine[KeptPromptLine]:
    """Seconds to the first token by prompt tokens that were not cached, behind those that were.

    Raises:
        ConfigError: too few prompts were computed alone, or all are about as long.
    """
    sizes, pairs, seconds = [], [], []
    for report in reports:
        records = _measured(report)
        timeline = _Timeline.of(records)
        for record in records:
            num, ttft_s = _count_computed(record), record.ttft_s
            if _counts(record) and num and ttft_s and timeline.is_computed_alone(record):
                sizes.append(float(num))
                pairs.append(num * (record.num_prompt_tokens - num / 2))
                seconds.append(ttft_s)
    (fixed, each, more), error = _fit(
        (sizes, pairs),
        seconds,
        few="prefill: few prompts were computed alone: run `baton bench serve --concurrency 1`",
        alike="prefill: prompts are about as long: add a run with another --input-len",
    )
    each = max(each, more / MOST_BEND)
    bend = more / each if each else 0.0
    return FittedLine(KeptPromptLine(fixed, each, bend), len(sizes), error)


def fit_step(
    reports: Sequence[Report], prefill: KeptPromptLine, num_workers: int
) -> FittedLine[KeptLine]:
    """Seconds of a step by answers at once, of each of so many workers.

    Raises:
        ConfigError: too few answers were streamed, or as many were under way in all runs.
    """
    sizes, seconds = [], []
    for report in reports:
        records = _measured(report)
        timeline = _Timeline.of(records)
        computed = np.array([_count_computed(each) for each in records], dtype=np.float64)
        tokens = np.array([each.num_prompt_tokens for each in records], dtype=np.float64)
        work = computed * (1.0 + prefill.bend * (tokens - computed / 2))
        prefill_s = prefill.fixed_s + prefill.each_s * work
        for record in records:
            times = record.token_s
            if not _counts(record) or len(times) < MIN_STREAMED or times[-1] <= times[0]:
                continue
            span_s, lasted_s = (times[0], times[-1]), times[-1] - times[0]
            prompts_s = timeline.sum_prompts_s(span_s, prefill_s) / num_workers
            pace_s = lasted_s / (len(times) - 1)
            sizes.append(max(1.0, timeline.count_answers(span_s) / num_workers))
            seconds.append(pace_s * (1.0 - min(MOST_SHARE, prompts_s / lasted_s)))
    (fixed, each), error = _fit(
        (sizes,),
        seconds,
        few=f"steps: few answers came in {MIN_STREAMED} parts or more: ask for longer ones "
        "(--output-len)",
        alike="steps: about as many answers were under way at once: add a run with another "
        "--concurrency",
    )
    return FittedLine(KeptLine(fixed, each), len(sizes), error)


def _measured(report: Report) -> list[Record]:
    """Without the warm-up, whose times count from a beginning of their own."""
    return [each for each in report.records if each.phase == "measured"]


def _counts(record: Record) -> bool:
    return record.is_complete and bool(record.token_s)


def _count_computed(record: Record) -> int:
    return max(0, record.num_prompt_tokens - (record.tokens.num_cached or 0))


def _fit(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], *, few: str, alike: str
) -> tuple[list[float], float]:
    """What is fixed and what each of the columns adds, for the least relative error, and that.

    No coefficient is negative. The first column is the sizes.
    """
    sizes = columns[0]
    if len(sizes) < LEAST_SEEN:
        raise ConfigError(f"{few} (there are {len(sizes)}, and must be {LEAST_SEEN})")
    if max(sizes) < LEAST_SPREAD * min(sizes):
        raise ConfigError(f"{alike} (there are {min(sizes):.3g} to {max(sizes):.3g})")
    x, y = np.stack([np.ones(len(sizes)), *map(np.array, columns)], axis=1), np.array(seconds)
    found, predicted = np.zeros(x.shape[1]), np.full(len(y), y.mean())
    nnls = load_library("scipy.optimize").nnls
    for _ in range(NUM_ITERATIONS):  # by what is predicted, not seen: else the line is too low
        found, _ = nnls(x / predicted[:, None], y / predicted)
        predicted = np.maximum(1e-9, x @ found)
    error = float((np.abs(predicted - y) / np.maximum(predicted, y)).mean())
    return found.tolist(), error


def read_reports(paths: Sequence[Path]) -> dict[str, list[Report]]:
    """Results of `baton bench serve`, by the model that was asked.

    Raises:
        ConfigError: one cannot be read, or is another result.
    """
    found: dict[str, list[Report]] = {}
    for path in paths:
        for report in read_side(path):
            found.setdefault(report.server.model, []).append(report)
    return found


def read_measured_links(named: Sequence[str], kv_of: str | None) -> MeasuredLinks | None:
    """Of results of `baton bench link`, as `DISTANCE=FILE`; None: there are none.

    `kv_of`: a `config.json`, a folder with one, or a name that ships.

    Raises:
        ConfigError: a name is no distance, a file is no such result, or the model is not known.
    """
    if not named:
        return None
    if kv_of is None:
        raise ConfigError("--link: the model is missing whose KV is handed over: add --kv-of")
    found: dict[DistanceName, LinkCost] = {}
    for each in named:
        name, _, file = each.partition("=")
        try:
            distance = msgspec.convert(name, DistanceName)
        except msgspec.ValidationError as exc:
            known = ", ".join(get_args(DistanceName))
            raise ConfigError(f"--link {each}: write DISTANCE=FILE; distances are {known}") from exc
        found[distance] = _read_link(Path(file))
    shape, _ = find_model(kv_of)
    token_bytes = compute_sizes(shape, Terms(1)).rank_token_bytes
    return MeasuredLinks(found, KVShape(token_bytes, len(shape.layers)))


def _read_link(path: Path) -> LinkCost:
    """The fastest transport by push."""
    links = [each for each in read_links(path) if each.name.endswith(", push")]
    if not links:
        raise ConfigError(f"{path}: no transport pushed scattered pages in this report")
    best = max(links, key=lambda each: each.gb_per_s)
    return LinkCost(best.latency_s, 1 / (best.gb_per_s * 1e9))


def fit_costs(
    reports: Sequence[Report], num_workers: int, links: MeasuredLinks | None
) -> FittedCosts:
    """Costs of the model that these runs asked, each of so many workers of both roles.

    Raises:
        ConfigError: the runs do not show prefill, or steps; the message names what is missing.
    """
    prefill = fit_prefill(reports)
    step = fit_step(reports, prefill.line, num_workers)
    handoff = {} if links is None else links.guess_handoffs(prefill.line)
    return FittedCosts(prefill, step, handoff)
