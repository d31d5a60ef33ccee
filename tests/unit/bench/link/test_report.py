"""Rows, their order and their limit; the table's width; the plan."""

import io
from unittest.mock import Mock

import msgspec
import pytest

from baton.bench.link.report import LinkEntry, Manifest, Report, ReportBuilder
from baton.bench.link.runner import (
    LIMITS,
    PEERS,
    QUICK,
    LinkRunner,
    Plan,
    add_reused,
    choose_transports,
    make_workloads,
)
from baton.bench.printing import MAX_COLUMNS, print_link_report
from baton.errors import ConfigError, PeerLostError, UnknownPluginError
from baton.rig.backend import Traits
from baton.rig.machine import describe_machine
from baton.rig.pair import Timings

SHARED = LinkEntry("transport", "shared", {"a": 1})
WORKLOADS = make_workloads([32_768, 100_000_000], QUICK)


def timings(rate_gb_per_s, workload):
    return Timings((workload.num_bytes / 1e9 / rate_gb_per_s,), 2, 0.5, 123.25)


def make_report(*, is_partial=False):
    builder = ReportBuilder()
    for workload in WORKLOADS:
        limit_rate = 10.0 if workload is WORKLOADS[0] else 20.0
        for entry, rate in ((SHARED, 5.0), (LIMITS[0], limit_rate)):
            traits = Traits("memcpy", ("push",), "memcpy")
            builder.add(entry, traits, workload, "push", timings=timings(rate, workload))
        for peer in PEERS:
            traits = Traits("UCX TCP", ("push",), "tuned socket")
            builder.add(peer, traits, workload, "push", timings=timings(0.0001, workload))
        traits = Traits("shared", ("push", "reference"), "memcpy")
        lent = Timings((123_456.7e-6, 0.9), 3, 0.03, 0.03)
        builder.add(SHARED, traits, workload, "reference", timings=lent)
    builder.skip(SHARED, "it broke in the second round", is_wrong=True)
    machine = describe_machine()
    manifest = Manifest(
        baton="0",
        started_at="",
        command=(),
        num_rounds=1,
        budget_s=1,
        pool_bytes=1,
        driver=machine,
        owner=machine,
        load_before=(0, 0, 0),
        load_after=(0, 0, 0),
    )
    return Report(
        is_partial=is_partial,
        manifest=manifest,
        rows=builder.make_rows(WORKLOADS),
        by_reference=builder.make_reference_rows(WORKLOADS),
        skipped=tuple(builder.skipped.values()),
    )


def test_rows_are_ordered_by_workload_then_speed_and_held_against_their_own_limit():
    rows = make_report().rows
    num_rows = 2 + len(PEERS)
    assert [row.workload.name for row in rows[:num_rows]] == ["32 KiB"] * num_rows
    assert [row.name for row in rows[:2]] == ["memcpy", "shared"]
    assert [row.percent_of_limit for row in rows[:2]] == pytest.approx([100.0, 50.0])
    assert rows[2].percent_of_limit is None  # its limit was not measured
    assert rows[num_rows + 1].percent_of_limit == pytest.approx(25.0)


def test_what_was_lent_has_rows_of_its_own_and_no_rate():
    report = make_report()
    assert [row.workload.name for row in report.by_reference] == [each.name for each in WORKLOADS]
    assert {row.direction for row in report.rows} == {"push"}


def test_the_report_survives_json():
    report = make_report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


@pytest.mark.parametrize("is_partial", [False, True])
def test_the_table_is_at_most_100_columns_wide_and_says_what_went_wrong(is_partial):
    text = io.StringIO()
    print_link_report(make_report(is_partial=is_partial), text)
    tables = [line for line in text.getvalue().splitlines() if not line.startswith(("A:", "B:"))]
    assert max(map(len, tables)) <= MAX_COLUMNS
    assert "WRONG: shared: it broke" in text.getvalue()
    assert "…" not in text.getvalue()
    assert ("PARTIAL" in text.getvalue()) is is_partial


def test_transports_are_those_asked_for_else_all():
    transports = choose_transports((), ("a", "b"), {"b": {"x": 1}})
    names = [each.name for each in transports]
    again = add_reused(transports)
    assert [each.name for each in again] == ["a reused", "b reused"]
    assert {each.shapes for each in again} == {("message",)}
    assert again[1].options == {"x": 1}
    assert names == ["a", "b"]
    assert choose_transports(("b", "b"), ("a", "b"), {"b": {"x": 1}})[0].options == {"x": 1}
    with pytest.raises(UnknownPluginError, match="installed: a, b"):
        choose_transports(("c",), ("a", "b"), {})


def test_messages_that_need_too_large_a_pool_are_refused():
    with pytest.raises(ConfigError, match="4 GiB"):
        make_workloads([(4 << 30) + 1], QUICK)


def test_a_link_that_is_too_slow_is_named_with_what_helps():
    pair = Mock(traits=Traits("tcp", ("push",), "tuned socket"))
    pair.measure.side_effect = PeerLostError("no answer within 60 s")
    runner = LinkRunner(Plan((SHARED,), WORKLOADS, QUICK), Mock(), Mock(), Mock(), ())
    with pytest.raises(PeerLostError, match=r"push: no answer within 60 s; .*--quick"):
        runner._measure_all(SHARED, pair, ReportBuilder())
