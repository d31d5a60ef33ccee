import io
import re

import msgspec
import pytest

from baton.bench.load.records import Slo
from baton.errors import ConfigError
from benchmarks.architectures_agreement import (
    Span,
    compare_findings,
    count,
    print_agreement,
    read_findings,
)
from tests.unit.bench.architectures.cells import make_findings, make_plan, measure

SAME = {"replicated": {"c1": 100, "c8": 200}, "1P1D": {"c1": 80, "c8": 260}}


def find(rates=SAME, **changes):
    plan = make_plan("1,8", **changes)
    return make_findings(plan, measure(plan, rates))


def test_a_result_agrees_with_itself_everywhere():
    found = compare_findings(find(), find())
    tally = count(found.points)
    assert tally.num_known == tally.num_agreeing > 0
    assert count(found.ratios).num_known == count(found.ratios).num_agreeing > 0
    assert not found.opposed
    assert not found.unlike
    assert not found.cautions
    assert tally.half_share is not None


def test_another_throughput_is_apart_and_an_opposite_verdict_is_named():
    other = {"replicated": {"c1": 100, "c8": 200}, "1P1D": {"c1": 120, "c8": 260}}
    found = compare_findings(find(), find(other))
    apart = {(p.metric, p.configuration, p.level) for p in found.points if p.verdict == "apart"}
    assert ("throughput", "1P1D", "c1") in apart
    assert not any(arm == "replicated" or level == "c8" for _, arm, level in apart)
    opposed = {(o.metric, o.level, o.a, o.b) for o in found.opposed}
    assert ("throughput", "c1", "loses", "wins") in opposed
    assert {level for _, level, _, _ in opposed} == {"c1"}


def test_one_repetition_has_no_intervals_and_so_decides_nothing():
    found = compare_findings(find(repetitions=1), find())
    tally = count(found.points)
    assert (tally.num_agreeing, tally.num_known) == (0, 0)
    assert tally.num_unknown == len(found.points) > 0


def test_goodput_by_two_slos_is_left_out_and_said():
    found = compare_findings(find(), find(slo=Slo(ttft_s=9.0)))
    assert not any(pair.metric == "goodput" for pair in (*found.points, *found.ratios))
    assert any("SLO" in line for line in found.left_out)
    assert any(pair.metric == "goodput" for pair in compare_findings(find(), find()).points)


def test_what_was_not_asked_alike_and_cells_of_one_side_are_said():
    a = find()
    b = msgspec.structs.replace(
        find({"replicated": {"c1": 100}}), model="other", is_partial=True, settle_s=9.0
    )
    found = compare_findings(a, b)
    assert [(u.field, u.is_asked) for u in found.unlike] == [
        ("model", True), ("seconds before each load", False),
    ]  # fmt: skip
    assert "1P1D, c8: measured in A alone" in found.left_out
    assert any(line.startswith("B is partial") for line in found.left_out)


@pytest.mark.parametrize(
    ("b", "verdict"),
    [
        (Span(3.0, 2.0, 4.0), "agree"),
        (Span(3.1, 2.1, 4.0), "apart"),
        (Span(1, None, None), "unknown"),
    ],
)
def test_intervals_that_touch_agree(b, verdict):
    a = Span(1.0, 0.0, 2.0)
    assert a.meets(b) == b.meets(a) == verdict


def test_a_folder_or_its_file_is_read_and_something_else_is_refused(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "results.json").write_bytes(msgspec.json.encode(find()))
    assert read_findings(folder) == read_findings(folder / "results.json")
    other = tmp_path / "serve.json"
    other.write_text('{"schema": "baton-bench-serve/1"}')
    with pytest.raises(ConfigError, match="no result of `baton bench architectures`"):
        read_findings(other)


def test_a_machine_that_others_used_is_said():
    a = find()
    cpu = msgspec.structs.replace(a.cells[0].cpu, others_share=0.4)
    loud = msgspec.structs.replace(a.cells[0], cpu=cpu)
    b = msgspec.structs.replace(a, cells=(loud, *a.cells[1:]))
    (caution,) = compare_findings(a, b).cautions
    assert caution.startswith("B had a busy machine: others used up to 40%")


def test_the_table_says_how_many_agree_and_names_those_apart():
    other = {"replicated": {"c1": 100, "c8": 200}, "1P1D": {"c1": 120, "c8": 260}}
    a, out = find(), io.StringIO()
    print_agreement(compare_findings(a, find(other)), a, out)
    reported = out.getvalue()
    assert "apart: 1P1D, 1 at once, throughput, mean: A " in reported
    assert (
        "OPPOSED: 1P1D, 1 at once, throughput: loses against replication in A, wins in B"
        in reported
    )
    assert re.search(r"Means: \d+ of 36 agree within their 95 % intervals", reported)
