"""Two sides' reports → what differs, and what is said about it."""

import io
import os

import msgspec
import numpy as np
import pytest

from baton.bench import statistics
from baton.bench.compare import NUM_SLICES, collect_rates, compare, read_side
from baton.bench.files import RunManifest
from baton.bench.load.job import LoadInfo, Report, WorkloadInfo
from baton.bench.load.records import Slo, compute_figures
from baton.bench.load.runner import ClientLoad
from baton.bench.load.server_check import Server
from baton.bench.printing import find_notes, print_comparison, print_load_report
from baton.errors import ConfigError
from baton.rig.machine import Machine
from tests.unit.bench.load.records import cut, failed, whole


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RATIO_RESAMPLES", 120)


MACHINE = Machine("host", "6.1", "a CPU", 2, 1 << 30, "3.11", {"vllm": "0.32"}, (0.1, 0.1, 0.1))


def report_of(records, **changes):
    window_s = max(record.ended_s for record in records)
    report = Report(
        is_partial=False,
        stopped=None,
        manifest=RunManifest(
            baton="0.1.0", started_at="2026-11-21T00:00:00+00:00", command=("bench", "serve"),
            machine=MACHINE, load_after=(0.1, 0.1, 0.1),
        ),
        server=Server("http://h:1", "m", "completions", "token ids", has_exact_lengths=True),
        workload=WorkloadInfo("balanced", "512 in", "7"),
        load=LoadInfo("closed loop, 1 at once", 1, None, None, 1, 40, None),
        figures=compute_figures(records, window_s, Slo()),
        client=ClientLoad(0.1, 0.0, 0.0, 0.0, 0.0, None, ()),
        warnings=(),
        records=tuple(records),
    )  # fmt: skip
    return msgspec.structs.replace(report, **changes)


def records_of(seed, factor=1.0, num=40):
    rng = np.random.default_rng(seed)
    found = []
    for at in range(num):
        first, gap = factor * rng.normal(1.0, 0.05), factor * rng.normal(0.1, 0.005)
        times = tuple(first + gap * i for i in range(8))
        found.append(whole(sent_s=at * factor * 2.0, token_s=times, num_output=8))
    return found


def line_of(comparison, metric):
    return next(line for line in comparison.lines if line.metric == metric)


def test_a_slower_server_is_worse_in_everything():
    found = compare([report_of(records_of(1))], [report_of(records_of(2, 1.3))], 0.05)
    assert {line.judgement for line in found.lines} == {"worse"}
    assert line_of(found, "TTFT mean").ratio == pytest.approx(1.3, abs=0.05)
    assert line_of(found, "output").ratio == pytest.approx(1 / 1.3, abs=0.05)
    assert found.is_too_bad
    assert not compare([report_of(records_of(1))], [report_of(records_of(2, 1.3))], 0.5).is_too_bad
    assert not compare([report_of(records_of(2, 1.3))], [report_of(records_of(1))], 0.05).is_too_bad


def test_the_same_server_is_the_same():
    found = compare([report_of(records_of(1))], [report_of(records_of(2))], 0.0)
    assert line_of(found, "TTFT mean").judgement == "same"
    assert not found.differences
    assert not found.is_too_bad


def test_more_failures_are_worse_even_if_the_rest_is_quick():
    bad = [*records_of(2), *[failed(sent_s=1.0, ended_s=1.1)] * 10]
    found = compare([report_of(records_of(1))], [report_of(bad)], 0.05)
    assert found.is_too_bad
    assert found.failed_share == (0.0, 0.2)
    assert any("10 of 50" in each for each in found.cautions)


def test_cut_requests_are_lost_even_if_the_rest_is_quick():
    bad = [*records_of(2), *[cut(sent_s=1.0)] * 10]
    found = compare([report_of(records_of(1))], [report_of(bad)], 0.05)
    assert found.is_too_bad
    assert found.failed_share == (0.0, 0.2)
    assert any("10 of 50 requests were cut" in each for each in found.cautions)


