"""Run pytest; where few tests failed beside others, run these again, alone.

`python scripts/run_tests.py ARGUMENTS` is `python -m pytest ARGUMENTS`. If it ran to its end and at
most `MOST_REPEATED` tests failed, the same tests run once more in one process, one after another,
and the exit status is that of the second run; both are printed. No second run where it could hide
something: after an interrupt, an error in collecting or `--maxfail`, where a test process crashed,
and where a fixture failed as it ended, since that may be due to any test before.
"""

from __future__ import annotations

import os
import sys

import pytest

MOST_REPEATED = 10
REPORTS = ("--junit-xml=", "--junitxml=")


class Failures:
    """What failed in a run, and whether running these tests again says anything."""

    def __init__(self) -> None:
        self.nodeids: list[str] = []
        self.options: list[str] = []
        self.can_repeat = False
        self._in_tests = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure, and whether it was in the test itself."""
        if report.failed:
            self._in_tests &= report.when in ("setup", "call")  # xdist: "???" where it crashed
            if report.nodeid not in self.nodeids:
                self.nodeids.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tests that could not be collected did not run."""
        self._in_tests &= not report.failed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Decide whether to run what failed again, with which options."""
        given = session.config.invocation_params.args
        paths = set(session.config.args)
        # The first run's report stays: the durations of all tests are in it.
        self.options = [
            str(argument)
            for argument in given
            if argument not in paths and not str(argument).startswith(REPORTS)
        ]
        self.can_repeat = (
            exitstatus == pytest.ExitCode.TESTS_FAILED
            and not (session.shouldfail or session.shouldstop)
            and self._in_tests
            and 0 < len(self.nodeids) <= MOST_REPEATED
        )


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit status, or become the second run."""
    failures = Failures()
    status = pytest.main(arguments, plugins=[failures])
    if not failures.can_repeat:
        return int(status)
    again = [sys.executable, "-m", "pytest", *failures.options, "-n", "0", *failures.nodeids]
    print(
        f"\nrun_tests: {len(failures.nodeids)} failed beside other tests and run again, alone; this"
        " run decides. One that passes now depends on how busy the machine is: mend it"
        " (docs/contributing.md).",
        *failures.nodeids,
        "",
        sep="\n  ",
        flush=True,
    )
    return os.execv(sys.executable, again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
