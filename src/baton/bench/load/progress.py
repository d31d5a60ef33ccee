"""What the person sees of one run meanwhile: its requests, counted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from baton.bench.live import LiveLine, Look, Shown

if TYPE_CHECKING:
    from baton.bench.load.plan import LoadPlan
    from baton.bench.load.record import Phase, Record

PLAIN_S: Final = 10.0
NUM_LATEST: Final = 50


class Tally:
    """See `Observer`: counts, for a line of progress."""

    def __init__(self) -> None:
        self.num_sent = self.num_ended = self.num_failed = self.num_tokens = 0
        self.phase: Phase = "warm-up"
        self._latest: deque[float] = deque(maxlen=NUM_LATEST)

    def sent(self, phase: Phase) -> None:
        """See `Observer`."""
        if phase != self.phase:
            self.num_sent = self.num_ended = self.num_failed = self.num_tokens = 0
            self.phase = phase
        self.num_sent += 1

    def ended(self, record: Record) -> None:
        """See `Observer`."""
        self.num_ended += 1
        self.num_failed += record.failure is not None
        self.num_tokens += record.num_output_tokens
        if record.ttft_s is not None:
            self._latest.append(record.ttft_s)

    def say(self) -> str:
        """One line."""
        ttft = ""
        if self._latest:
            middle_s = sorted(self._latest)[len(self._latest) // 2]
            ttft = f" · TTFT {middle_s * 1e3:,.0f} ms"
        failed = f" · {self.num_failed} FAILED" if self.num_failed else ""
        return (
            f"{self.phase}: {self.num_ended} done · {self.num_sent - self.num_ended} under way"
            f"{failed} · {self.num_tokens:,} tokens{ttft}"
        )


def follow(tally: Tally, plan: LoadPlan) -> LiveLine:
    """A live line of one run."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    look = Look(columns, plan.limits.num_requests, PLAIN_S)
    return LiveLine(lambda: Shown(tally.say(), tally.num_ended), look)
