"""What divisions of labour achieved, and which were tried and left, under which load.

Loads come and go: what was found out about one is still known when it comes back, and is not taken
to hold for another one. Two are alike if one has less than `ALIKE` times the requests at once of
the other, and prompts less than `ALIKE_PROMPTS` times as long. How long answers will be is not
known when a load begins.

Pure: times are given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from baton.router.demand import Achieved

KNOWN_FOR_S: Final = 120.0
RETRY_AFTER_S: Final = 60.0
MOST_RETRY_AFTER_S: Final = 3600.0
ALIKE: Final = 1.5
"""Numbers of requests at once, one over the other."""
ALIKE_PROMPTS: Final = 2.0
"""Mean tokens of prompts, the same."""
MOST_LOADS: Final = 8
"""Of which something is remembered, for each division."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Requests at once, and the mean tokens of their prompts."""

    num_at_once: float
    num_prompt_tokens: float

    def has_prompts_like(self, other: LoadShape) -> bool:
        """Whether the prompts of both are about as long."""
        return _are_alike(self.num_prompt_tokens, other.num_prompt_tokens, ALIKE_PROMPTS)

    def is_like(self, other: LoadShape) -> bool:
        """Whether the two are about the same load."""
        return _are_alike(self.num_at_once, other.num_at_once, ALIKE) and self.has_prompts_like(
            other
        )

    def is_at_least(self, other: LoadShape) -> bool:
        """Whether the two are about the same load, but that this may have more at once."""
        return other.num_at_once < ALIKE * self.num_at_once and self.has_prompts_like(other)


NO_LOAD: Final = LoadShape(0, 0)
"""Like no other."""


def _are_alike(one: float, other: float, most: float) -> bool:
    return one < most * other and other < most * one


@dataclass(frozen=True, slots=True)
class _Known:
    """What it achieved under such a load, and when that was."""

    achieved: Achieved
    load: LoadShape
    at: float


@dataclass(frozen=True, slots=True)
class _Refuted:
    """It is not tried for so long from `at` on, under such a load.

    `is_too_slow`: nor with more requests at once. It achieved `share` of what was predicted.
    """

    for_s: float
    load: LoadShape
    at: float
    is_too_slow: bool
    share: float

    def holds(self, load: LoadShape, now: float) -> bool:
        """Whether it is not to be tried now."""
        if now >= self.at + self.for_s:
            return False
        return load.is_at_least(self.load) if self.is_too_slow else load.is_like(self.load)


_Noted = TypeVar("_Noted", _Known, _Refuted)


def _note(noted: list[_Noted], new: _Noted) -> None:
    """In place of what was noted of such a load, or of the one that was seen longest ago."""
    noted[:] = [each for each in noted if not each.load.is_like(new.load)]
    noted.append(new)
    del noted[:-MOST_LOADS]


@dataclass(slots=True)
class DivisionMemory:
    """One model's, by number of prefill workers; the latest loads of each. Owner: one thread."""

    _known: defaultdict[int, list[_Known]] = field(default_factory=lambda: defaultdict(list))
    _refuted: defaultdict[int, list[_Refuted]] = field(default_factory=lambda: defaultdict(list))

    def note(self, num_prefill: int, achieved: Achieved, load: LoadShape, now: float) -> None:
        """This division achieved that just now."""
        _note(self._known[num_prefill], _Known(achieved, load, now))

    def find(self, num_prefill: int, load: LoadShape, now: float) -> Achieved | None:
        """What it achieved in the last `KNOWN_FOR_S`, under such a load."""
        for known in reversed(self._known[num_prefill]):
            if now - known.at <= KNOWN_FOR_S and known.load.is_like(load):
                return known.achieved
        return None

    def find_best(self, load: LoadShape, now: float) -> tuple[int, Achieved] | None:
        """The division with the most good requests a second under such a load, if any is known.

        Else under the load with as long prompts and the most requests at once below these: while
        one load follows another, clients of both are under way.
        """
        known = [
            (num_prefill, each)
            for num_prefill, noted in self._known.items()
            for each in noted
            if now - each.at <= KNOWN_FOR_S and load.is_at_least(each.load)
        ]
        if not known:
            return None
        _, nearest = max(known, key=lambda each: each[1].load.num_at_once)
        alike = [(num, each.achieved) for num, each in known if each.load.is_like(nearest.load)]
        return max(alike, key=lambda each: each[1].good)

    def refute(
        self,
        num_prefill: int,
        load: LoadShape,
        now: float,
        *,
        is_too_slow: bool = False,
        share: float = 1.0,
    ) -> None:
        """It was tried and left: not to be tried at such a load for a while, then twice as long.

        `is_too_slow`: nor with more requests at once. It achieved `share` of what was predicted.
        """
        noted = self._refuted[num_prefill]
        before = max((each.for_s for each in noted if each.load.is_like(load)), default=0.0)
        for_s = min(MOST_RETRY_AFTER_S, max(RETRY_AFTER_S, 2 * before))
        _note(noted, _Refuted(for_s, load, now, is_too_slow, share))

    def find_refuted(self, load: LoadShape, now: float) -> dict[int, float]:
        """The divisions that are not to be tried now, and the share that each achieved."""
        return {
            num_prefill: each.share
            for num_prefill, noted in self._refuted.items()
            for each in noted
            if each.holds(load, now)
        }
