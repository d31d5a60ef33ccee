"""`baton top` against a real gateway: by textual's pilot, and on a pseudo-terminal as a process."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from textual.widgets import DataTable, Static

from baton.cli.main import run as main
from baton.clock import MachineClock
from baton.ops.gateway_pages import Gateway
from baton.ops.page_reader import open_pages
from baton.ops.top.screen import TopApp
from baton.ops.top.snapshot import FleetReader
from tests.integration.gateway_cluster import STREAM, run, until_true

TOP = (sys.executable, "-m", "baton.cli", "top")
TIMEOUT_S = 60
CLOSED = "http://127.0.0.1:1"


def environment(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color"}


def top(tmp_path, url, *arguments, **variables):
    return subprocess.run(
        [*TOP, "--gateway", url, *arguments],
        env={**environment(tmp_path), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


async def stream_once(cluster, request_id):
    async with cluster.post(STREAM, **{"x-request-id": request_id}) as response:
        assert response.status == 200
        await response.read()


def test_one_look_as_text_and_as_json(capsys):
    async def scenario(cluster):
        await stream_once(cluster, "request-1")

        async def look(how):
            assert await asyncio.to_thread(main, ["top", "--gateway", cluster.url, how]) == 0
            return capsys.readouterr().out

        text, snapshot = await look("--once"), json.loads(await look("--json"))
        assert "\x1b" not in text
        for expected in ("ready", "1 requests", "prefill-0", "decode-0", "request-1", "healthy"):
            assert expected in text
        assert snapshot["traffic"]["num_requests"] == 1
        assert snapshot["traffic"]["ttft"]["p50_s"] > 0
        assert snapshot["traffic"]["window_s"] is None
        assert [each["worker"] for each in snapshot["workers"]["workers"]] == [
            "prefill-0",
            "decode-0",
        ]
        assert snapshot["requests"]["requests"][0]["id"] == "request-1"

    run(scenario)


def test_the_management_key_is_shown_where_it_is_given(tmp_path, monkeypatch, capsys):
    key = tmp_path / "management.key"
    key.write_text("k" * 32)

    async def scenario(cluster):
        async def look():
            await asyncio.to_thread(main, ["top", "--gateway", cluster.url, "--json"])
            return json.loads(capsys.readouterr().out)

        refused = await look()
        assert refused["workers"] is None
        assert "HTTP 401" in refused["missing"]["/debug/workers"]
        monkeypatch.setenv("BATON_MANAGEMENT_KEY", "k" * 32)
        assert len((await look())["workers"]["workers"]) == 2

    run(scenario, management_key_file=str(key))


def test_no_gateway_no_terminal_and_no_textual(tmp_path, capsys):
    assert main(["top", "--gateway", CLOSED, "--once"]) == 1
    assert "NOT READY: http://127.0.0.1:1/ready" in capsys.readouterr().out
    assert main(["top", "--gateway", CLOSED, "--interval-s", "0"]) == 2
    on_a_file = top(tmp_path, CLOSED)
    assert on_a_file.returncode == 2
    assert "needs a terminal" in on_a_file.stderr
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError('textual')")
    without = top(tmp_path, CLOSED, PYTHONPATH=str(tmp_path))
    assert without.returncode == 2
    assert "pip install 'baton-kv[top]'" in without.stderr
    assert "Traceback" not in without.stderr


def rows_of(app, place):
    shown = app.query_one(f"#table-{place}", DataTable)
    return [[str(cell) for cell in shown.get_row_at(n)] for n in range(shown.row_count)]


def headline(app):
    return str(app.query_one("#headline", Static).content)


def test_the_screen_follows_the_fleet():
    async def scenario(cluster):
        gateway, clock = Gateway.at(cluster.url, "--gateway"), MachineClock()
        async with open_pages() as pages:
            app = TopApp(FleetReader(gateway, pages, clock), 0.05)
            async with app.run_test(size=(140, 50)) as pilot:
                assert [row[0] for row in rows_of(app, 1)] == ["prefill-0", "decode-0"]
                await stream_once(cluster, "request-1")

                async def is_shown():
                    await pilot.pause(0.02)
                    return [row[0] for row in rows_of(app, 5)] == ["request-1"]

                await until_true(is_shown)
                assert "1 requests" in headline(app)

                await pilot.press("2", "down")
                assert app.focused.id == "table-1"
                assert app.focused.cursor_row == 1
                await pilot.press("s")
                assert "by load" in str(app.query_one("#title-1", Static).content)
                assert app.focused.cursor_row in {0, 1}
                chosen = rows_of(app, 1)[app.focused.cursor_row][0]
                assert chosen == "decode-0", "the cursor stays with its row"

                await pilot.press("p")
                assert "PAUSED" in headline(app)
                await stream_once(cluster, "request-2")
                await pilot.pause(0.3)
                assert len(rows_of(app, 5)) == 1
                await pilot.press("r")

                async def is_refreshed():
                    await pilot.pause(0.02)
                    return len(rows_of(app, 5)) == 2

                await until_true(is_refreshed)
                await pilot.press("q")
            assert app.return_code == 0

    run(scenario)


def test_a_gateway_that_ends_leaves_what_was_seen_last():
    async def scenario(cluster):
        async with open_pages() as pages:
            reader = FleetReader(Gateway.at(cluster.url, "--gateway"), pages, MachineClock())
            app = TopApp(reader, 60.0)
            async with app.run_test(size=(140, 50)) as pilot:
                assert len(rows_of(app, 1)) == 2
                reader._gateway = Gateway.at(CLOSED, "--gateway")
                await pilot.press("r")

                async def is_noticed():
                    await pilot.pause(0.02)
                    return "NOT READY" in headline(app)

                await until_true(is_noticed)
                assert len(rows_of(app, 1)) == 2

    run(scenario)


class Terminal:
    """A process on a pseudo-terminal, and what it wrote there."""

    def __init__(self, command, env):
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (40, 120))
        self.before = termios.tcgetattr(theirs)
        self.theirs, self.written = theirs, b""
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )

    def read_until(self, text):
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.written:
            assert time.monotonic() < deadline, self.written[-2000:]
            self.read(0.1)

    def read(self, timeout_s):
        if select.select([self.ours], [], [], timeout_s)[0]:
            self.written += os.read(self.ours, 65536)

    def finish(self):
        """Read to the process's end; its exit status."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self.read(0.05)
        self.read(0.2)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


