"""Announcements, diagnoses, what the gateway says, and what is shown."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.clock import Instant
from baton.errors import ProtocolError
from baton.gateway.metrics import GatewayMetrics
from baton.launch.child import describe_exit, likely_cause
from baton.launch.gateways import find_model, find_requests, find_up
from baton.launch.logs import LogFolder
from baton.launch.progress import LoggedDisplay, PlainDisplay
from baton.protocol.worker_http import Role
from baton.telemetry.process_status import Draining, Loading, Ready, read_status


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b'{"event":"loading","url":"http://h:1","pid":3,"what":"x"}', Loading("http://h:1", "x")),
        (b'{"event":"loading"}', Loading()),
        (b'{"event":"loading","phase":"importing"}', Loading(phase="importing")),
        (
            b'{"event":"ready","url":"http://h:1","epoch":"e","handoff_address":"h:2"}',
            Ready("http://h:1", epoch="e", handoff_address="h:2"),
        ),
        (b'{"url":"http://h:1","event":"ready"}', Ready("http://h:1")),
        (b'{"event":"draining","timeout_s":3.0}', Draining(3.0)),
    ],
)
def test_announcements(line, status):
    assert read_status(line + b"\n") == status


@pytest.mark.parametrize("line", [b"", b"hello", b'{"event":"party"}', b'{"event":"ready"}', b"[]"])
def test_what_is_no_announcement_is_refused(line):
    with pytest.raises(ProtocolError, match="no status line"):
        read_status(line)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exit code 0"),
        (2, "exit code 2"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_exits_in_words(returncode, words):
    assert describe_exit(returncode) == words


@pytest.mark.parametrize(
    ("returncode", "lines", "cause"),
    [
        (1, ["OSError: Address already in use", "bye"], "--port"),
        (1, ["ModuleNotFoundError: No module named 'torch'"], "dependency is missing"),
        (1, ["RuntimeError: DefaultCPUAllocator: can't allocate memory: you"], "not enough memory"),
        (-9, [], "dmesg"),
        (-11, ["ok"], "native code"),
        (2, ["baton: engine.x"], "configuration was refused"),
        (1, ["strange"], "last lines"),
    ],
)
def test_causes(returncode, lines, cause):
    assert cause in likely_cause(returncode, lines)


METRICS = b"""\
# HELP baton_gateway_worker_up Whether
baton_gateway_worker_up{role="prefill",url="http://h:1"} 1.0
baton_gateway_worker_up{role="decode",url="http://h:2"} 0.0
baton_gateway_worker_up{role="decode",url="http://h:3"} 1.0
baton_other{x="y"} 1.0
"""


def test_the_gateways_metrics_say_who_is_up():
    assert find_up(METRICS) == {"http://h:1", "http://h:3"}


def test_the_metrics_read_here_are_those_that_the_gateway_writes():
    metrics = GatewayMetrics()
    metrics.worker_up("http://h:1", Role.PREFILL, up=True)
    metrics.worker_up("http://h:2", Role.DECODE, up=False)
    assert find_up(metrics.exposition()) == {"http://h:1"}


def test_requests_at_a_worker_are_those_of_both_parts():
    metrics = b"""\
baton_router_requests{model="m",part="prefill",worker="w-0"} 1.0
baton_router_requests{model="m",part="decode",worker="w-0"} 3.0
baton_router_requests{model="m",part="decode",worker="w-1"} nan
baton_other{worker="w-1"} 5.0
"""
    assert find_requests(metrics) == {"w-0": 4}


def test_the_models_name():
    metrics = GatewayMetrics()
    assert find_model(metrics.exposition()) is None
    metrics.preregister("demo, {7b}")
    assert find_model(metrics.exposition()) == "demo, {7b}"


class SteppedClock:
    def __init__(self):
        self.at = 0.0

    def now(self):
        return Instant(self.at)

    def unix_now(self):
        return self.at


def test_plain_progress_is_said_on_change_and_every_few_seconds(capsys):
    clock = SteppedClock()
    display = PlainDisplay(clock)
    for at, names in [(0, "ab"), (1, "ab"), (2, "b"), (6.9, "b"), (7, "b"), (8, ""), (9, "c")]:
        clock.at = at
        display.waiting_for(tuple(names))
    assert capsys.readouterr().err.splitlines() == [
        "baton: waiting for a, b (0 s)",
        "baton: waiting for b (2 s)",
        "baton: waiting for b (7 s)",
        "baton: waiting for c (0 s)",
    ]


def test_the_address_goes_to_standard_output_and_logs_do_not(capsys):
    display = PlainDisplay(SteppedClock())
    display.announce("http://here")
    display.child_line("decode-0", "a line")
    captured = capsys.readouterr()
    assert captured.out == "http://here\n"
    assert captured.err == "[decode-0] a line\n"


def test_a_launch_goes_on_without_its_terminal(tmp_path, monkeypatch):
    """Whoever reads a process's output must not end: the process would block."""
    display = LoggedDisplay(
        PlainDisplay(SteppedClock()), LogFolder(tmp_path), SteppedClock(), shows_children=True
    )
    full = Path("/dev/full").open("w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed below
    monkeypatch.setattr(sys, "stderr", full)
    display.child_line("decode-0", "a line")
    display.print_line("decode-0 ended")
    display.waiting_for(["decode-0"])
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert (tmp_path / "decode-0.log").read_text() == "a line\n"
    assert (tmp_path / "launcher.log").read_text() == "1970-01-01 00:00:00+00:00 decode-0 ended\n"


ANNOUNCING = """
import sys
from pathlib import Path
from baton.clock import MachineClock
from baton.launch.logs import LogFolder
from baton.launch.progress import LoggedDisplay, PlainDisplay

clock = MachineClock()
logs = LogFolder(Path(sys.argv[1]))
display = LoggedDisplay(PlainDisplay(clock), logs, clock, shows_children=True)
display.announce("http://here")
"""


def test_a_launch_goes_on_without_its_standard_output(tmp_path):
    """Until its end, too, at which Python writes what is left."""
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", ANNOUNCING, str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (tmp_path / "launcher.log").read_text().endswith(" http://here\n")
