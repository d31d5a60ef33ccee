"""Snapshots on the whole terminal, a new one each second. Imports textual.

The terminal is restored however this ends: by a key, a signal that can be handled, or an error.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text

from baton.errors import ConfigError
from baton.ops.page_reader import open_pages
from baton.ops.top.snapshot import FleetReader, FleetSnapshot
from baton.ops.top.tables import WORKER_SORTS, Column, TopTable, describe_traffic, make_tables

try:
    from textual.app import App
    from textual.binding import Binding
    from textual.containers import VerticalScroll
    from textual.widgets import DataTable, Footer, Static
except ModuleNotFoundError as exc:
    raise ConfigError(
        "baton top needs textual: pip install 'baton-kv[top]'; without it, `baton top --once` "
        "prints the same once"
    ) from exc

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from baton.clock import Clock
    from baton.ops.gateway_pages import Gateway

NUM_TABLES: Final = 6
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALLED: Final = 128
"""A shell's exit status of a process that a signal ended is this plus the signal."""


async def show_fleet(gateway: Gateway, clock: Clock, interval_s: float) -> int:
    """Show a fleet until a key or a signal ends it; the exit status."""
    async with open_pages() as pages:
        app = TopApp(FleetReader(gateway, pages, clock), interval_s)
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, app.end_by_signal, number)
        try:
            await app.run_async()
        finally:
            for number in ENDING:
                loop.remove_signal_handler(number)
        return app.return_code or 0


class TopApp(App[None]):
    """Owner: the event loop's thread."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { padding: 0 1; }
    #tables { padding: 0 1; }
    .title { text-style: bold; margin-top: 1; }
    DataTable { height: auto; max-height: 14; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p", "pause", "pause"),
        Binding("r", "refresh_now", "refresh"),
        Binding("s", "sort", "sort workers"),
        *(Binding(str(n + 1), f"focus_table({n})", show=False) for n in range(NUM_TABLES)),
    ]

    def __init__(self, reader: FleetReader, interval_s: float) -> None:
        super().__init__()
        self._reader, self._interval_s = reader, interval_s
        self._is_paused, self._sort = False, 0
        self._reading = asyncio.Lock()
        self._snapshot: FleetSnapshot | None = None
        self._shown: list[TopTable | None] = [None] * NUM_TABLES

    def compose(self) -> ComposeResult:
        """See `App`."""
        yield Static(f"asking {self.title} …", id="headline", markup=False)
        with VerticalScroll(id="tables", can_focus=False):
            for place in range(NUM_TABLES):
                yield Static("", id=f"title-{place}", classes="title", markup=False)
                yield DataTable[Text](id=f"table-{place}", cursor_type="row")
        yield Footer()

    async def on_mount(self) -> None:
        """See `App`."""
        self.set_interval(self._interval_s, self._refresh_unless_paused)
        await self.action_refresh_now()

    def end_by_signal(self, number: signal.Signals) -> None:
        """End, and restore the terminal."""
        self.exit(return_code=SIGNALLED + number)

    async def action_refresh_now(self) -> None:
        """Take a snapshot, unless one is being taken."""
        if self._reading.locked():
            return
        async with self._reading:
            snapshot = await self._reader.take()
        # What was seen last stays, where nothing answers any more; the headline has the reason.
        if snapshot.is_answered or self._snapshot is None:
            self._snapshot = snapshot
        self._write_headline(snapshot)
        self._write_tables()

    def action_pause(self) -> None:
        """Take no snapshots, or take them again."""
        self._is_paused = not self._is_paused
        if self._snapshot is not None:
            self._write_headline(self._snapshot)

    def action_sort(self) -> None:
        """Sort workers in the next way."""
        self._sort = (self._sort + 1) % len(WORKER_SORTS)
        self._write_tables()

    def action_focus_table(self, place: int) -> None:
        """Let keys move in one table."""
        self.query_one(f"#table-{place}").focus()

    async def _refresh_unless_paused(self) -> None:
        if not self._is_paused:
            await self.action_refresh_now()

    def _write_headline(self, snapshot: FleetSnapshot) -> None:
        lines = describe_traffic(snapshot)
        state = "  PAUSED" if self._is_paused else ""
        self.query_one("#headline", Static).update(
            Text(f"{lines[0]}{state}\n" + "\n".join(lines[1:]))
        )

    def _write_tables(self) -> None:
        if self._snapshot is None:
            return
        for place, table in enumerate(make_tables(self._snapshot, self._sort)):
            title = self.query_one(f"#title-{place}", Static)
            title.update(Text(table.title if table.rows else f"{table.title}  {table.note}"))
            shown = self.query_one(f"#table-{place}", DataTable)
            shown.display = bool(table.rows)
            _fill(shown, self._shown[place], table)
            self._shown[place] = table


def _fill(shown: DataTable[Text], before: TopTable | None, table: TopTable) -> None:
    """Change what differs, so that the cursor stays where it is."""
    if before is None:
        for column in table.columns:
            shown.add_column(column.title, key=column.title)
    if before is None or list(before.rows) != list(table.rows):
        _replace_rows(shown, before, table)
        return
    for key, row in table.rows.items():
        for column, old, new in zip(table.columns, before.rows[key], row, strict=True):
            if old != new:
                shown.update_cell(key, column.title, _cell(column, new), update_width=True)


def _replace_rows(shown: DataTable[Text], before: TopTable | None, table: TopTable) -> None:
    keys = list(before.rows) if before is not None else []
    chosen = keys[shown.cursor_row] if shown.cursor_row < len(keys) else None
    shown.clear()
    for key, row in table.rows.items():
        cells = (_cell(column, text) for column, text in zip(table.columns, row, strict=True))
        shown.add_row(*cells, key=key)
    if chosen is not None and chosen in table.rows:
        shown.move_cursor(row=shown.get_row_index(chosen))


def _cell(column: Column, text: str) -> Text:
    return Text(text, justify="right" if column.is_figure else "left")
