"""Benchmarks that run `baton bench serve` in turns, where requests fail."""

import argparse
import importlib
import json
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SPREAD = {"p50": 0.1, "p99": 0.2, "mean": 0.1}
FIGURES = {
    "output_tokens_per_s": 9.0, "requests_per_s": 1.0, "goodput": {"requests_per_s": 1.0},
    "ttft_s": SPREAD, "num_complete": 9, "num_failed": 1, "num_cached_tokens": 0,
    "num_prompt_tokens": 90, "failures": [{"kind": "timeout", "num": 1, "example": "too late"}],
}  # fmt: skip
REPORT = {"is_partial": False, "stopped": None, "figures": FIGURES}


@pytest.fixture
def serve(monkeypatch):
    """Instead of `baton bench serve`: an exit code, and what is in the report (None: no report)."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def replace(code, report):
        def run(command, *, check=False, **_):
            if report is not None:
                Path(command[command.index("--output") + 1]).write_text(json.dumps(report))
            done = subprocess.CompletedProcess(command, code, "", "baton: no server answers")
            if check:
                done.check_returncode()
            return done

        monkeypatch.setattr(subprocess, "run", run)

    return replace


def measure_objectives():
    objectives = importlib.import_module("bench_objectives")
    options = argparse.Namespace(duration=1.0, warm_up=1.0)
    limits = objectives.Limits(400.0, 12.0)
    return objectives.measure(("balanced", 2, 0), "1P1D", "http://h:1", limits, options)


def test_a_request_that_fails_is_counted_and_ends_nothing(serve, capsys):
    serve(1, REPORT)
    turn = measure_objectives()
    assert (turn.num_failed, turn.output_tokens_per_s) == (1, 9.0)
    importlib.import_module("bench_objectives").print_tables("vllm", [turn, turn])
    assert "balanced: requests that failed: 1P1D 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "report", "cause"),
    [
        (2, None, "no server answers"),
        (1, REPORT | {"is_partial": True, "stopped": "the server is gone"}, "the server is gone"),
        (1, REPORT | {"figures": FIGURES | {"num_complete": 0}}, "too late"),
    ],
    ids=["not begun", "stopped", "nothing answered"],
)
def test_a_run_that_measured_nothing_ends_with_its_cause(serve, code, report, cause):
    serve(code, report)
    with pytest.raises(SystemExit, match=cause):
        measure_objectives()
