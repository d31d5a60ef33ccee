"""Stop strings: find the first one to be completed, and never emit a part of it.

The answer does not depend on how its text was cut into pieces: the stop string that ends first
wins, and of several that end together the one that starts first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Passed:
    """Text that is certainly not part of a stop string; the rest is held back."""

    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was completed; `text` is what stands before it."""

    text: str


class StopStrings:
    """Watches one answer's text for stop strings; none at all lets everything pass."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Passed | Stopped:
        """Add text; what may be emitted of all that was held back so far."""
        if not self._stops:
            return Passed(text)
        buffer = self._held + text
        start = self._first_completed(buffer)
        if start is not None:
            self._held = ""
            return Stopped(buffer[:start])
        cut = len(buffer) - self._num_suspect(buffer)
        self._held = buffer[cut:]
        return Passed(buffer[:cut])

    def flush(self) -> str:
        """What is held back, when nothing more will come or stops do not count yet."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, buffer: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _num_suspect(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
