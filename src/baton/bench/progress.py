"""What a terminal shows while a benchmark runs, on standard error; plain lines elsewhere.

A link benchmark draws only between its measurements: a drawing thread would use a measured core.
A benchmark under load draws on the event loop of its load generator, twice a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import ProgressColumn

    from baton.bench.load.plan import LoadPlan
    from baton.bench.load.records import Phase, Record
    from baton.clock import Clock

REDRAW_S: Final = 0.5
PLAIN_S: Final = 10.0
NUM_LATEST: Final = 50


class StepProgress:
    """A bar of steps on a terminal; elsewhere a line for each stage."""

    def __init__(self, num_steps: int) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._stage = ""
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = _open_bar(columns, self._console, num_steps)

    def begin(self, stage: str) -> None:
        """A new stage begins."""
        self._stage = stage
        if self._bar is None:
            self._console.print(f"baton: {stage}")
        self.show("starting")

    def show(self, detail: str) -> None:
        """What the stage does now; too much for a log."""
        if self._bar is not None:
            text = f"{self._stage} · {detail}"
            self._bar.update(self._bar.task_ids[0], description=text, refresh=True)

    def advance(self, num_steps: int) -> None:
        """This many more steps are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=num_steps, refresh=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


@dataclass(frozen=True, slots=True)
class ProgressState:
    """One line: its text, and how many steps are done."""

    text: str
    num_done: int


@dataclass(frozen=True, slots=True)
class ProgressStyle:
    """The bar's columns on a terminal; `total` steps (None: unknown).

    `plain_s`: elsewhere, seconds from one plain line to the next (None: no lines).
    """

    columns: Sequence[ProgressColumn]
    total: int | None
    plain_s: float | None = None


class LiveLine:
    """Shows what `show` returns until it is left; the terminal is then as before."""

    def __init__(self, show: Callable[[], ProgressState], style: ProgressStyle) -> None:
        self._show, self._style = show, style
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        style = self._style
        if self._console.is_terminal:
            self._bar = _open_bar(style.columns, self._console, style.total)
            self._task = asyncio.create_task(self._draw(self._bar))
        elif style.plain_s is not None:
            self._task = asyncio.create_task(self._print_regularly(style.plain_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            if self._bar is not None:
                self._bar.stop()

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(f"baton: {line}")

    async def _draw(self, bar: Progress) -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            state = self._show()
            task = bar.task_ids[0]
            bar.update(task, description=state.text, completed=state.num_done, refresh=True)

    async def _print_regularly(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.print_line(self._show().text)


class RequestCounter:
    """See `Observer`: counts requests for a line of progress."""

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

    def describe(self) -> str:
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


def follow(counter: RequestCounter, plan: LoadPlan) -> LiveLine:
    """A live line of one run under load."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    style = ProgressStyle(columns, plan.limits.num_requests, PLAIN_S)
    return LiveLine(lambda: ProgressState(counter.describe(), counter.num_ended), style)


class CellProgress(LiveLine):
    """A live line of a benchmark of many cells, and a line for each cell that stays."""

    def __init__(self, num_cells: int, clock: Clock) -> None:
        self._num_cells, self._clock, self._began = num_cells, clock, clock.now()
        self._doing, self._num_done = "starting", 0
        self._counter: RequestCounter | None = None
        columns = (
            BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        super().__init__(self._state, ProgressStyle(columns, num_cells))

    def begin(self, doing: str, counter: RequestCounter | None = None) -> None:
        """What is done now; `counter` counts its requests."""
        self._doing, self._counter = doing, counter

    def finished(self, num_cells: int, text: str) -> None:
        """This many more cells are done, or given up."""
        self._num_done += num_cells
        self.print_line(f"[{self._num_done}/{self._num_cells}] {text}{self._time_left()}")

    def _time_left(self) -> str:
        num_left = self._num_cells - self._num_done
        if not num_left or not self._num_done:
            return ""
        left_s = (self._clock.now() - self._began) / self._num_done * num_left
        return f" · about {max(1, round(left_s / 60))} min left"

    def _state(self) -> ProgressState:
        counts = "" if self._counter is None else f" · {self._counter.describe()}"
        return ProgressState(f"{self._doing}{counts}", self._num_done)


def _open_bar(columns: Sequence[ProgressColumn], console: Console, total: int | None) -> Progress:
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
    bar.add_task("starting", total=total)
    bar.start()
    return bar
