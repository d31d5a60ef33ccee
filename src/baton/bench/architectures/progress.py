"""What the person sees meanwhile: where the benchmark is, and a line for each cell that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from baton.bench.live import LiveLine, Look, Shown

if TYPE_CHECKING:
    from types import TracebackType

    from baton.bench.load.progress import Tally
    from baton.clock import Clock


class BenchProgress:
    """Shows where a benchmark is until it is left."""

    def __init__(self, num_cells: int, clock: Clock) -> None:
        self._num_cells, self._clock, self._began = num_cells, clock, clock.now()
        self._doing, self._num_done = "starting", 0
        self._tally: Tally | None = None
        columns = (
            BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        self._line = LiveLine(self._show, Look(columns, num_cells))

    async def __aenter__(self) -> Self:
        await self._line.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self._line.__aexit__(kind, error, where)

    def say(self, line: str) -> None:
        """One line that stays."""
        self._line.say(line)

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

    def _show(self) -> Shown:
        tally = "" if self._tally is None else f" · {self._tally.say()}"
        return Shown(f"{self._doing}{tally}", self._num_done)
