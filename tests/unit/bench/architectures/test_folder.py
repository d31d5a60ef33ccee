import io
import json
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest

from baton.bench.architectures import folder
from baton.bench.architectures.folder import create_result_folder, deliver
from baton.bench.architectures.plan import plan_trials
from baton.bench.architectures.usage import compare_usage, read_usage
from baton.errors import ConfigError
from tests.unit.bench.architectures.cells import make_findings, make_plan, measure

TURNS = plan_trials(make_plan())


def test_every_run_has_its_folder_before_anything_is_measured(tmp_path):
    create_result_folder(tmp_path / "a" / "out", TURNS)
    runs = tmp_path / "a" / "out" / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["1P1D", "replicated", "single"]
    assert (runs / "1P1D" / "c8").is_dir()


def test_an_earlier_result_is_never_mixed_with_a_new_one(tmp_path):
    (tmp_path / "results.json").touch()
    with pytest.raises(ConfigError, match="is there already"):
        create_result_folder(tmp_path, TURNS)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError):
            create_result_folder(path, TURNS)


def test_hardly_any_space_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(ConfigError, match="only 1 MB are free"):
        create_result_folder(tmp_path / "out", TURNS)


class LeftReader(io.StringIO):
    """Standard output whose reader, such as `head`, has what it wanted."""

    def write(self, _):
        raise BrokenPipeError


def test_a_reader_that_leaves_early_costs_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_findings", lambda _: {})
    results = create_result_folder(tmp_path / "out", TURNS)
    plan = make_plan("1", repetitions=1)
    findings = make_findings(plan, measure(plan, {"replicated": {"c1": 10}}))
    monkeypatch.setattr(sys, "stdout", LeftReader())
    with pytest.raises(BrokenPipeError):
        deliver(findings, results, is_json=True)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["ended"] is None
    assert (tmp_path / "out" / "report.html").exists()


def test_cpu_time_of_a_session_is_counted():
    session = os.getsid(0)
    before = read_usage([session], 0.0)
    enough = time.process_time() + 0.05
    while time.process_time() < enough:
        pass
    after = read_usage([session], 1.0)
    use = compare_usage(before, after, {"worker-0": session, "gone": -5}, "gateway")
    assert use.workers_s["worker-0"] >= 0.03
    assert use.gateway_s == 0.0
    assert use.wall_s == 1.0
