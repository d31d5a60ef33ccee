"""What is printed, and the judgement over all transports."""

import io

import msgspec
import pytest

from baton.ops.doctor.finding import Area, Finding, Level, Report, write_bytes, write_seconds
from baton.ops.doctor.reporting import MAX_COLUMNS, make_report, print_report
from baton.ops.doctor.transports import ChosenTransports, check_path, failure_level

CHOSEN = ChosenTransports(("shared", "tcp"), {})


def transport(kind, level=Level.OK):
    return Finding(area=Area.TRANSPORTS, name=kind, level=level, found="…", why="…")


@pytest.mark.parametrize(
    ("working", "level", "found"),
    [
        (("shared", "tcp"), "ok", "two workers on this host use shared (configured: shared, tcp)"),
        (
            ("tcp",),
            "warning",
            "two workers on this host fall back to tcp (configured: shared, tcp)",
        ),
        (("nixl",), "problem", "none of the configured transports works here: shared, tcp"),
        ((), "problem", "none of the configured transports works here: shared, tcp"),
    ],
)
def test_the_path_that_a_handoff_would_take(working, level, found):
    findings = [
        transport(kind, Level.OK if kind in working else failure_level(kind, CHOSEN))
        for kind in ("shared", "tcp", "nixl")
    ]
    path = check_path(findings, CHOSEN)
    assert (path.level, path.found) == (level, found)


def test_a_transport_that_nobody_asked_for_may_fail_quietly():
    assert failure_level("tcp", CHOSEN) is Level.WARNING
    assert failure_level("nixl", CHOSEN) is Level.NOTE


LONG = Finding(
    area=Area.NETWORK,
    name="a-rather-long-name",
    level=Level.PROBLEM,
    found="word " * 40 + "x" * 150,
    why="because " * 30,
    fix="sudo do-this [bold]and-that[/bold]",
)


def printed(*findings):
    file = io.StringIO()
    print_report(make_report("a-host", findings, 1.25), file)
    return file.getvalue()


def test_output_fits_100_columns_and_loses_nothing():
    text = printed(LONG, transport("shared"))
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert text.count("x") >= 150
    assert text.split().count("because") == 30
    assert "fix: sudo do-this [bold]and-that[/bold]" in text
    assert "\x1b" not in text
    assert text.index("transports") < text.index("network")
    assert text.rstrip().endswith("1 problem, 1 ok in 1.2 s")


def test_text_of_others_cannot_steer_a_terminal():
    """A reason may have the address of an alert's runbook, which a gateway gives."""
    hostile = "a\x1b[2J\nb\x07"
    finding = msgspec.structs.replace(LONG, name=hostile, found=hostile, why=hostile, fix=hostile)
    assert printed(finding).replace("\n", "").isprintable()


def test_why_is_told_only_where_something_is_wrong():
    assert "because" in printed(LONG)
    assert "because" not in printed(replace_level(LONG, Level.OK))


def replace_level(finding, level):
    return msgspec.structs.replace(finding, level=level)


def test_the_exit_code_is_1_only_for_a_problem():
    report = make_report("a-host", [replace_level(LONG, Level.WARNING)], 0.0)
    assert report.exit_code == 0
    assert make_report("a-host", [LONG], 0.0).exit_code == 1
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (64 << 20, "64 MiB"), (3 << 39, "1.5 TiB")],
)
def test_sizes(num_bytes, text):
    assert write_bytes(num_bytes) == text


def test_durations():
    assert [write_seconds(s) for s in (0.00042, 0.3, 2, 10)] == ["0.42 ms", "0.3 s", "2 s", "10 s"]
