"""`nixl` against the public contract, over both kinds of lanes; skipped without NIXL."""

import importlib.util
import socket
from collections.abc import Mapping
from typing import ClassVar

import pytest

from baton.testing.transport_contract import (
    NetworkReadingContract,
    NetworkTransportContract,
    ReadingContract,
)
from baton.testing.transport_contract.writing import WriteContract
from baton.transfer.transports.nixl import session

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)


class TestNixlOnOneHost(NetworkTransportContract, NetworkReadingContract):
    kind = "nixl"
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock


class TestNixlOverTheNetwork(NetworkTransportContract, NetworkReadingContract):
    kind = "nixl"
    options: ClassVar[Mapping[str, object]] = {"lanes": "network"}
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)


class TestNixlWithoutPreparedLists(WriteContract, ReadingContract):
    """Arrays too large for prepared lists: descriptors are made for each transfer."""

    kind = "nixl"
    peer_writes = True

    @pytest.fixture(autouse=True)
    def nothing_is_prepared(self, monkeypatch):
        monkeypatch.setattr(session, "MAX_LIST_ITEMS", 0)
        monkeypatch.setattr(session.NixlSession, "_select", None)
