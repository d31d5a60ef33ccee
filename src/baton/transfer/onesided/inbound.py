"""The owner's end of one connection: one peer's messages, and whether it can still write here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, assert_never

from baton.errors import TransferError
from baton.ids import TicketId
from baton.net.endpoints import open_peer_process
from baton.transfer.grant_messages import (
    CloseGrant,
    GrantClosed,
    GrantNotOpen,
    GrantOpened,
    MemoryReleased,
    QueryGrant,
    pack_pages,
)
from baton.transfer.interface import Arrived
from baton.transfer.messages import encode
from baton.transfer.onesided.wire import (
    Attached,
    TransfersActive,
    TransfersIdle,
    WriteNotification,
    decode_from_peer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.grant_ledger import GrantLedger, WriterId
    from baton.transfer.interface import PagedRegion, WriteGrant
    from baton.transfer.onesided.session import OneSidedSession
    from baton.transfer.reactor import Reactor

MAX_FINAL_STEPS: Final = 64


class OneSidedInbound:
    """One peer that may write into, or read, this side's memory. Owner thread: the transport's.

    With the connection ends the engine that served it. Where the peer has a hand of its own in
    this memory (`peer_process_writes`), this outlives the connection until the peer's process is
    dead. `on_over` is called once, when nothing of it can land any more.
    """

    def __init__(
        self,
        writer: WriterId,
        connection: Connection,
        session: OneSidedSession[Any],
        *,
        ledger: GrantLedger,
        reactor: Reactor,
        on_over: Callable[[WriterId], None],
    ) -> None:
        self._writer, self._connection, self._session = writer, connection, session
        self._ledger, self._reactor, self._on_over = ledger, reactor, on_over
        self._process = (
            open_peer_process(connection.channel.socket) if session.peer_process_writes else None
        )
        if self._process is not None:
            reactor.watch(self._process, self._process_ended)
        self.is_active = False
        """The peer's transfers are under way, as far as it says."""

    def send_attached(self, region: PagedRegion, metadata: bytes, grants: list[WriteGrant]) -> None:
        """Send the memory's description and the grants that are already open."""
        self._connection.cancel_deadline()
        self._connection.set_handlers(self._read, self._disconnected)
        self._connection.send_body(encode(Attached(region.arrays, metadata)))
        for grant in grants:
            self.send_grant_opened(grant)

    def send_grant_opened(self, grant: WriteGrant) -> None:
        """The peer may write into this grant from now on."""
        self._connection.send_body(encode(GrantOpened(grant.id, pack_pages(grant.pages))))

    def send_close_grant(self, grant: TicketId) -> None:
        """The peer must start no other write into this grant, and report when none is in flight."""
        self._connection.send_body(encode(CloseGrant(grant)))

    def serve(self) -> None:
        """Give the library its turn."""
        try:
            self._session.serve()
        except TransferError as exc:
            self._connection.fail(exc)

    def close(self) -> None:
        """Stop serving and watching: nothing is known of this peer from now on. Idempotent."""
        self.is_active = False
        self._connection.close()
        self._session.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_peer(body):
                case WriteNotification(grant, notification):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case QueryGrant(grant):
                    self._answer(TicketId(grant))
                case GrantClosed(grant):
                    self._ledger.confirm_closed(self._writer, TicketId(grant))
                case TransfersActive() | TransfersIdle() as message:
                    self.is_active = isinstance(message, TransfersActive)
                case MemoryReleased():
                    self._finish()
                    return
                case unknown:
                    assert_never(unknown)

    def _answer(self, grant: TicketId) -> None:
        """If the grant was opened, `GrantOpened` is on its way already: nothing else to say."""
        if not self._ledger.admits(self._writer, grant):
            self._connection.send_body(encode(GrantNotOpen(grant)))

    def _disconnected(self, error: TransferError) -> None:
        del error  # that the peer is out of reach does not tell whether its own hand still writes
        self.is_active = False
        self._session.close()
        if not self._session.peer_process_writes or not self._ledger.disconnect(self._writer):
            self._finish()

    def _process_ended(self) -> None:
        """The process is dead. What it sent before still counts."""
        for _ in range(MAX_FINAL_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)
