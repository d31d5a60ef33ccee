"""Tiers `host` that listen, in this process or another one, and what reads them."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from baton.auth.credentials import Credentials
from baton.clock import MachineClock
from baton.store.interface import TIERS, PeerAccess, TierContext
from baton.store.peer.client import PeerConnection
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import CONTRACT_KEY
from tests.free_ports import find_free_port
from tests.peer_server import PEER_KEY, access
from tests.store_servers import StoreServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Clock
    from baton.store.tiers.host import HostTier

PATIENT_S = 10.0


def open_host(
    *,
    access: PeerAccess | None = None,
    key: bytes = CONTRACT_KEY,
    clock: Clock | None = None,
    **options: object,
) -> HostTier:
    """A `host` tier that listens."""
    peers = access or PeerAccess(CREDENTIALS, serves=True)
    context = TierContext("contract", key, clock or MachineClock(), peers=peers)
    settings = {"listen": "127.0.0.1:0", "peers_may": "write"} | options
    return TIERS.build("host", settings)(context)  # type: ignore[return-value]


CREDENTIALS = Credentials.of(PEER_KEY)


def url_of(host: HostTier) -> str:
    assert host.address is not None
    return f"tcp://127.0.0.1:{host.address[1]}"


def open_peers(
    *urls: str, access: PeerAccess | None = None, clock: ManualClock | None = None, **options: Any
) -> Any:
    context = TierContext(
        "contract", CONTRACT_KEY, clock or ManualClock(), peers=access or PeerAccess(CREDENTIALS)
    )
    settings = {"urls": list(urls), "timeout_s": PATIENT_S} | options
    return TIERS.build("peer", settings)(context)


@contextmanager
def hosts(count: int, **options: object) -> Iterator[list[HostTier]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(open_host(**options))) for _ in range(count)]


def connect(host: HostTier) -> PeerConnection:
    assert host.address is not None
    sock = socket.create_connection(host.address, PATIENT_S)
    connection = PeerConnection(sock)
    connection.prove(access())
    return connection


class PeerServer(StoreServer):
    """A process that keeps values unchecked."""

    def __init__(self) -> None:
        port = find_free_port()
        super().__init__([sys.executable, "-m", "tests.peer_server", str(port)], port)

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"
