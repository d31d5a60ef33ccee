"""What the person sees while it is measured: on standard error, and only between measurements."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Where a measurement shows how far it is."""

    def begin(self, what: str) -> None:
        """An entrant's turn in a round."""
        ...

    def show(self, detail: str) -> None:
        """A workload's turn."""
        ...

    def advance(self, num_steps: int) -> None:
        """So many workloads are done."""
        ...

    def end(self) -> None:
        """Clear away what is live."""
        ...


def open_progress(num_steps: int) -> Progress:
    """A live line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    return TerminalProgress(console, num_steps) if console.is_terminal else PlainProgress(console)


class PlainProgress:
    """See `Progress`: a line for each entrant."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, what: str) -> None:
        """See `Progress`."""
        self._console.print(f"baton: {what}")

    def show(self, detail: str) -> None:
        """See `Progress`: too much for a log."""

    def advance(self, num_steps: int) -> None:
        """See `Progress`."""

    def end(self) -> None:
        """See `Progress`."""


class TerminalProgress:
    """See `Progress`. Nothing is drawn meanwhile: a drawing thread would take a measured core."""

    def __init__(self, console: Console, num_steps: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("starting", total=num_steps)
        self._what = ""
        self._bar.start()

    def begin(self, what: str) -> None:
        """See `Progress`."""
        self._what = what
        self.show("starting")

    def show(self, detail: str) -> None:
        """See `Progress`."""
        self._bar.update(self._task, description=f"{self._what} · {detail}", refresh=True)

    def advance(self, num_steps: int) -> None:
        """See `Progress`."""
        self._bar.update(self._task, advance=num_steps, refresh=True)

    def end(self) -> None:
        """See `Progress`."""
        self._bar.stop()
