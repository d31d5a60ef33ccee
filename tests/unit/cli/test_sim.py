"""`baton sim handoff` as people read it."""

import subprocess
import sys


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
