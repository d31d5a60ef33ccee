"""`mooncake` against the public contract; skipped where Mooncake does not load."""

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from baton.clock import MachineClock
from baton.testing.transport_contract import NetworkReadingContract, NetworkTransportContract
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import whole_pages
from baton.transfer.interface import RemoteLost
from baton.transfer.transports.mooncake import session as session_module
from baton.transfer.transports.mooncake.session import MooncakeSession

pytestmark = pytest.mark.usefixtures("mooncake")


class TestMooncake(NetworkTransportContract, NetworkReadingContract):
    kind = "mooncake"
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


class TestMooncakeOverIpv6(TransportKit):
    kind = "mooncake"
    host = "::1"

    def test_a_write_arrives(self, pair):
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, [whole_pages([3], [4], PAGE_BYTES)])


class TestMooncakeOverRdma(TransportKit):
    kind = "mooncake"
    options: ClassVar[Mapping[str, object]] = {"protocol": "rdma", "connect_timeout_s": 20.0}

    @pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="it has RDMA devices")
    def test_without_a_device_no_peer_attaches_and_the_reason_arrives(self, pair):
        pair.writer.transport.attach(pair.reader.descriptor)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        (lost,) = pair.seen(RemoteLost)
        assert "no RDMA device can be used" in str(lost.error)


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
