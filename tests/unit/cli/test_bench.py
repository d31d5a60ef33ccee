"""`baton bench`: flags that would have no effect."""

import pytest

from baton.cli.main import run


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trace", "no-such-file", "--output-len", "5"], "--output-len: only without a trace"),
        (["--speed", "2", "--max-broken", "2%"], "--speed, --max-broken: only for a trace"),
    ],
)
@pytest.mark.parametrize("command", [["architectures"], ["serve", "--url", "http://127.0.0.1:1"]])
def test_flags_of_a_trace_and_of_what_is_generated(command, flags, reason, capsys):
    assert run(["bench", *command, *flags]) == 2
    assert reason in capsys.readouterr().err
