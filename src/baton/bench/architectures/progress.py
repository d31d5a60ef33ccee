"""What the person sees meanwhile, on standard error: a live line, or plain ones elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from baton.bench.load.progress import Tally
    from baton.clock import Clock

LIVE_S: Final = 0.5


class BenchProgress:
    """Shows where a benchmark is until it is left; the terminal is then as before.

    Drawn by the client's own event loop, twice a second, as for `baton bench serve`.
    """

    def __init__(self, num_cells: int, clock: Clock) -> None:
        self._num_cells, self._clock, self._began = num_cells, clock, clock.now()
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._doing, self._num_done = "starting", 0
        self._tally: Tally | None = None
        self._bar: Progress | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(
                *columns, console=self._console, auto_refresh=False, transient=True
            )
            self._bar.add_task("starting", total=self._num_cells)
            self._bar.start()
            self._task = asyncio.create_task(self._draw(self._bar))
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

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(f"baton: {line}")

    def begin(self, doing: str, tally: Tally | None = None) -> None:
        """What is done now; a tally counts its requests."""
        self._doing, self._tally = doing, tally

    def finished(self, num_cells: int, words: str) -> None:
        """So many cells more are done, or given up."""
        self._num_done += num_cells
        self.say(f"[{self._num_done}/{self._num_cells}] {words}{self._left()}")

    def _left(self) -> str:
        num_left = self._num_cells - self._num_done
        if not num_left or not self._num_done:
            return ""
        left_s = (self._clock.now() - self._began) / self._num_done * num_left
        return f" · about {max(1, round(left_s / 60))} min left"

    async def _draw(self, bar: Progress) -> None:
        while True:
            await asyncio.sleep(LIVE_S)
            tally = "" if self._tally is None else f" · {self._tally.say()}"
            bar.update(
                bar.task_ids[0],
                description=f"{self._doing}{tally}",
                completed=self._num_done,
                refresh=True,
            )
