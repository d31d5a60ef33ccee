"""Two architecture benchmarks → do they agree within their stated intervals? Pure.

Two 95 % intervals of the same thing meet far more often than 95 times in 100: agreement of wide
intervals says little, so their width is said too. Ratios against replication are judged as well:
they are what the verdict rests on, and what drifts between two runs cancels in them.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from baton.bench.architectures.metrics import GOODPUT, METRICS
from baton.bench.architectures.results import Judgement
from baton.bench.architectures.verdict import MOST_OTHERS_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.bench.architectures.results import Contrast, Estimate, Findings

SCHEMA: Final = "baton-bench-agreement/1"

Verdict: TypeAlias = Literal["agree", "apart", "unknown"]
OPPOSITE: Final = frozenset({"wins", "loses"})


class Span(msgspec.Struct, frozen=True):
    """A value with its 95 % interval; None: one repetition, or no ratio, tells none."""

    value: float | None
    low: float | None
    high: float | None

    def meets(self, other: Span) -> Verdict:
        """Whether the two intervals have a point in common."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return "unknown"
        return "agree" if self.low <= other.high and other.low <= self.high else "apart"

    @property
    def half_share(self) -> float | None:
        """Half of the interval, as a share of the value."""
        if not self.value or self.low is None or self.high is None:
            return None
        return abs((self.high - self.low) / 2 / self.value)


class Pair(msgspec.Struct, frozen=True):
    """One figure in both. `unknown`: one of the two has no interval."""

    metric: str
    arm: str
    level: str
    a: Span
    b: Span
    verdict: Verdict


class Opposed(msgspec.Struct, frozen=True):
    """An arm wins against replication in one of the two, and loses in the other."""

    metric: str
    arm: str
    level: str
    a: Judgement
    b: Judgement


class Unlike(msgspec.Struct, frozen=True):
    """What was not the same. `is_asked`: so the two do not answer the same question."""

    field: str
    a: str
    b: str
    is_asked: bool


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """All. `points`: means; `ratios`: against replication. `left_out`: why some are not there.

    `cautions`: what may set the two apart although nothing else has changed.
    """

    schema: str = SCHEMA
    unlike: tuple[Unlike, ...]
    left_out: tuple[str, ...]
    cautions: tuple[str, ...]
    points: tuple[Pair, ...]
    ratios: tuple[Pair, ...]
    opposed: tuple[Opposed, ...]


class Tally(msgspec.Struct, frozen=True):
    """How many pairs agree, of those that have intervals; `half_share`: the median interval's."""

    num_agreeing: int
    num_known: int
    num_unknown: int
    half_share: float | None


def count(pairs: tuple[Pair, ...]) -> Tally:
    """All of them."""
    known = [pair for pair in pairs if pair.verdict != "unknown"]
    shares = [s for pair in known for s in (pair.a.half_share, pair.b.half_share) if s is not None]
    return Tally(
        sum(pair.verdict == "agree" for pair in known),
        len(known),
        len(pairs) - len(known),
        median(shares) if shares else None,
    )


def compare_findings(a: Findings, b: Findings) -> Agreement:
    """What both have measured."""
    skipped = _skipped_metrics(a, b)
    return Agreement(
        unlike=tuple(_unlike(a, b)),
        left_out=tuple(_left_out(a, b)),
        cautions=tuple(_cautions(a, b)),
        points=tuple(pair for pair in _points(a, b) if pair.metric not in skipped),
        ratios=tuple(pair for pair in _ratios(a, b) if pair.metric not in skipped),
        opposed=tuple(each for each in _opposed(a, b) if each.metric not in skipped),
    )


def _skipped_metrics(a: Findings, b: Findings) -> frozenset[str]:
    """Goodput by two SLOs is two different things."""
    return frozenset() if a.analysis.slo == b.analysis.slo else frozenset({GOODPUT.key})


