"""What is to befall transfers: the next ones fail, or are spoilt, or reach no peer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.sim.handoff.timeline import Timeline

CorruptionKind: TypeAlias = Literal["flip", "zero", "swap", "truncate", "repeat"]
"""What befalls a transfer: its last page, or its notification, which comes twice."""


class TransferFaults:
    """Faults that wait for a transfer to strike. `injected` counts what took effect in a run."""

    def __init__(self, timeline: Timeline) -> None:
        self.injected: Counter[str] = Counter()
        self.corruptions: list[CorruptionKind] = []
        self._timeline = timeline
        self._num_repeated = 0
        self._failing: Counter[str] = Counter()
        self._blocked_until: dict[tuple[str, str], float] = {}

    def block_transport(self, host: str, kind: str, for_s: float) -> None:
        """From one host, a transport reaches no peer for a while."""
        self._blocked_until[host, kind] = self._timeline.now_s + for_s

    def is_blocked(self, host: str, kind: str) -> bool:
        """Whether it does just now."""
        is_refused = self._blocked_until.get((host, kind), 0.0) > self._timeline.now_s
        self.injected["refused"] += is_refused
        return is_refused

    def fail_next_transfers(self, kind: str, count: int) -> None:
        """The next transfers over a transport fail."""
        self._failing[kind] += count

    def pop_failure(self, kind: str) -> bool:
        """Whether one fails that is under way."""
        if not self._failing[kind]:
            return False
        self._failing[kind] -= 1
        self.injected["failed transfer"] += 1
        return True

    def pop_repeats(self) -> int:
        """How many times more a notification comes."""
        num_repeated, self._num_repeated = self._num_repeated, 0
        return num_repeated

    def corrupt(self, source: NDArray[np.uint8], copies: PageCopies) -> None:
        """Bytes, uint8 `[num_pages, page_bytes]`, may not arrive as they left."""
        if not self.corruptions or not copies.groups:
            return
        how, victim = self.corruptions.pop(), int(copies.groups[-1].src_pages[-1])
        self.injected[f"corrupted: {how}"] += 1
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
