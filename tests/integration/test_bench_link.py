"""`baton bench link` as a new user runs it: small, with real processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec
import pytest

from baton.bench.link import runner
from baton.bench.link.report import Report
from baton.cli.main import run as run_here
from benchmarks import transport_choice_model
from benchmarks.transport_choice_model import ChoiceReport
from tests import forking_launcher
from tests.forked_module import run_forked
from tests.preloaded import TORCH, PreloadedProcess

if TYPE_CHECKING:
    from collections.abc import Generator

LINK = [sys.executable, "-m", "baton.cli", "bench", "link"]
CHOICE = [
    sys.executable,
    str(Path(transport_choice_model.__file__).with_name("transport_choice.py")),
]
FORKING = [sys.executable, "-m", forking_launcher.__name__, "bench", "link"]
"""The same, whose processes import nothing; one test starts it as a user does."""
QUICK = ["--quick", "--sizes", "5000,100KB"]
SMALL = ["--quick", "--sizes", "5000"]
PEERS = ("NIXL", "gloo", "socket")
MEASURED = ("memcpy", "tuned socket", "shared", "tcp")
TIMEOUT_S = 280  # a bound: other tests take the cores meanwhile


def environment_of(directory):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    return kept | {"XDG_STATE_HOME": str(directory)}


@pytest.fixture
def environment(tmp_path):
    return environment_of(tmp_path)


def run(arguments, environment, program=LINK):
    return subprocess.run(
        [*program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def measure(arguments, environment):
    ended = run([*arguments, "--json"], environment)
    assert ended.returncode == 0, ended.stderr + ended.stdout[-2000:]
    return msgspec.json.decode(ended.stdout, type=Report)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two processes of this host: two transports, and one that cannot be built."""
    asked = [word for kind in ("shared", "tcp", "file") for word in ("--transport", kind)]
    environment = environment_of(tmp_path_factory.mktemp("state"))
    ended = run_forked([*FORKING, *QUICK, *asked, "--json"], environment, TIMEOUT_S)
    assert ended.returncode == 1, ended.stderr + ended.stdout[-2000:]  # `file` was asked for
    return msgspec.json.decode(ended.stdout, type=Report)