SHOWS_CURSOR = "25"


def assert_restored(terminal):
    """Every mode that was switched on is off again, the cursor is shown, lines are edited again."""
    modes = {}
    for found in re.finditer(rb"\x1b\[\?([\d;]+)([hl])", terminal.written):
        for number in found[1].decode().split(";"):
            modes[number] = found[2]
    assert "1049" in modes, "it never took the screen"
    assert modes.pop(SHOWS_CURSOR, b"h") == b"h"
    modes.pop("7", None)  # lines wrap: on is the usual state
    assert set(modes.values()) == {b"l"}, modes
    assert termios.tcgetattr(terminal.theirs) == terminal.before


FAILING = """
import sys
from baton.ops.top import screen
def fail(*_): raise RuntimeError("planted")
screen.TopApp._write_headline = fail
from baton.cli.main import run
sys.exit(run(["top", "--gateway", "http://127.0.0.1:1"]))
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, "error"])
def test_the_terminal_is_restored_however_it_ends(tmp_path, ending):
    command = [sys.executable, "-c", FAILING] if ending == "error" else [*TOP, "--gateway", CLOSED]
    terminal = Terminal(command, environment(tmp_path))
    try:
        terminal.read_until(b"\x1b[?1049h")
        if ending != "error":
            terminal.read_until(b"NOT READY")
            assert termios.tcgetattr(terminal.theirs) != terminal.before
        match ending:
            case signal.Signals():
                terminal.process.send_signal(ending)
        status = terminal.finish()
        assert_restored(terminal)
        match ending:
            case signal.Signals():
                assert status == 128 + ending
            case "error":
                assert status != 0
                assert b"planted" in terminal.written
    finally:
        terminal.close()
