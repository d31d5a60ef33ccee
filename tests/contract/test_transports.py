"""Every installed transport against the public contract."""

import socket
from pathlib import Path

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
    """Those that need a library have a module of their own, which is skipped without it."""
    tested = {suite.kind for suite in NetworkTransportContract.__subclasses__()}
    modules = {path.name for path in Path(__file__).parent.glob("test_*_transport.py")}
    elsewhere = {kind for kind in TRANSPORTS.kinds() if f"test_{kind}_transport.py" in modules}
    assert tested | elsewhere >= set(TRANSPORTS.kinds())