def find_children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@contextmanager
def listening(environment) -> Generator[str]:
    words = ["bench", "link", "--listen", "127.0.0.1:0"]
    read, write = os.pipe()
    with os.fdopen(read) as said, os.fdopen(write, "wb") as stderr:
        process = PreloadedProcess(TORCH, forking_launcher.__name__, words, environment, stderr)
        stderr.close()
        try:
            reported = said.readline()
            assert "listening on" in reported
            yield reported.split("listening on ")[1].split(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(TIMEOUT_S) == 130
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(TIMEOUT_S)
                process.stdout.close()


def test_two_processes_of_this_host_are_measured_and_their_bytes_verified(measured):
    report = measured
    assert not report.is_partial
    rows = {
        (row.name, row.workload.shape, row.workload.num_bytes, row.direction) for row in report.rows
    }
    for shape, num_bytes in (("message", 5000), ("message", 100_000), ("scattered", 32 << 20)):
        for name, direction in (
            ("memcpy", "push"),
            ("tuned socket", "push"),
            ("shared", "push"),
            ("shared", "pull"),
            ("tcp", "push"),
        ):
            assert (name, shape, num_bytes, direction) in rows
    for row in (row for row in report.rows if row.name in MEASURED):
        assert row.is_verified
        assert row.figures.gb_per_s.median > 0
        assert row.figures.p50_us <= row.figures.p99_us
        limit = "memcpy" if row.name in {"shared", "memcpy"} else "tuned socket"
        assert row.limit == limit
        if row.workload.shape != "descriptors":
            assert row.percent_of_limit is not None
    assert [
        (row.name, row.workload.shape, row.workload.num_bytes)
        for row in report.by_reference
        if row.name == "shared"
    ] == [
        ("shared", "message", 5000),
        ("shared", "message", 100_000),
        ("shared", "scattered", 32 << 20),
    ]
    for row in report.by_reference:
        assert row.is_verified
        assert 0 < row.latency.p50_us <= row.latency.p99_us
    assert report.manifest.driver is not None
    assert report.manifest.driver == report.manifest.owner or report.manifest.owner is not None


@pytest.mark.every  # some twenty processes, each of which loads a library
def test_peers_are_rows_or_are_skipped_with_a_reason(environment):
    kinds = [word for kind in ("shared", "tcp") for word in ("--transport", kind)]
    report = measure([*SMALL, *kinds, "--peers"], environment)
    assert {row.name for row in report.rows} >= {"shared reused", "tcp reused"}
    peers = {row.name for row in report.rows if row.kind == "peer"}
    skipped = {each.name: each.reason for each in report.skipped if each.kind == "peer"}
    named = peers | skipped.keys()
    assert named >= {"NIXL", "NIXL (TCP)", "Mooncake", "gloo", "socket"}
    assert "socket" in peers
    assert all("install" in reason or "load" in reason for reason in skipped.values()), skipped


@pytest.fixture
def without_libraries(environment, tmp_path):
    """An environment whose processes find none of the libraries that take seconds to start."""
    for name in ("nixl_cu12", "nixl_cu13", "mooncake"):
        (tmp_path / f"{name}.py").write_text("raise ImportError", "utf-8")
    return environment | {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def ask_here(monkeypatch, capsys):
    """`baton bench link` in this process, where the ends are others: exit code, and what it said.

    Of peers, each of which starts two processes: one that needs a library, one host, and neither.
    """
    monkeypatch.setattr(runner, "PEERS", [e for e in runner.PEERS if e.name in PEERS])
    handler = signal.getsignal(signal.SIGTERM)

    def ask(arguments, environment):
        with patch.dict(os.environ, environment, clear=True):
            code = run_here(["bench", "link", *arguments])
        return code, *capsys.readouterr()

    yield ask
    signal.signal(signal.SIGTERM, handler)


def test_two_listening_ends(without_libraries, ask_here):
    environment = without_libraries
    arguments = [*SMALL, "--transport", "tcp", "--peers", "--json"]
    with listening(environment) as driver, listening(environment) as owner:
        code, printed, said = ask_here([driver, owner, *arguments], environment)
        assert code == 0, said
        report = msgspec.json.decode(printed, type=Report)
        assert {row.name for row in report.rows} >= {"tcp", "tcp reused", "socket", "memcpy"}
        reasons = {skipped.name: skipped.reason for skipped in report.skipped}
        assert "one host" in reasons["gloo"]
        assert "not installed: pip install" in reasons["NIXL"]

        stranger = environment | {"BATON_CLUSTER_KEY": secrets.token_hex(32)}
        code, _, said = ask_here([driver, owner, *QUICK], stranger)
        assert code == 1
        assert "BATON_CLUSTER_KEY" in said

        code, _, said = ask_here(["--listen", driver], environment)
        assert code == 2
        assert "is taken by pid" in said
    code, _, said = ask_here([driver, owner, *QUICK], environment)
    assert code == 2
    assert f"baton bench link --listen {driver}" in said


@pytest.mark.parametrize(
    "number",  # one handler for both
    [pytest.param(signal.SIGINT, marks=pytest.mark.every), signal.SIGTERM],
)
def test_a_signal_that_ends_it_keeps_what_was_measured_and_leaves_no_process(environment, number):
    arguments = ["--sizes", "4096", "--quick", "--rounds", "1000", "--transport", "shared"]
    process = subprocess.Popen(
        [*LINK, *arguments, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "round 2: " in line:
            break
    children = wait_for_children(process.pid)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    report = json.loads(stdout)
    assert report["is_partial"] is True
    assert any(row["name"] == "shared" for row in report["rows"])
    deadline = time.monotonic() + 60  # the last ones end when they see that their parent has ended
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.01)


def wait_for_children(pid):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if children := find_children(pid):
            return children
        time.sleep(0.01)
    raise AssertionError("it started no process")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--transport", "warp"], "unknown baton.transports 'warp'; installed: "),
        (["--sizes", "3 potatoes"], "no message size"),
        (["--rounds", "0"], "--rounds: at least 1"),
        (["127.0.0.1:7100"], "two ends are needed"),
        (["here", "there"], "no HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "no HOST:PORT"),
        (["--listen", "192.0.2.1:7100"], "needs a cluster key"),
        (["--listen", "127.0.0.1:0", "a:1"], "takes no A and B"),
        (["--plot", "/nowhere/x.png"], "there is no directory /nowhere"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(
    arguments, reported, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_CLUSTER_KEY", raising=False)
    assert run_here(["bench", "link", *arguments]) == 2
    printed = capsys.readouterr()
    assert reported in printed.err
    assert not printed.out


def test_a_transport_that_cannot_be_built_is_skipped_with_the_reason(measured):
    skipped = {each.name: each.reason for each in measured.skipped if each.kind == "transport"}
    assert skipped.keys() == {"file"}
    assert "missing required field `directory`" in skipped["file"]


@pytest.mark.every
def test_the_choice_is_measured_between_two_agents_and_all_transports(environment):
    asked = ["--quick", "--sizes", "4096,256KiB", "--rounds", "1", "--json"]
    ended = run([*asked, "--transport", "shared", "--transport", "tcp"], environment, CHOICE)
    assert ended.returncode == 0, ended.stderr
    report = msgspec.json.decode(ended.stdout, type=ChoiceReport)
    assert not report.skipped
    assert {(each.direction, each.link.transport) for each in report.links} == {
        (direction, kind) for direction in ("push", "pull") for kind in ("shared", "tcp")
    }
    assert all(each.link.num_probes for each in report.links)  # a busy machine has time for few
    for cell in report.cells:
        assert set(cell.median_s) == {"shared", "tcp"}
        assert len(cell.surveyed) == 1
    shapes = {(cell.workload.shape, cell.page_bytes, cell.direction) for cell in report.cells}
    assert len(shapes) == 2 * 4
    assert report.surveyed.num_decisions == len(report.cells)
