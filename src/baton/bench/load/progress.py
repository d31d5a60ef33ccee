"""What the person sees meanwhile, on standard error: a live line, or a plain one now and then."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from baton.bench.load.plan import LoadPlan
    from baton.bench.load.record import Phase, Record

LIVE_S: Final = 0.5
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


class LiveProgress:
    """Shows a tally until it is left; the terminal is then as before, however that happens.

    Drawn by the client's own event loop, twice a second: its cost is in the client's lag.
    """

    def __init__(self, tally: Tally, plan: LoadPlan) -> None:
        self._tally = tally
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._total = plan.limits.num_requests
        self._bar: Progress | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(
                *columns, console=self._console, auto_refresh=False, transient=True
            )
            self._bar.add_task("starting", total=self._total)
            self._bar.start()
        self._task = asyncio.create_task(self._draw())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            if self._bar is not None:
                self._bar.stop()

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(PLAIN_S if self._bar is None else LIVE_S)
            if self._bar is None:
                self._console.print(f"baton: {self._tally.say()}")
                continue
            self._bar.update(
                self._bar.task_ids[0],
                description=self._tally.say(),
                completed=self._tally.num_ended,
                refresh=True,
            )
