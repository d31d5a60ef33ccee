"""`baton sim handoff` as people read it."""

import subprocess
import sys

import pytest

from baton.cli.main import run


def test_each_count_is_on_a_line_of_its_own() -> None:
    """In a process of its own: the command turns its process's log off."""
    command = [
        sys.executable,
        "-m",
        "baton.cli",
        "sim",
        "handoff",
        "--schedules",
        "1",
        "--jobs",
        "1",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    titles = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert titles[-4:-1] == ["requests", "modes and leases", "faults that took effect"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--log"], "--log is for one seed"),
        (["--seed", "1", "--json"], "--seed prints text"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_flags_that_would_be_ignored_are_errors(flags, reason, capsys) -> None:
    assert run(["sim", "handoff", *flags]) == 2
    assert reason in capsys.readouterr().err
