"""Every installed transport against the public contract."""

import socket

from baton.testing.transport_contract import NetworkTransportContract
from baton.transfer.interface import TRANSPORTS


class TestShared(NetworkTransportContract):
    kind = "shared"
    peer_writes = True

    def connect_stranger(self, descriptor):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(5)
        stranger.connect(b"\0" + descriptor.endpoint.encode())
        return stranger


class TestTcp(NetworkTransportContract):
    kind = "tcp"
    peer_writes = False

    def connect_stranger(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


def test_every_installed_transport_runs_the_contract():
    tested = {suite.kind for suite in NetworkTransportContract.__subclasses__()}
    assert tested >= set(TRANSPORTS.kinds())
