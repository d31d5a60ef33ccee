"""What the person at the terminal sees: what is waited for, log lines, the address to use.

Progress and log lines go to standard error; the address to use goes to standard output.
"""

from __future__ import annotations

import asyncio
import http.client
import sys
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from baton.clock import Instant
from baton.errors import UNDECODABLE, PeerUnreachableError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Clock

REPEAT_S: Final = 5.0


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


REQUEST_TIMEOUT_S: Final = 2.0
ASK_AGAIN_S: Final = 0.1
UP_METRIC: Final = "baton_gateway_worker_up{"


class ModelEntry(msgspec.Struct, frozen=True):
    """One entry of OpenAI's model list, as far as it matters here."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """OpenAI's model list."""

    data: tuple[ModelEntry, ...]


async def until_all_up(url: str, metrics_url: str, num_workers: int) -> str:
    """Until the gateway has all its workers: the name of the model that they serve.

    `metrics_url` is where it answers /metrics: its own URL, or its management listener's.

    Raises:
        PeerUnreachableError: the gateway announced itself, but does not answer.
        ProtocolError: it serves no model although all workers are up.
    """
    while True:
        if count_up(await asyncio.to_thread(_get, metrics_url, "/metrics")) >= num_workers:
            return first_model(await asyncio.to_thread(_get, url, "/v1/models"))
        await asyncio.sleep(ASK_AGAIN_S)


def count_up(metrics: bytes) -> int:
    """How many workers are up by the gateway's metrics."""
    lines = metrics.decode(errors="replace").splitlines()
    return sum(line.startswith(UP_METRIC) and line.endswith(" 1.0") for line in lines)


def first_model(models: bytes) -> str:
    """The first name of a model list.

    Raises:
        ProtocolError: malformed or empty.
    """
    try:
        return msgspec.json.decode(models, type=ModelList).data[0].id
    except (IndexError, *UNDECODABLE) as exc:
        raise ProtocolError(f"the gateway's model list makes no sense: {models[:200]!r}") from exc


def _get(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as exc:
        raise PeerUnreachableError(f"the gateway at {url} does not answer {path}: {exc}") from exc
    finally:
        connection.close()
