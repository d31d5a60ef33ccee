"""What divisions of labour achieved, and which were tried and left, by number of requests at once.

Loads come and go: what was found out about one is still known when it comes back, and is not taken
to hold for another one. Two are alike if one has less than `ALIKE` times the requests of the other.

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
MOST_LOADS: Final = 8
"""Of which something is remembered, for each division."""


def are_alike(one: float, other: float) -> bool:
    """Whether so many requests at once are about the same load."""
    return one < ALIKE * other and other < ALIKE * one


@dataclass(frozen=True, slots=True)
class _Known:
    """What it achieved with so many at once, and when that was."""

    achieved: Achieved
    at_once: float
    at: float


@dataclass(frozen=True, slots=True)
class _Refuted:
    """It is not tried for so long from `at` on, with about so many requests at once.

    `is_too_slow`: nor with more of them. It achieved `share` of what was predicted.
    """

    for_s: float
    at_once: float
    at: float
    is_too_slow: bool
    share: float

    def holds(self, at_once: float, now: float) -> bool:
        """Whether it is not to be tried now."""
        if now >= self.at + self.for_s:
            return False
        return are_alike(self.at_once, min(at_once, self.at_once) if self.is_too_slow else at_once)


_Noted = TypeVar("_Noted", _Known, _Refuted)


def _note(noted: list[_Noted], new: _Noted) -> None:
    """In place of what was noted of such a load, or of the one that was seen longest ago."""
    noted[:] = [each for each in noted if not are_alike(each.at_once, new.at_once)]
    noted.append(new)
    del noted[:-MOST_LOADS]


@dataclass(slots=True)
class DivisionMemory:
    """One model's, by number of prefill workers; the latest loads of each. Owner: one thread."""

    _known: defaultdict[int, list[_Known]] = field(default_factory=lambda: defaultdict(list))
    _refuted: defaultdict[int, list[_Refuted]] = field(default_factory=lambda: defaultdict(list))

    def note(self, num_prefill: int, achieved: Achieved, at_once: float, now: float) -> None:
        """This division achieved that just now."""
        _note(self._known[num_prefill], _Known(achieved, at_once, now))

    def find(self, num_prefill: int, at_once: float, now: float) -> Achieved | None:
        """What it achieved in the last `KNOWN_FOR_S`, at about as many requests at once."""
        for known in reversed(self._known[num_prefill]):
            if now - known.at <= KNOWN_FOR_S and are_alike(known.at_once, at_once):
                return known.achieved
        return None

    def find_best(self, at_once: float, now: float) -> tuple[int, Achieved] | None:
        """The division with the most good requests a second of those that `find` finds."""
        best: tuple[int, Achieved] | None = None
        for num_prefill in list(self._known):
            found = self.find(num_prefill, at_once, now)
            if found is not None and (best is None or found.good > best[1].good):
                best = num_prefill, found
        return best

    def refute(
        self,
        num_prefill: int,
        at_once: float,
        now: float,
        *,
        is_too_slow: bool = False,
        share: float = 1.0,
    ) -> None:
        """It was tried and left: not to be tried at such a load for a while, then twice as long.

        `is_too_slow`: nor at a higher one. `share` of what was predicted is what it achieved.
        """
        noted = self._refuted[num_prefill]
        before = max(
            (each.for_s for each in noted if are_alike(each.at_once, at_once)), default=0.0
        )
        for_s = min(MOST_RETRY_AFTER_S, max(RETRY_AFTER_S, 2 * before))
        _note(noted, _Refuted(for_s, at_once, now, is_too_slow, share))

    def find_refuted(self, at_once: float, now: float) -> dict[int, float]:
        """The divisions that are not to be tried now, and the share that each achieved."""
        return {
            num_prefill: each.share
            for num_prefill, noted in self._refuted.items()
            for each in noted
            if each.holds(at_once, now)
        }
