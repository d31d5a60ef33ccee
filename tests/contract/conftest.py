"""Processes that the suites start, and Mooncake's, are forked with their modules loaded."""

from __future__ import annotations

import pytest

from baton.testing.transport_contract import process
from baton.transfer.transports.mooncake import session
from tests.forked_module import ForkingSubprocess


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    ForkingSubprocess.ensure_running()  # before a test counts its descriptors
    for module in (process, session):
        monkeypatch.setattr(module, "subprocess", ForkingSubprocess)
