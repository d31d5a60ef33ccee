"""Numbers → words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from baton.bench.comparing.statistics import Contrast

MOST_CHANCE: Final = 0.05
SAME_WITHIN: Final = 0.05

Judgement = Literal["better", "worse", "same", "undecided"]


def judge(contrast: Contrast, better: Literal["lower", "higher"]) -> Judgement:
    """Better or worse where interval and test say so; the same where the interval is narrow."""
    low, high = contrast.interval.low, contrast.interval.high
    if contrast.p_value <= MOST_CHANCE and not contrast.interval.holds(1.0):
        is_lower = contrast.ratio < 1
        return "better" if is_lower == (better == "lower") else "worse"
    if low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN:
        return "same"
    return "undecided"


def put_in_words(contrast: Contrast, judgement: Judgement) -> str:
    """One short sentence."""
    low, high = (_percent(each) for each in (contrast.interval.low, contrast.interval.high))
    match judgement:
        case "better" | "worse":
            basis = "" if contrast.test == "runs" else " in these runs"
            return f"B is {judgement}{basis}: {_percent(contrast.ratio)} ({low} to {high})"
        case "same":
            return f"the same, within {SAME_WITHIN:.0%} ({low} to {high})"
        case "undecided":
            return f"not decided: anything from {low} to {high}; measure longer or more often"


def is_worse_by(contrast: Contrast, judgement: Judgement, share: float) -> bool:
    """Whether B is certainly worse, and by more than a share of A."""
    return judgement == "worse" and abs(contrast.ratio - 1) > share


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
