"""What a measurement of the choice leaves. `docs/bench-link.md` describes these fields."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.bench.machine import Machine
from baton.bench.orders import MeasuredLink
from baton.bench.report import Measurement, Skipped
from baton.bench.workload import Direction

SCHEMA: Final = "baton-bench-choice/1"
ALLOWED_REGRET: Final = 0.05


class Decision(msgspec.Struct, frozen=True):
    """What is chosen for one transfer, and what of it.

    `regret`: its median time over the best one's, less 1. `error`: what was predicted of it over
    its median time, less 1.
    """

    chosen: str
    predicted_s: float
    regret: float
    error: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One size and shape, one direction. `samples_s[transport][i]`, and their medians.

    `surveyed[i]` is chosen after survey number i, `refined[i]` once its links have carried all
    transfers of this table some times.
    """

    workload: Measurement
    page_bytes: int
    direction: Direction
    best: str
    median_s: dict[str, float]
    samples_s: dict[str, tuple[float, ...]]
    surveyed: tuple[Decision, ...]
    refined: tuple[Decision, ...]


class SurveyedLink(msgspec.Struct, frozen=True):
    """One link as one survey left it."""

    survey: int
    direction: Direction
    link: MeasuredLink


class ChoiceManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured."""

    baton: str
    started_at: str
    command: tuple[str, ...]
    num_surveys: int
    num_rounds: int
    budget_s: float
    driver: Machine | None
    owner: Machine | None
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]


class Verdict(msgspec.Struct, frozen=True):
    """Of all cells and surveys: how many within the allowed regret, and how bad it gets."""

    num_decisions: int
    num_within: int
    worst_regret: float
    mean_regret: float
    median_error: float
    """Of the absolute errors."""


class ChoiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. `is_partial`: it was interrupted, and cells are absent."""

    schema: str = SCHEMA
    is_partial: bool
    manifest: ChoiceManifest
    links: tuple[SurveyedLink, ...]
    cells: tuple[Cell, ...]
    surveyed: Verdict | None
    refined: Verdict | None
    skipped: tuple[Skipped, ...]
