"""The receiving end of one `shared` connection: one writer's messages, and whether it is alive."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, assert_never

from baton.ids import Epoch, TicketId
from baton.net.endpoints import open_peer_process
from baton.transfer.devices.coherence import settle_pages
from baton.transfer.devices.extents import find_extent
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
from baton.transfer.transports.shared.wire import Attached, WriteNotification, decode_from_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.errors import TransferError
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.grant_ledger import GrantLedger, WriterId
    from baton.transfer.interface import PagedRegion, WriteGrant
    from baton.transfer.reactor import Reactor
    from baton.transfer.transports.shared.wire import Attach

MAX_FINAL_STEPS: Final = 64


class SharedInbound:
    """One writer that has this side's memory. Owner thread: the transport's.

    It outlives its connection for as long as the writer's process might still store into a grant
    that it was told of: until it is dead, or attaches again and has let go of the old mapping.
    `on_over` is called once, then.
    """

    def __init__(
        self,
        writer: WriterId,
        attach: Attach,
        connection: Connection,
        ledger: GrantLedger,
        *,
        reactor: Reactor,
        on_over: Callable[[WriterId], None],
    ) -> None:
        self._writer, self._attach, self._connection = writer, attach, connection
        self._ledger, self._reactor, self._on_over = ledger, reactor, on_over
        self._region: PagedRegion | None = None
        self._process = open_peer_process(connection.channel.socket)
        if self._process is not None:
            reactor.watch(self._process, self.finish)  # it is dead

    def send_attached(self, region: PagedRegion, grants: list[WriteGrant]) -> None:
        """Send the memory and the grants that are already open."""
        self._region = region
        self._connection.cancel_deadline()
        self._connection.set_handlers(self._read, self._disconnected)
        extent = find_extent(region)
        if extent is not None:
            self._connection.send_body(encode(Attached(region.arrays, extent.extent.id)))
        elif region.fd is not None:
            self._connection.send_body_with_fd(encode(Attached(region.arrays)), region.fd)
        for grant in grants:
            self.send_grant_opened(grant)

    def send_grant_opened(self, grant: WriteGrant) -> None:
        """The writer may write into this grant from now on."""
        self._connection.send_body(encode(GrantOpened(grant.id, pack_pages(grant.pages))))

    def send_close_grant(self, grant: TicketId) -> None:
        """The writer must stop writing into this grant, and report it."""
        self._connection.send_body(encode(CloseGrant(grant)))

    def is_superseded_by(self, attach: Attach) -> bool:
        """Whether a later `Attach` proves that this mapping is gone."""
        mine = self._attach
        same = (attach.holder, attach.region) == (mine.holder, mine.region)
        return same and attach.is_only

    def open_process(self, epoch: Epoch) -> int | None:
        """A descriptor of the peer's process, if it is that life of a worker and can be watched."""
        if self._attach.epoch != epoch or self._process is None:
            return None
        return os.dup(self._process)

    def finish(self) -> None:
        """Proved: the writer stores nothing any more. What it sent before still counts."""
        for _ in range(MAX_FINAL_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def close(self) -> None:
        """Stop watching: nothing is known of this writer from now on. Idempotent."""
        self._connection.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_writer(body):
                case WriteNotification(grant, notification, layer, num_layers):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        self._settle(TicketId(grant), range(layer, layer + num_layers))
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case QueryGrant(grant):
                    # If it was opened, `GrantOpened` is on its way already, in front of any answer.
                    if not self._ledger.admits(self._writer, TicketId(grant)):
                        self._connection.send_body(encode(GrantNotOpen(grant)))
                case GrantClosed(grant):
                    self._ledger.confirm_closed(self._writer, TicketId(grant))
                case MemoryReleased():
                    self._finish()
                    return
                case unknown:
                    assert_never(unknown)

    def _settle(self, grant: TicketId, layers: range) -> None:
        """Nothing old of what was written is read; a writer that lies of it fails by digest."""
        if self._region is not None and layers.stop <= len(self._region.arrays):
            settle_pages(self._region, self._ledger.pages_of(grant), layers)

    def _disconnected(self, error: TransferError) -> None:
        del error  # that the writer is out of reach does not tell whether it still writes
        if not self._ledger.disconnect(self._writer):
            self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)
