"""A live line on standard error while something runs; plain lines now and then elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rich.progress import ProgressColumn

LIVE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Shown:
    """How far it is, and what is going on."""

    words: str
    num_done: int


@dataclass(frozen=True, slots=True)
class Look:
    """The line's columns on a terminal; `total` steps (None: nobody knows).

    `plain_s`: elsewhere, seconds from one plain line to the next (None: none at all).
    """

    columns: Sequence[ProgressColumn]
    total: int | None
    plain_s: float | None = None


class LiveLine:
    """Shows what `show` says until it is left; the terminal is then as before, however it ends.

    Drawn by the caller's own event loop, twice a second: of a load generator, its cost is in the
    client's lag.
    """

    def __init__(self, show: Callable[[], Shown], look: Look) -> None:
        self._show, self._look = show, look
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                *self._look.columns, console=self._console, auto_refresh=False, transient=True
            )
            self._bar.add_task("starting", total=self._look.total)
            self._bar.start()
            self._task = asyncio.create_task(self._draw(self._bar))
        elif self._look.plain_s is not None:
            self._task = asyncio.create_task(self._report(self._look.plain_s))
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

    async def _draw(self, bar: Progress) -> None:
        while True:
            await asyncio.sleep(LIVE_S)
            shown = self._show()
            bar.update(
                bar.task_ids[0], description=shown.words, completed=shown.num_done, refresh=True
            )

    async def _report(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.say(self._show().words)
