"""`mooncake` against the public contract; skipped where Mooncake does not load."""

import socket
import subprocess
from pathlib import Path

import pytest

from baton.clock import MachineClock
from baton.testing.transport_contract import NetworkReadingContract, NetworkTransportContract
from baton.transfer.transports.mooncake import session as session_module
from baton.transfer.transports.mooncake.session import MooncakeSession

pytestmark = pytest.mark.usefixtures("mooncake")


class TestMooncake(NetworkTransportContract, NetworkReadingContract):
    kind = "mooncake"
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


def test_its_process_does_not_know_the_cluster_key(monkeypatch):
    monkeypatch.setattr(session_module, "subprocess", subprocess)  # as it is started by users
    monkeypatch.setenv("BATON_CLUSTER_KEY", "0" * 64)
    session = MooncakeSession("127.0.0.1", "lo", protocol="tcp", devices="", clock=MachineClock())
    try:
        environ, variables = Path(f"/proc/{session._process.pid}/environ"), [b""]
        while not any(variable.startswith(b"PATH=") for variable in variables):
            variables = environ.read_bytes().split(b"\0")  # empty until the program runs
        assert not any(variable.startswith(b"BATON_CLUSTER_KEY") for variable in variables)
    finally:
        session.close()