def test_what_was_not_the_same_comes_first_and_what_was_asked_before_all():
    other = msgspec.structs.replace(MACHINE, versions={"vllm": "0.33"}, load=(1.9, 1.0, 1.0))
    manifest = msgspec.structs.replace(report_of(records_of(1)).manifest, machine=other)
    b = report_of(
        records_of(2), manifest=manifest, workload=WorkloadInfo("decode-heavy", "128 in", "7"),
        is_partial=True, stopped="the server is gone",
    )  # fmt: skip
    found = compare([report_of(records_of(1))], [b])
    names = [each.field for each in found.differences]
    assert set(names[:2]) == {"workload.name", "workload.description"}
    assert "manifest.machine.versions.vllm" in names
    shown = io.StringIO()
    print_comparison(found, shown)
    text = shown.getvalue()
    assert text.index("NOT ASKED THE SAME") < text.index("vllm") < text.index("TTFT mean")
    assert "the server is gone" in text
    assert "load of 1.9" in text
    assert "With one run" in text


def test_several_runs_a_side():
    a = [report_of(records_of(seed)) for seed in range(4)]
    b = [report_of(records_of(seed + 10, 1.2)) for seed in range(4)]
    found = compare(a, b)
    assert found.num_runs == (4, 4)
    assert line_of(found, "TTFT mean").test == "runs"
    assert line_of(found, "output").judgement == "worse"


def test_a_run_without_an_answer_counts_as_one_without_tokens():
    answered, refused = report_of(records_of(1)), report_of([failed()])
    rates = [float(run.clusters[0][0]) for run in collect_rates([answered, refused], 4)]
    assert rates == [answered.figures.output_tokens_per_s, 0.0]
    _, empty = collect_rates([answered, refused], 2)
    assert [float(rate) for (rate,) in empty.clusters] == [0.0] * NUM_SLICES
    assert collect_rates([refused, refused], 2) == []


@pytest.mark.parametrize("num_runs", [1, 2, 3, 4])
def test_half_the_throughput_is_worse_with_any_number_of_runs(num_runs):
    def run(seed, pause):  # the same answers, of which the slower server gives half as many
        records = records_of(seed)
        return report_of(
            [whole(sent_s=at * pause, token_s=tuple(t - record.sent_s for t in record.token_s),
                   num_output=8) for at, record in enumerate(records)]
        )  # fmt: skip

    a = [run(seed, 2.0) for seed in range(num_runs)]
    b = [run(seed + 10, 4.0) for seed in range(num_runs)]
    found = compare(a, b, 0.05)
    assert line_of(found, "output").ratio == pytest.approx(0.5, abs=0.02)
    assert line_of(found, "output").judgement == "worse"
    assert found.is_too_bad
    assert not compare(b, a, 0.05).is_too_bad


def test_tokens_that_came_after_the_window_do_not_count():
    times = tuple(0.1 * at for at in range(1, 105))  # 4 of them once sending was stopped
    records = [whole(sent_s=0.0, token_s=times, num_output=len(times))]
    figures = compute_figures(records, 10.05, Slo())
    (run,) = collect_rates([report_of(records, figures=figures)], 1)
    mean = sum(float(rate) for (rate,) in run.clusters) / run.num_clusters
    assert mean == pytest.approx(figures.output_tokens_per_s)


def test_a_side_without_answers_is_too_bad_and_does_not_crash():
    found = compare([report_of(records_of(1))], [report_of([failed()])])
    assert not found.lines
    assert found.is_too_bad
    print_comparison(found, io.StringIO())


def test_reports_survive_a_file_and_folders_are_several_runs(tmp_path):
    report = report_of(records_of(1))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_bytes(msgspec.json.encode(report))
    assert read_side(tmp_path) == [report, report]
    assert read_side(tmp_path / "a.json") == [report]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("{", "no report"),
        ('{"schema":"baton-bench-link/1"}', "baton-bench-link/1"),
        ('{"schema":"baton-bench-serve/1"}', "missing"),
        ("[]", "no report"),
    ],
)
def test_what_is_no_report(tmp_path, text, reported):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reported):
        read_side(path)
    with pytest.raises(ConfigError):
        read_side(tmp_path / "nothing.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="folder"):
        read_side(tmp_path / "empty")


def test_a_report_is_printed_with_what_a_reader_should_know():
    cached = [
        msgspec.structs.replace(
            record, tokens=msgspec.structs.replace(record.tokens, num_cached=9), phase="measured"
        )
        for record in records_of(1)
    ]
    report = report_of([*cached, failed(message="boom")], is_partial=True)
    reported = "\n".join(find_notes(report))
    assert "another --seed" in reported
    assert "p99 of 40 requests" in reported
    shown = io.StringIO()
    print_load_report(report, shown)
    text = shown.getvalue()
    for part in ("PARTIAL", "40 complete, 1 failed", "boom", "TTFT", "ITL", "seed 7"):
        assert part in text
    assert os.linesep in text
