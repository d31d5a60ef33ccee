"""A benchmark that is ended by a signal ends the processes that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 90
BENCHMARK = """
import os, subprocess, sys, time
from pathlib import Path
from baton.testing.fleet import Fleet

def start(arguments, environment, stderr):
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)

with Fleet(Path(sys.argv[1]), os.environ, start=start) as fleet:
    worker = fleet.start_worker("worker", "decode", {})
    worker.popen.stdout.readline()
    print(worker.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_of_a_benchmark_end_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as benchmark:
        assert benchmark.stdout is not None
        worker = Path(f"/proc/{int(benchmark.stdout.readline())}")
        assert "sleep(600)" in (worker / "cmdline").read_text()
        benchmark.send_signal(number)
        assert benchmark.wait(TIMEOUT_S) != 0
    deadline = time.monotonic() + TIMEOUT_S
    while worker.exists():
        assert time.monotonic() < deadline, "the worker is left"
        time.sleep(0.01)
