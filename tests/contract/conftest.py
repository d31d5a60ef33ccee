"""What the contract suites share: processes that are forked, and whether Mooncake is here."""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import Final

import pytest

from baton.testing.transport_contract import process
from baton.transfer.transports.mooncake import session
from tests.forked_module import ForkingSubprocess

SUITES: Final = "baton.testing.transport_contract."
OF_ONE_SIDED: Final = ("reading.FailedReadContract", "write_grants")
KILLED_OWNER: Final = "process.ReadOwnerContract"
"""Mooncake and UCX's shared memory give an owner up after ten seconds and more."""
SAME_CODE: Final = {
    "TestFaultlessWrapper": ("peers",),
    "TestFileInMemory": ("peers", "reading", "write_grants"),
    "TestMooncake": (*OF_ONE_SIDED, KILLED_OWNER, "peers.UnauthenticatedPeerContract"),
    "TestNixlOnOneHost": (*OF_ONE_SIDED, KILLED_OWNER, "peers"),
    "TestNixlWithoutPreparedLists": OF_ONE_SIDED,
    "TestSharedDeviceLibpmem": ("peers", "write_grants"),
    "TestSharedDeviceMsync": ("peers", "reading", "write_grants"),
    "TestStripedTcp": ("write_grants",),
    "TestTcpOverTls": ("write_grants",),
}
"""Of the suites, those of whose code nothing is this class's own: by `make chaos`. Of Mooncake and
NIXL all but how bytes move is `OneSidedTransport`'s: `TestNixlOverTheNetwork` has it in full."""
IN_ANY_CASE: Final = {"test_nothing_lands_after_quiescence"}
SAME_LINK: Final = {
    "TestFileInMemory",
    "TestSharedDeviceLibpmem",
    "TestSharedDeviceMsync",
    "TestStripedTcp",
    "TestTcpOverTls",
}
SAME_GRANTS: Final = SAME_LINK | {"TestMooncake", "TestNixlOnOneHost"}
WRITERS_IN_OTHER_PROCESSES: Final = {
    "test_a_killed_writers_grant_becomes_quiescent",
    "test_a_stopped_writer_that_goes_on_answers",
    "test_a_writer_that_leaves_in_peace",
}
"""By `make chaos` for the classes `SAME_GRANTS`: what closes a grant is the other class's. In
`make test` they have a writer that is stopped and killed, and one that never stops."""


WITHOUT_A_SESSION: Final = {
    "test_a_description_that_does_not_fit_is_lost",
    "test_a_read_without_pages_completes",
    "test_a_receiver_that_is_not_there_is_lost",
    "test_an_attach_that_is_not_answered_is_lost",
    "test_another_cluster_key_is_refused",
    "test_arrays_that_are_not_there",
    "test_reads_and_writes_are_reported_once_each_by_their_own_name",
    "test_the_longest_notification_arrives_and_a_longer_one_is_refused",
    "test_the_owner_gets_no_event_of_a_read",
}
"""What `OneSidedTransport` decides whatever moves the bytes: `TestNixlOverTheNetwork` has it."""
OF_THE_SAME_TRANSPORT: Final = {"TestMooncake", "TestNixlOnOneHost", "TestNixlWithoutPreparedLists"}


HALF_OF_CALLS: Final = {
    "test_a_process_killed_at_any_system_call_leaves_a_right_store": {
        "TestFileTier": "[0]",
        "TestPooledBodies": "[1]",
    },
    "test_a_system_call_that_fails_costs_caching_only": {
        "TestFileTier": f"[{errno.ENOSPC}]",
        "TestPooledBodies": f"[{errno.EIO}]",
    },
}
"""Which of the cases a tier has in `make test`: every second system call that a process is killed
at, and one error. Most are of code that both tiers have. `make chaos` has the other half."""


def is_another_classs(item: pytest.Item, name: str, suite: str) -> bool:
    """Whether all that a test goes through is what it goes through with another class."""
    if name in WRITERS_IN_OTHER_PROCESSES and suite in SAME_GRANTS:
        return True
    if name in WITHOUT_A_SESSION and suite in OF_THE_SAME_TRANSPORT:
        return True
    if name in HALF_OF_CALLS:
        return not item.name.endswith(HALF_OF_CALLS[name].get(suite, "]"))
    if name in IN_ANY_CASE and suite not in SAME_LINK:
        return False
    function = getattr(item, "function", None)
    module = getattr(function, "__module__", "")
    base, _, _ = getattr(function, "__qualname__", "").partition(".")
    others = {SUITES + each for each in SAME_CODE.get(suite, ())}
    return module in others or f"{module}.{base}" in others


@pytest.hookimpl(tryfirst=True)  # before those with the mark are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make chaos` tries beyond `make test`."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        suite = getattr(item.parent, "name", "")
        if item.nodeid.startswith("tests/contract/") and is_another_classs(item, name, suite):
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
