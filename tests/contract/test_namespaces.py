"""Every transport that works between hosts, between two network namespaces."""

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from baton.errors import TransferError
from baton.testing.network_namespaces import NoNamespaceError, far_host, move_thread_into, run
from baton.testing.transport_contract import NamespaceContract
from baton.transfer.endpoints import find_interface


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


def test_an_interface_is_found_by_each_of_its_addresses():
    try:
        with far_host() as host, ThreadPoolExecutor(1) as there:
            there.submit(move_thread_into, host.name).result()
            for address in ("10.9.9.5/24", "10.9.9.7/24"):
                run("ip", "-n", host.name, "addr", "add", address, "dev", host.far_link)
            label = f"{host.far_link}:1"
            run("ip", "-n", host.name, "addr", "add", "10.9.9.8/24", "dev", host.far_link,
                "label", label)  # fmt: skip
            for address in (host.address, "10.9.9.5", "10.9.9.7", "10.9.9.8"):
                assert there.submit(find_interface, address, None).result() == host.far_link
            with pytest.raises(TransferError, match=r"no network interface .* 10\.9\.9\.6"):
                there.submit(find_interface, "10.9.9.6", None).result()
    except NoNamespaceError as exc:
        pytest.skip(str(exc))
