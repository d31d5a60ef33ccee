"""`baton sim handoff` as people read it."""

from baton.cli.main import run


def test_each_count_is_on_a_line_of_its_own(capsys) -> None:
    assert run(["sim", "handoff", "--schedules", "1", "--jobs", "1"]) == 0
    titles = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert titles[-4:-1] == ["requests", "modes and leases", "faults that took effect"]
