"""What the contract suites share: processes that are forked, and whether Mooncake is here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.testing.transport_contract import process
from baton.transfer.transports.mooncake import session
from tests.forked_module import ForkingSubprocess


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
