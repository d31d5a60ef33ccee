"""`baton bench serve` and `compare` as a person runs them: exit codes, files, Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.bench.load.job import Report
from baton.cli.main import run as main
from tests.forked_module import ForkingSubprocess, run_forked
from tests.integration.worker_process import starting

if TYPE_CHECKING:
    from collections.abc import Generator

BENCH = [sys.executable, "-m", "baton.cli", "bench"]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90


@contextmanager
def scripted_server(delay_s: float) -> Generator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.scripted_openai", str(delay_s)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def url():
    with scripted_server(0.005) as url:
        yield url


def flags_of(url):
    return ["--url", url, "--output-len", "4", "--input-len", "8"]


def serve(url, *flags):
    return run_forked([*BENCH, "serve", *flags_of(url), *flags], timeout_s=TIMEOUT_S)


def test_a_run_its_file_and_a_comparison(url, tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        done = serve(url, "--requests", "20", "--concurrency", "4", "--output", str(path))
        assert done.returncode == 0, done.stderr
        assert "20 complete, 0 failed" in done.stdout
        assert "TTFT" in done.stdout
    report = msgspec.json.decode(paths[0].read_bytes(), type=Report)
    assert len(report.records) == 24  # with the warm-up
    assert report.manifest.command[:2] == ("bench", "serve")
    compared = run_forked(
        [*BENCH, "compare", *map(str, paths), "--fail-if-worse", "500%"],
        timeout_s=TIMEOUT_S,
    )
    assert compared.returncode == 2  # a share of more than 1
    compared = run_forked(
        [*BENCH, "compare", *map(str, paths), "--json"],
        timeout_s=TIMEOUT_S,
    )
    assert compared.returncode == 0, compared.stderr
    assert msgspec.json.decode(compared.stdout)["num_requests"] == [20, 20]


def test_a_reader_that_leaves_early_costs_no_report(url, tmp_path):
    path = tmp_path / "report.json"
    reading, writing = os.pipe()
    os.close(reading)
    command = [*BENCH, "serve", *flags_of(url), "--requests", "2", "--output", str(path)]
    process = ForkingSubprocess.Popen(command, subprocess.DEVNULL, writing, subprocess.DEVNULL)
    os.close(writing)
    try:
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert len(msgspec.json.decode(path.read_bytes(), type=Report).records) >= 2


@pytest.mark.parametrize(
    ("flags", "code", "reported"),
    [
        (["--model", "another"], 2, "serves scripted"),
        (["--output", "/nowhere/x.json"], 2, "no folder /nowhere"),
        (["--requests", "3", "--records", "/dev/full"], 1, "No space left"),
        (["--requests", "3", "--output", "/dev/full"], 1, "instead"),
        (["--rate", "3", "--concurrency", "3"], 2, "--max-in-flight"),
        (["--goodput", "ttft"], 2, "ttft:500"),
        (["--concurrency", "0"], 2, "--concurrency"),
        (["--arrival", "constant"], 2, "give --rate"),
        (["--rate", "3", "--burst", "4"], 2, "--arrival burst"),
        (["--drain", "3"], 2, "--duration"),
        (["--duration", "1", "--drain", "nan"], 2, "--drain: a number"),
        (["--trace", "no-such-file"], 2, "--input-len, --output-len: only without a trace"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_with_its_exit_code(
    url, flags, code, reported, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a report goes that has no room
    found = main(["bench", "serve", *flags_of(url), *flags])
    said = capsys.readouterr().err
    assert found == code, said
    assert reported in said
    assert "Traceback" not in said


def test_what_the_drain_cuts_is_no_success(url):
    done = serve(url, "--duration", "0.55", "--drain", "0", "--concurrency", "4", "--json")
    assert done.returncode == 1, done.stderr
    assert msgspec.json.decode(done.stdout, type=Report).figures.num_cut


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 4096)
    return seen


def test_ctrl_c_keeps_what_there_is_and_gives_the_terminal_back(tmp_path):
    path = tmp_path / "partial.json"
    terminal, theirs = pty.openpty()
    with scripted_server(0.05) as url:
        process = subprocess.Popen(
            [*BENCH, "serve", "--url", url, "--input-len", "8", "--output-len", "8",
             "--duration", "600", "--concurrency", "2", "--output", str(path)],
            stderr=theirs, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(theirs)
        try:
            seen = read_until(terminal, b"measured: 2 done")
            assert b"\x1b[?25l" in seen  # a live line hides the cursor
            process.send_signal(signal.SIGINT)
            read_until(terminal, b"\x1b[?25h")
            read_until(terminal, b"partial.json")
            out, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
    assert process.returncode == 130
    assert "PARTIAL: interrupted" in out
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.is_partial
    assert report.figures.num_complete >= 2
    assert report.figures.num_cut >= 1


def test_a_real_worker_counts_what_the_client_counts():
    with starting("bench", role="both") as worker:
        worker.wait_until_ready()
        done = serve(worker.url, "--requests", "6", "--concurrency", "2", "--json")
        chat = serve(worker.url, "--requests", "2", "--endpoint", "chat", "--json")
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.server.prompts == "token ids"
    assert report.server.has_exact_lengths
    assert report.warnings == ()
    assert (report.figures.num_prompt_tokens, report.figures.num_output_tokens) == (48, 24)
    assert report.figures.tokens_per_chunk >= 1.0
    assert chat.returncode == 0, chat.stderr
    assert msgspec.json.decode(chat.stdout, type=Report).server.prompts == "words"
