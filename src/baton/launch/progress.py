"""What the person at the terminal sees: what is waited for, log lines, the address to use.

Progress and log lines go to standard error; the address to use goes to standard output.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Console

from baton.clock import Clock, Instant
from baton.launch.logs import LAUNCHER, LogFolder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

REPEAT_S: Final = 5.0
TICK_S: Final = 0.25


class Display(Protocol):
    """Where a launch is shown. Owned by the launcher's event loop."""

    def print_line(self, line: str) -> None:
        """One line of the launcher's own."""
        ...

    def child_line(self, child: str, line: str) -> None:
        """One line that a child wrote."""
        ...

    def waiting_for(self, names: Sequence[str]) -> None:
        """What is waited for now; called often. Empty: nothing any more."""
        ...

    def announce(self, text: str) -> None:
        """What the person wanted: on standard output."""
        ...


def open_display(clock: Clock) -> Display:
    """A live line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    return TerminalDisplay(console, clock) if console.is_terminal else PlainDisplay(clock)


class PlainDisplay:
    """Plain lines: one when what is waited for changes, and again every few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()
        self._shown: tuple[str, ...] = ()
        self._shown_at = Instant(float("-inf"))

    def print_line(self, line: str) -> None:
        """See `Display`."""
        print(f"baton: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the terminal is its job

    def child_line(self, child: str, line: str) -> None:
        """See `Display`."""
        print(f"[{child}] {line}", file=sys.stderr, flush=True)  # noqa: T201

    def waiting_for(self, names: Sequence[str]) -> None:
        """See `Display`."""
        now = self._clock.now()
        if not self._shown:
            self._since = now
        if names and (tuple(names) != self._shown or now - self._shown_at >= REPEAT_S):
            self.print_line(_waiting_text(names, now - self._since))
            self._shown_at = now
        self._shown = tuple(names)

    def announce(self, text: str) -> None:
        """See `Display`."""
        print(text, flush=True)  # noqa: T201


class TerminalDisplay:
    """One live line at the bottom; other lines scroll above it."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._since: Instant | None = None
        self._status = console.status("")

    def print_line(self, line: str) -> None:
        """See `Display`."""
        self._console.print(f"baton: {line}", style="bold")

    def child_line(self, child: str, line: str) -> None:
        """See `Display`."""
        self._console.print(f"[{child}] {line}", style="dim")

    def waiting_for(self, names: Sequence[str]) -> None:
        """See `Display`."""
        if not names:
            self._status.stop()
            self._since = None
            return
        now = self._clock.now()
        self._since = self._since or now
        self._status.update(_waiting_text(names, now - self._since))
        self._status.start()

    def announce(self, text: str) -> None:
        """See `Display`."""
        print(text, flush=True)  # noqa: T201


def _waiting_text(names: Sequence[str], elapsed_s: float) -> str:
    return f"waiting for {', '.join(names)} ({elapsed_s:.0f} s)"


@asynccontextmanager
async def showing(display: Display, pending: Callable[[], list[str]]) -> AsyncGenerator[None]:
    """Show what is waited for, as long as the block runs."""

    async def show() -> None:
        while True:
            display.waiting_for(pending())
            await asyncio.sleep(TICK_S)

    ticker = asyncio.create_task(show())
    try:
        yield
    finally:
        ticker.cancel()
        display.waiting_for(())


class LoggedDisplay:
    """See `Display`: the lines also go to log files, and after `leave_terminal` only there.

    `shows_children`: whether the lines of processes are shown as well. As a full disk does
    (`LogFile`), a terminal that is gone costs lines, not the launch.
    """

    def __init__(
        self, shown: Display, logs: LogFolder, clock: Clock, *, shows_children: bool
    ) -> None:
        self._shown: Display | None = shown
        self._logs, self._clock, self._shows_children = logs, clock, shows_children

    def print_line(self, line: str) -> None:
        """See `Display`."""
        self._log(line)
        if self._shown is not None:
            with suppress(OSError):
                self._shown.print_line(line)

    def child_line(self, child: str, line: str) -> None:
        """See `Display`."""
        self._logs.write_line(child, line)
        if self._shown is not None and self._shows_children:
            with suppress(OSError):
                self._shown.child_line(child, line)

    def waiting_for(self, names: Sequence[str]) -> None:
        """See `Display`."""
        if self._shown is not None:
            with suppress(OSError):
                self._shown.waiting_for(names)

    def announce(self, text: str) -> None:
        """See `Display`."""
        self._log(text)
        if self._shown is not None:
            try:
                self._shown.announce(text)
            except OSError:  # what is left of it would fail again at this process's end
                _drop_standard_output()

    def leave_terminal(self) -> None:
        """Show nothing more; standard error goes to the launcher's log, standard output nowhere."""
        self._shown = None
        self._logs.file(LAUNCHER).take_standard_error()
        _drop_standard_output()

    def _log(self, text: str) -> None:
        at = datetime.fromtimestamp(self._clock.unix_now(), UTC).isoformat(" ", "seconds")
        self._logs.write_line(LAUNCHER, f"{at} {text}")


def _drop_standard_output() -> None:
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
