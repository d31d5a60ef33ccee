"""`nixl` against the public contract, by both kinds of lanes; skipped where NIXL is not installed."""

import importlib.util
import socket

import pytest

from baton.testing.transport_contract import NetworkTransportContract

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)


class TestNixlOnOneHost(NetworkTransportContract):
    kind = "nixl"
    peer_writes = True

    def connect_stranger(self, descriptor):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(5)
        stranger.connect(b"\0" + descriptor.endpoint.encode())
        return stranger


class TestNixlOverTheNetwork(NetworkTransportContract):
    kind = "nixl"
    options = {"lanes": "network"}
    peer_writes = True

    def connect_stranger(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)
