"""Every transport that works between hosts, between two network namespaces."""

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

import pytest

from baton.testing.transport_contract import NamespaceContract


class TestTcp(NamespaceContract):
    kind = "tcp"
    options: ClassVar[Mapping[str, object]] = {"stall_timeout_s": 1.0}
    peer_writes = False
    notices_cuts = True


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
class TestNixl(NamespaceContract):
    kind = "nixl"
    options: ClassVar[Mapping[str, object]] = {"lanes": "network"}
    peer_writes = True
    notices_cuts = False


@pytest.mark.usefixtures("mooncake")
class TestMooncake(NamespaceContract):
    kind = "mooncake"
    peer_writes = True
    notices_cuts = False
