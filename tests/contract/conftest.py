"""What the contract suites share: processes that are forked, and whether Mooncake is here."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from baton.testing.transport_contract import process
from baton.transfer.transports.mooncake import session
from tests.forked_module import ForkingSubprocess

IN_FULL: Final = {"TestTcp", "TestShared", "TestLocal", "TestNixlOverTheNetwork"}
COMMON_CHECKS: Final = {
    "test_a_description_that_makes_no_sense_is_not_attached",
    "test_a_read_out_of_range_is_refused",
    "test_a_write_out_of_bounds_is_not_posted",
}
"""Every transport inherits these refusals (`baton.transfer.region`): their further cases are tried
with the transports `IN_FULL`, and with the others by `make chaos`."""
LIKE_ANOTHER: Final = {
    "TestFaultlessWrapper",  # TestShared
    "TestFileInMemory",  # TestFileOnDisk
    "TestMooncake",  # TestNixlOverTheNetwork
    "TestNixlOnOneHost",  # TestNixlOverTheNetwork
    "TestNixlWithoutPreparedLists",  # TestNixlOverTheNetwork
    "TestSharedDevice",  # TestShared
    "TestSharedDeviceLibpmem",  # TestSharedDevice
    "TestSharedDeviceMsync",  # TestSharedDevice
    "TestStripedTcp",  # TestTcp
    "TestTcpOverTls",  # TestTcp
}
"""Each with the one whose code it shares, but for how bytes are moved."""
SEVERAL_CASES: Final = {
    "test_a_description_that_does_not_fit_is_lost",
    "test_a_peer_with_the_key_that_sends_nonsense_is_hung_up_on",
    "test_a_region_that_is_not_what_was_described_is_not_read",
    "test_an_unauthenticated_peer_that_sends_nonsense_is_hung_up_on",
    "test_arrays_that_are_not_there",
    "test_pages_outside_the_grant_are_refused",
    "test_several_arrays_at_once_are_read_or_refused",
    "test_several_arrays_at_once_land_or_are_refused",
    "test_spans_are_read_between_pages_of_other_sizes",
    "test_spans_between_pages_of_other_sizes",
}
"""Of these the classes `LIKE_ANOTHER` have one case, and the others by `make chaos`."""
SUITES: Final = "baton.testing.transport_contract."
SAME_CODE: Final = {
    "TestFaultlessWrapper": ("peers",),
    "TestFileInMemory": ("peers", "reading", "write_grants"),
    "TestNixlOnOneHost": ("write_grants",),
    "TestSharedDeviceLibpmem": ("peers", "write_grants"),
    "TestSharedDeviceMsync": ("peers", "reading", "write_grants"),
    "TestStripedTcp": ("write_grants",),
    "TestTcpOverTls": ("write_grants",),
}
"""Of the suites, those of whose code nothing is this class's own: by `make chaos`."""
SAME_LINK: Final = {
    "TestFileInMemory",
    "TestSharedDeviceLibpmem",
    "TestSharedDeviceMsync",
    "TestStripedTcp",
    "TestTcpOverTls",
}
WRITERS_IN_OTHER_PROCESSES: Final = {
    "test_a_killed_writers_grant_becomes_quiescent",
    "test_a_stopped_writer_that_goes_on_answers",
    "test_a_writer_that_leaves_in_peace",
}
"""By `make chaos` for the classes `SAME_LINK`: what closes a grant is the other class's. In
`make test` they have a writer that is stopped and killed, and one that never stops."""


def is_another_classs(item: pytest.Item, name: str, suite: str) -> bool:
    """Whether all that a test goes through is what it goes through with another class."""
    if name in WRITERS_IN_OTHER_PROCESSES and suite in SAME_LINK:
        return True
    module = getattr(getattr(item, "function", None), "__module__", "")
    return module in {SUITES + each for each in SAME_CODE.get(suite, ())}


@pytest.hookimpl(tryfirst=True)  # before those with the mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make chaos` tries beyond `make test`."""
    begun: set[str] = set()
    for item in items:
        name = getattr(item, "originalname", item.name)
        suite = getattr(item.parent, "name", "")
        if not item.nodeid.startswith("tests/contract/"):
            continue
        has_one = (name in COMMON_CHECKS and suite not in IN_FULL) or (
            name in SEVERAL_CASES and suite in LIKE_ANOTHER
        )
        first, _, _ = item.nodeid.partition("[")
        is_further = has_one and first in begun
        begun.add(first)
        if is_further or is_another_classs(item, name, suite):
            item.add_marker(pytest.mark.every)


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers in processes of their own, and Mooncake's, have their modules loaded."""
    ForkingSubprocess.ensure_running()  # before a test counts its descriptors
    for module in (process, session):
        monkeypatch.setattr(module, "subprocess", ForkingSubprocess)


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Skip where Mooncake does not load: it needs libibverbs, also for TCP."""
    command = [sys.executable, "-c", "import mooncake.engine"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        pytest.skip(f"Mooncake does not load: {done.stderr.strip().rpartition(chr(10))[2]}")
