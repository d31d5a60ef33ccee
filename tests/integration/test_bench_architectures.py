"""`baton bench architectures`: real servers, a verdict, a death, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import msgspec

from baton.bench.architectures.results import Findings
from baton.bench.load.job import Report
from tests import forking_launcher
from tests.preloaded import TORCH, PreloadedProcess

COMMAND = ["bench", "architectures"]
SHORT = ("--input-len", "64", "--output-len", "4", "--timeout", "60")
FLOAT32 = ("--set", "engine.dtype=float32")  # the demo model's bfloat16 is slow on old processors
TIMEOUT_S = 240
BYTES_PER_TOKEN = 3072
"""The demo model's KV: 6 layers, K and V, 2 heads of 32 numbers of 4 bytes."""


def environment(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}


def read_findings(folder):
    return msgspec.json.decode((folder / "results.json").read_bytes(), type=Findings)


def test_two_arms_a_death_and_ctrl_c(tmp_path):
    """In turns: a split is measured; replication, whose worker is killed; and Ctrl-C."""
    out, log = tmp_path / "out", tmp_path / "stderr"
    with log.open("wb") as stderr:
        bench = PreloadedProcess(
            TORCH,
            forking_launcher.__name__,
            [*COMMAND, *SHORT, *FLOAT32, "--concurrency", "2", "--duration", "1.5",
             "--repetitions", "2", "--arm", "replicated", "--arm", "1P1D", "--seed", "a",
             "--output", str(out)],
            environment(tmp_path),
            stderr,
        )  # fmt: skip
    try:
        until(lambda: is_serving(out, "rep-1-replicated.log"))
        os.kill(a_worker_of(bench), signal.SIGKILL)
        until(lambda: len(list(out.glob("logs/*.log"))) == 3)
        bench.send_signal(signal.SIGINT)
        status = bench.wait(TIMEOUT_S)
        reported = bench.stdout.read().decode()
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait(60)
        bench.stdout.close()
    assert status == 130, log.read_text("utf-8")
    assert "PARTIAL: interrupted" in reported
    findings = read_findings(out)
    assert (findings.is_partial, findings.ended) == (True, "interrupted")
    (trouble,) = findings.troubles
    assert "killed by SIGKILL" in trouble.message
    check_measured(findings, out)
    page = (out / "report.html").read_text("utf-8")
    assert "PARTIAL" in page
    assert page.count("<svg") == 9
    # It needs no network: `href="#…"` and `url(#…)` are places of the same page.
    assert re.search(r"src=|href=\"(?!#)|url\((?!#)|@import|<script|<link", page) is None


def check_measured(findings, out):
    """Of cells, the first alone counts: the other was left by a server that died."""
    assert findings.order[:2] == ("1: 1P1D", "1: replicated")  # by this seed
    assert [cell.is_usable for cell in findings.cells] in ([True], [True, False])
    cell = findings.cells[0]
    run = msgspec.json.decode((out / cell.run).read_bytes(), type=Report)
    assert all(record.is_complete for record in run.records)
    assert cell.cpu.servers_s > 0
    # By tokens that the client knows of: none of these prompts was cached.
    num_tokens = sum(record.num_prompt_tokens for record in run.records)
    assert num_tokens == 64 * len(run.records) > 0
    # On a busy machine decode may give up on a prefill worker and compute: that is counted too.
    proof = cell.proof
    num_computed = proof.num_not_handed_over
    assert num_computed == sum(proof.fallbacks.values()) < proof.num_requests == len(run.records)
    assert proof.is_proved == (num_computed == 0), proof.problem
    num_handed_over = num_tokens - 64 * num_computed
    assert proof.num_needed_tokens == num_tokens
    assert proof.num_received_tokens == num_handed_over
    assert proof.num_bytes == num_handed_over * BYTES_PER_TOKEN


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_serving(out, pattern):
    return any("ready after" in path.read_text("utf-8") for path in out.glob(f"logs/{pattern}"))


def a_worker_of(bench):
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text("utf-8").split()
    names = {pid: Path(f"/proc/{pid}/comm").read_text("utf-8").strip() for pid in children}
    return next(int(pid) for pid, name in names.items() if name == "worker")