def _points(a: Findings, b: Findings) -> Iterator[Pair]:
    theirs = {(p.metric, p.arm, p.level): p.estimate for p in b.analysis.points}
    for point in a.analysis.points:
        key = (point.metric, point.arm, point.level)
        other = theirs.get(key)
        if point.estimate is not None and other is not None:
            spans = _span_of(point.estimate), _span_of(other)
            yield Pair(*key, *spans, spans[0].meets(spans[1]))


def _ratios(a: Findings, b: Findings) -> Iterator[Pair]:
    for mine, other in _contrasts(a, b):
        if mine.ratio is not None and other.ratio is not None:
            spans = Span(mine.ratio, mine.low, mine.high), Span(other.ratio, other.low, other.high)
            yield Pair(mine.metric, mine.arm, mine.level, *spans, spans[0].meets(spans[1]))


def _opposed(a: Findings, b: Findings) -> Iterator[Opposed]:
    for mine, other in _contrasts(a, b):
        if {mine.judgement, other.judgement} == OPPOSITE:
            yield Opposed(mine.metric, mine.arm, mine.level, mine.judgement, other.judgement)


def _contrasts(a: Findings, b: Findings) -> Iterator[tuple[Contrast, Contrast]]:
    theirs = {(c.metric, c.arm, c.level): c for c in b.analysis.contrasts}
    for mine in a.analysis.contrasts:
        other = theirs.get((mine.metric, mine.arm, mine.level))
        if other is not None:
            yield mine, other


def _span_of(estimate: Estimate) -> Span:
    return Span(estimate.mean, estimate.low, estimate.high)


def _unlike(a: Findings, b: Findings) -> Iterator[Unlike]:
    for field, is_asked, mine, other in (
        ("model", True, a.model, b.model),
        ("engine", True, a.engine, b.engine),
        ("workers", True, a.num_workers, b.num_workers),
        ("workload", True, a.workload_words, b.workload_words),
        ("seconds of each load", False, a.duration_s, b.duration_s),
        ("repetitions", False, a.num_repetitions, b.num_repetitions),
        ("host", False, a.manifest.machine.host, b.manifest.machine.host),
        ("processor", False, a.manifest.machine.cpu, b.manifest.machine.cpu),
        ("cores", False, a.manifest.machine.num_cpus, b.manifest.machine.num_cpus),
        ("baton", False, a.manifest.baton, b.manifest.baton),
        ("versions", False, a.manifest.machine.versions, b.manifest.machine.versions),
    ):
        if mine != other:
            yield Unlike(field, str(mine), str(other), is_asked)


def _left_out(a: Findings, b: Findings) -> Iterator[str]:
    for side, findings in (("A", a), ("B", b)):
        if findings.is_partial:
            yield f"{side} is partial: {findings.ended}"
        for trouble in findings.troubles:
            yield f"{side}: {trouble.arm} failed in repetition {trouble.repetition}"
    if _skipped_metrics(a, b):
        yield (
            f"{GOODPUT.title.lower()}: each has an SLO of its own ({a.analysis.slo_words}); give "
            "--goodput to compare it"
        )
    cells = [{(c.arm, c.level) for c in each.cells if c.is_usable} for each in (a, b)]
    for arm, level in sorted(cells[0] ^ cells[1]):
        side = "A" if (arm, level) in cells[0] else "B"
        yield f"{arm}, {level}: measured in {side} alone"


def _cautions(a: Findings, b: Findings) -> Iterator[str]:
    for side, findings in (("A", a), ("B", b)):
        shares = [c.cpu.others_share for c in findings.cells if c.cpu.others_share is not None]
        loud = [share for share in shares if share > MOST_OTHERS_SHARE]
        if loud:
            yield (
                f"{side} had a busy machine: others used up to {max(loud):.0%} of it, and over "
                f"{MOST_OTHERS_SHARE:.0%} in {len(loud)} of {len(shares)} cells"
            )


def titles() -> dict[str, str]:
    """Of the metrics, short."""
    return {metric.key: metric.short for metric in METRICS}
