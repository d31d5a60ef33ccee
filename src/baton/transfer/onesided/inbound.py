"""The owner's end of one connection: what one peer says, and whether it can still store here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, assert_never

from baton.errors import TransferError
from baton.ids import TicketId
from baton.transfer.interface import Arrived
from baton.transfer.messages import encode
from baton.transfer.onesided.wire import Attached, Moving, Notice, Resting, decode_from_peer
from baton.transfer.processes import open_peer_process
from baton.transfer.window_messages import Ask, Close, Closed, NotOpen, Opened, Released, pack_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import PagedRegion, Window
    from baton.transfer.ledger import WindowLedger, WriterId
    from baton.transfer.onesided.engine import Engine
    from baton.transfer.reactor import Reactor

MAX_LAST_WORDS_STEPS: Final = 64


class Inbound:
    """One peer that may write into, or read, this side's memory. Owner thread: the transport's.

    With the connection ends the engine that served it. Where the peer has a hand of its own in
    this memory (`peers_hand`), this outlives the connection until the peer's process is dead.
    `on_over` is called once, when nothing of it can land any more.
    """

    def __init__(
        self,
        writer: WriterId,
        connection: Connection,
        engine: Engine[Any],
        *,
        ledger: WindowLedger,
        reactor: Reactor,
        on_over: Callable[[WriterId], None],
    ) -> None:
        self._writer, self._connection, self._engine = writer, connection, engine
        self._ledger, self._reactor, self._on_over = ledger, reactor, on_over
        self._process = open_peer_process(connection.channel.socket) if engine.peers_hand else None
        if self._process is not None:
            reactor.watch(self._process, self._mourn)
        self.is_moving = False
        """The peer's transfers are under way, as far as it says."""

    def welcome(self, region: PagedRegion, introduction: bytes, windows: list[Window]) -> None:
        """Tell of the memory, and of the windows that are open already."""
        self._connection.settle()
        self._connection.become(self._read, self._disconnected)
        self._connection.send_body(encode(Attached(region.arrays, introduction)))
        for window in windows:
            self.tell_open(window)

    def tell_open(self, window: Window) -> None:
        """The peer may write into this window from now on."""
        self._connection.send_body(encode(Opened(window.id, pack_pages(window.pages))))

    def ask_close(self, window: TicketId) -> None:
        """The peer must begin no other write into this window, and say when none is under way."""
        self._connection.send_body(encode(Close(window)))

    def serve(self) -> None:
        """Give the library its turn."""
        try:
            self._engine.serve()
        except TransferError as exc:
            self._connection.fail(exc)

    def close(self) -> None:
        """Stop serving and watching: nothing is known of this peer from now on. Idempotent."""
        self.is_moving = False
        self._connection.close()
        self._engine.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_peer(body):
                case Notice(window, notice):
                    if self._ledger.admits(self._writer, TicketId(window)):
                        self._reactor.report(Arrived(TicketId(window), notice))
                case Ask(window):
                    self._answer(TicketId(window))
                case Closed(window):
                    self._ledger.confirm_closed(self._writer, TicketId(window))
                case Moving() | Resting() as said:
                    self.is_moving = isinstance(said, Moving)
                case Released():
                    self._finish()
                    return
                case unknown:
                    assert_never(unknown)

    def _answer(self, window: TicketId) -> None:
        """If the window was opened, `Opened` is on its way already: nothing else to say."""
        if not self._ledger.admits(self._writer, window):
            self._connection.send_body(encode(NotOpen(window)))

    def _disconnected(self, error: TransferError) -> None:
        del error  # that the peer is out of reach does not tell whether its own hand still writes
        self.is_moving = False
        self._engine.close()
        if not self._engine.peers_hand or not self._ledger.disconnect(self._writer):
            self._finish()

    def _mourn(self) -> None:
        """The process is dead. What it said before still counts."""
        for _ in range(MAX_LAST_WORDS_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)
