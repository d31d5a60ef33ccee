"""The windows that a peer opened to this side, and the writes that wait to hear of one.

Of `shared` and of every one-sided transport: there a writer must know by itself what it may store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar, assert_never

from baton.errors import ProtocolError, TransferError
from baton.ids import TicketId
from baton.transfer.interface import WriteFailed
from baton.transfer.messages import encode
from baton.transfer.window_messages import Ask, Close, NotOpen, Opened, Released, unpack_pages
from baton.transfer.windows import PageSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import PageWrite, TransferId
    from baton.transfer.reactor import Reactor
    from baton.transfer.window_messages import FromOwner

MAX_WINDOWS: Final = 65_536
MAX_WINDOW_PAGES: Final = 1 << 24
"""Of all windows of one remote: what a peer can make this side remember."""
FAREWELL_TIMEOUT_S: Final = 5.0

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Submitted(Generic[S]):
    """A checked write, and where its bytes are."""

    transfer: TransferId
    write: PageWrite
    source: S


class PeerWindows(Generic[S]):
    """Of one remote. Owner thread: the transport's.

    `begin` is called with each write that lies in an open window, within `submit` or when the peer
    says that its window is open.
    """

    def __init__(self, reactor: Reactor, begin: Callable[[Submitted[S]], None]) -> None:
        self._reactor, self._begin = reactor, begin
        self._open: dict[TicketId, PageSet] = {}
        self._num_pages = 0
        self._closing: set[TicketId] = set()
        self._held: dict[TicketId, list[Submitted[S]]] = {}

    def submit(self, submitted: Submitted[S], connection: Connection | None) -> None:
        """Begin a write; or keep it, and ask the peer whether its window is open."""
        window = submitted.write.window
        pages = self._open.get(window)
        if pages is not None:
            self._begin_within(submitted, pages)
            return
        waiting = self._held.setdefault(window, [])
        waiting.append(submitted)
        if len(waiting) == 1 and connection is not None:
            connection.send_body(encode(Ask(window)))

    def heard(self, message: FromOwner) -> TicketId | None:
        """What the peer says; the window that it wants to be closed, if that is it.

        Raises:
            ProtocolError: it opened too many, or one twice, or closed one that was not open.
        """
        match message:
            case Opened(window, packed):
                self._opened(TicketId(window), PageSet(unpack_pages(packed)))
            case NotOpen(window):
                error = TransferError("the window is not open")
                for held in self._held.pop(TicketId(window), []):
                    self._reactor.report(WriteFailed(held.transfer, error))
            case Close(window):
                return self._close(TicketId(window))
            case unknown:
                assert_never(unknown)
        return None

    def is_closing(self, window: TicketId) -> bool:
        """Whether the peer waits to hear that this window is closed."""
        return window in self._closing

    def told_closed(self, window: TicketId) -> None:
        """The peer was told; it may open the window again."""
        self._closing.discard(window)

    def end(self, error: TransferError) -> None:
        """Forget all of them; what was held fails."""
        self._open.clear()
        self._closing.clear()
        for held in [each for waiting in self._held.values() for each in waiting]:
            self._reactor.report(WriteFailed(held.transfer, error))
        self._held.clear()

    def _opened(self, window: TicketId, pages: PageSet) -> None:
        self._num_pages += len(pages)
        if len(self._open) >= MAX_WINDOWS or self._num_pages > MAX_WINDOW_PAGES:
            raise ProtocolError("the peer opened more windows than can be remembered")
        if window in self._open or window in self._closing:
            raise ProtocolError("the peer opened a window twice")
        self._open[window] = pages
        for held in self._held.pop(window, []):
            self._begin_within(held, pages)

    def _close(self, window: TicketId) -> TicketId:
        pages = self._open.pop(window, None)
        if pages is None:
            raise ProtocolError("the peer closed a window that it had not opened")
        self._num_pages -= len(pages)
        self._closing.add(window)
        return window

    def _begin_within(self, submitted: Submitted[S], window: PageSet) -> None:
        if all(window.covers(group.dst_pages) for group in submitted.write.copies.groups):
            self._begin(submitted)
        else:
            error = TransferError("a page is outside the window")
            self._reactor.report(WriteFailed(submitted.transfer, error))


def say_farewell(connection: Connection | None, *, has_let_go: bool) -> None:
    """Tell the owner that this side cannot write its pages any more, if that is true.

    Else the connection is closed, and the owner waits for the end of this process.
    """
    if connection is None or not connection.is_open:
        return
    if not has_let_go:
        connection.close()
        return
    connection.become(_ignore_bodies, _ignore_loss)
    connection.fail_after(FAREWELL_TIMEOUT_S, "the peer's farewell")
    connection.send_body(encode(Released()))


def _ignore_bodies(channel: Channel) -> None:
    channel.receive_bodies()


def _ignore_loss(error: TransferError) -> None:
    del error
