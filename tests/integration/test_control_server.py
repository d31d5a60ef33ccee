"""The control server of a vLLM rank, over real sockets."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry
from yarl import URL

from baton.auth.credentials import Credentials
from baton.engines.vllm.control import ControlServer, RankView
from baton.events.journal import CacheJournal
from baton.ids import Epoch, TicketId
from baton.protocol.worker_http import MeasuredLinks, WorkerInfo, abort_path
from baton.telemetry.trace import TraceRing
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_AT_ONCE = 200
BODY = b'{"reason": "its client left"}'


async def no_links() -> MeasuredLinks:
    return MeasuredLinks(())


def no_info() -> WorkerInfo:
    raise NotImplementedError


class Served:
    """A control server that answers, and the tickets whose aborts have reached its rank."""

    def __init__(self) -> None:
        self.aborted: list[TicketId] = []
        self.server = ControlServer("127.0.0.1", 0, credentials=Credentials.generate(), tls=None)
        view = RankView(
            info=no_info,
            is_alive=lambda: True,
            occupancy=lambda: None,
            store_loads=lambda: None,
            abort_from_peer=lambda ticket, _: self.aborted.append(ticket),
            links=no_links,
            traces=TraceRing(4),
            transfers=TransferTable(Epoch("0" * 32), ManualClock()),
            registry=CollectorRegistry(),
            journal=CacheJournal(),
        )
        self.server.start(view)


@pytest.fixture(name="served")
def served_fixture() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.server.stop()


def test_aborts_of_many_handoffs_that_end_at_once_all_arrive(served: Served) -> None:
    """Each over a connection of its own, as gateways before the bound on theirs send them."""
    address = "127.0.0.1", URL(served.server.url).port
    tickets = [TicketId(number.to_bytes(16, "big")) for number in range(NUM_AT_ONCE)]
    with ExitStack() as opened:
        clients = [
            opened.enter_context(closing(socket.create_connection(address, timeout=10)))
            for _ in tickets
        ]
        for client, ticket in zip(clients, tickets, strict=True):
            head = f"POST {abort_path(ticket)} HTTP/1.1\r\ncontent-length: {len(BODY)}\r\n\r\n"
            client.sendall(head.encode() + BODY)
        answers = [client.recv(4096) for client in clients]
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 204"}
    assert sorted(served.aborted) == tickets
