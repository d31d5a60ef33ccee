"""iperf3 beside the transports: its own bytes, its own clock, the CPU time of both its programs."""

import shutil

import pytest

from baton.bench.link.node import COMMAND
from baton.bench.link.runner import PEERS, Effort, LinkRunner, Plan
from baton.clock import MachineClock
from baton.rig.nodes import LocalNodes
from baton.rig.pages import PAGE_BYTES, Workload
from baton.rig.pair import SampleBudget
from baton.transfer.transports.tcp.sockets import TcpOptions

EFFORT = Effort(1, SampleBudget(0.01, 1, 3), 16, 64)
WORKLOADS = (
    Workload("message", 10_000),
    Workload("message", 100_000_000),
    Workload("scattered", 16 * PAGE_BYTES),
)
IPERFS = tuple(each for each in PEERS if each.name.startswith("iperf3"))


class Silent:
    """See `Progress`."""

    def begin(self, what):
        pass

    def show(self, detail):
        pass

    def advance(self, num_steps):
        pass

    def end(self):
        pass


def measure():
    plan = Plan(IPERFS, WORKLOADS, EFFORT)
    clock = MachineClock()
    return LinkRunner(plan, LocalNodes(clock, COMMAND), Silent(), clock, ()).run()


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed")
def test_iperf3_is_a_row_of_large_messages_that_is_not_called_verified():
    report = measure()
    assert not report.skipped
    assert {row.name for row in report.rows} == {each.name for each in IPERFS}
    for row in report.rows:
        assert row.workload.num_bytes == 100_000_000
        assert not row.is_verified
        assert row.figures.gb_per_s.median > 0
        # Both programs' work, not what starting them costs their parents.
        assert row.figures.driver_cpu_s_per_gb > 0.02
        assert row.figures.owner_cpu_s_per_gb > 0.02


def test_without_iperf3_it_is_skipped_and_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    report = measure()
    assert not report.rows
    assert {skipped.name for skipped in report.skipped} == {each.name for each in IPERFS}
    assert all("apt-get install iperf3" in skipped.reason for skipped in report.skipped)


def test_one_row_has_as_many_streams_as_tcp():
    assert f"iperf3 -P {TcpOptions().streams}" in {each.name for each in IPERFS}
