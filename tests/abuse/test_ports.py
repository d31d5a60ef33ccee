"""A port scan of a fleet that runs: workers answer strangers with refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.abuse.victims import running_victims
from tests.port_scan import check_refusals, find_listeners

if TYPE_CHECKING:
    from pathlib import Path


def test_strangers_are_refused_at_every_listener(tmp_path: Path) -> None:
    with running_victims(tmp_path) as victims:
        listeners = find_listeners(*victims.workers)
        # HTTP, handoffs and pages of both, and the sockets of `shared`.
        assert len(listeners) == 8, listeners
        check_refusals(listeners)
        (gateway,) = find_listeners(victims.gateway)
        assert gateway.address == victims.addresses.gateway_port
