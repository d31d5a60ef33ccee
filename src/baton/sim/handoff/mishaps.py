"""What is to befall transfers: the next ones fail, or are spoilt, or reach nobody."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.sim.handoff.timeline import Timeline

SpoilHow: TypeAlias = Literal["flip", "zero", "swap", "truncate", "repeat"]
"""What befalls a transfer: its last page, or its notice, which comes twice."""


class Mishaps:
    """Faults that wait for a transfer to strike. `met` counts what took effect in a run."""

    def __init__(self, timeline: Timeline) -> None:
        self.met: Counter[str] = Counter()
        self.spoils: list[SpoilHow] = []
        self._timeline = timeline
        self._num_repeated = 0
        self._failing: Counter[str] = Counter()
        self._refusing: dict[tuple[str, str], float] = {}

    def refuse(self, host: str, kind: str, for_s: float) -> None:
        """From one host, a transport reaches nobody for a while."""
        self._refusing[host, kind] = self._timeline.now_s + for_s

    def refuses(self, host: str, kind: str) -> bool:
        """Whether it does just now."""
        is_refused = self._refusing.get((host, kind), 0.0) > self._timeline.now_s
        self.met["refused"] += is_refused
        return is_refused

    def fail_some(self, kind: str, count: int) -> None:
        """The next transfers over a transport fail."""
        self._failing[kind] += count

    def fails_next(self, kind: str) -> bool:
        """Whether one fails that is under way."""
        if not self._failing[kind]:
            return False
        self._failing[kind] -= 1
        self.met["failed transfer"] += 1
        return True

    def take_repeats(self) -> int:
        """How many times more a notice comes."""
        num_repeated, self._num_repeated = self._num_repeated, 0
        return num_repeated

    def spoil(self, source: NDArray[np.uint8], copies: PageCopies) -> None:
        """Bytes, uint8 `[num_pages, page_bytes]`, may not arrive as they left."""
        if not self.spoils or not copies.groups:
            return
        how, victim = self.spoils.pop(), int(copies.groups[-1].src_pages[-1])
        self.met[f"spoilt: {how}"] += 1
        match how:
            case "flip":
                source[victim] ^= 1
            case "zero":
                source[victim] = 0
            case "swap":
                source[victim] = source[(victim + 1) % len(source)].copy() ^ 3
            case "truncate":
                source[victim, source.shape[1] // 2 :] = 0
            case "repeat":
                self._num_repeated += 1
            case _:
                assert_never(how)
