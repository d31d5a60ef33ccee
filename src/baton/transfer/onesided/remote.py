"""The initiating end: one peer's region, written or read by this side's engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.ids import TicketId
from baton.transfer.framing import encode_frame
from baton.transfer.interface import Attached as AttachedEvent
from baton.transfer.interface import (
    ReadCompleted,
    ReadFailed,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.messages import encode
from baton.transfer.onesided.wire import (
    Attach,
    Attached,
    Moving,
    Notice,
    Resting,
    decode_first_from_owner,
    decode_from_owner,
)
from baton.transfer.window_messages import (
    MAX_BODY_BYTES,
    Ask,
    Close,
    Closed,
    NotAttached,
    NotOpen,
    Opened,
    Released,
    unpack_pages,
)
from baton.transfer.windows import PageSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.ids import Epoch
    from baton.kv.copies import PageCopies
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.onesided.engine import Engine, Library
    from baton.transfer.reactor import Reactor

MAX_WINDOWS: Final = 65_536
MAX_WINDOW_PAGES: Final = 1 << 24
"""Of all windows of one remote: what a peer can make this side remember."""
FAREWELL_TIMEOUT_S: Final = 5.0

logger: Final = logging.getLogger(__name__)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _Held:
    """A checked write whose window has not been heard of yet."""

    transfer: TransferId
    write: PageWrite
    region: PagedRegion


@dataclass(frozen=True, slots=True)
class _Write(Generic[M]):
    """A write, under way."""

    transfer: TransferId
    write: PageWrite
    movement: M


@dataclass(frozen=True, slots=True)
class _Read(Generic[M]):
    """A checked read, under way."""

    transfer: TransferId
    copies: PageCopies
    movement: M


class Remote(Generic[M]):
    """A peer's region as this side sees it: attaching, attached or lost.

    A notice leaves once the engine says that its pages are in place, and `Closed` once nothing
    posted into that window is under way. An engine that fails loses the remote. Owner thread: the
    transport's.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        epoch: Epoch,
        *,
        library: Library[M],
        reactor: Reactor,
    ) -> None:
        self.id, self.descriptor = id_, descriptor
        self._epoch, self._library, self._reactor = epoch, library, reactor
        self._connection: Connection | None = None
        self._engine: Engine[M] | None = None
        self._windows: dict[TicketId, PageSet] = {}
        self._num_window_pages = 0
        self._closing: set[TicketId] = set()
        self._held: dict[TicketId, list[_Held]] = {}
        self._posted: dict[TransferId, _Write[M] | _Read[M]] = {}
        self._unsent: dict[TransferId, int] = {}
        self._said_moving = False
        self._loss: TransferError | None = None

    @property
    def is_attaching(self) -> bool:
        """Neither attached nor lost yet."""
        return self._engine is None and self._loss is None

    @property
    def is_moving(self) -> bool:
        """Whether the engine has something under way."""
        return bool(self._posted)

    def own(self, connection: Connection) -> None:
        """The connection that is being opened: closed with this remote."""
        self._connection = connection

    def begin(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        connection.become(self._read_first, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Begin a checked write, or hold it until its window is heard of."""
        self._listen()
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
            return
        held = _Held(transfer, write, region)
        window = self._windows.get(write.window)
        if window is None:
            self._hold(held)
        else:
            self._carry_out(held, window)

    def read(self, transfer: TransferId, copies: PageCopies, region: PagedRegion) -> None:
        """Begin a checked read."""
        self._listen()
        if self._loss is not None or self._engine is None:
            error = self._loss or TransferError("this remote is not attached yet")
            self._reactor.report(ReadFailed(transfer, error))
            return
        try:
            movement = self._engine.post("read", region, copies)
        except TransferError as exc:
            self._reactor.report(ReadFailed(transfer, PeerLostError(str(exc))))
            self._fail(exc)
            return
        self._posted[transfer] = _Read(transfer, copies, movement)
        self.advance()

    def advance(self) -> None:
        """Make progress; report what is done."""
        if self._engine is None:
            return
        try:
            for posted in list(self._posted.values()):
                if self._loss is not None:  # the peer was lost, telling it of the one before
                    return
                if self._engine.is_done(posted.movement):
                    del self._posted[posted.transfer]
                    self._finish(posted)
        except TransferError as exc:
            self._fail(exc)
            return
        self._say_whether_moving()

    def _fail(self, cause: TransferError) -> None:
        """The engine is of no more use: end the connection too."""
        error = PeerLostError(str(cause))  # a fresh one: the frames of the cause hold the engine
        if self._connection is not None and self._connection.is_open:
            self._connection.fail(error)
        else:
            self.lose(error)

    def lose(self, error: TransferError) -> None:
        """The peer is gone: report it and every transfer that was not done, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done: let go of the peer's memory, and say so; unfinished transfers fail."""
        if self._loss is not None:
            return
        has_let_go = self._end(PeerLostError("the remote was detached"))
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        if not has_let_go:
            connection.close()  # the owner waits for the end of this process
            return
        connection.become(_ignore_bodies, _ignore_loss)
        connection.fail_after(FAREWELL_TIMEOUT_S, "the peer's farewell")
        connection.send_body(encode(Released()))

    @property
    def is_gone(self) -> bool:
        """Nothing is left of it, not even an unfinished farewell."""
        return self._loss is not None and (self._connection is None or not self._connection.is_open)

    def close(self) -> None:
        """Detach, and do not wait for the peer to answer the farewell."""
        self.detach()
        if self._connection is not None:
            self._connection.close()

    def _listen(self) -> None:
        """The window may just have been opened, or closed; the peer may just have gone."""
        if self._connection is not None and self._loss is None:
            self._connection.step()

    def _end(self, error: TransferError) -> bool:
        """Close the engine, so that nothing moves any more; then report what did not get done.

        Returns:
            Whether it is certain that nothing moves.
        """
        self._loss = error
        self._windows.clear()
        self._closing.clear()
        posted, self._posted = list(self._posted.values()), {}
        engine, self._engine = self._engine, None
        has_let_go = engine is None or _has_closed(engine)
        for each in posted:
            failed = WriteFailed if isinstance(each, _Write) else ReadFailed
            self._reactor.report(failed(each.transfer, error))
        held = [each.transfer for waiting in self._held.values() for each in waiting]
        for transfer in (*self._unsent, *held):
            self._reactor.report(WriteFailed(transfer, error))
        self._unsent.clear()
        self._held.clear()
        return has_let_go

    def _hold(self, held: _Held) -> None:
        """Keep a write until the peer has said whether its window is open."""
        waiting = self._held.setdefault(held.write.window, [])
        waiting.append(held)
        if len(waiting) == 1 and self._connection is not None:
            self._connection.send_body(encode(Ask(held.write.window)))

    def _carry_out(self, held: _Held, window: PageSet) -> None:
        copies = held.write.copies
        if not all(window.covers(group.dst_pages) for group in copies.groups):
            error = TransferError("a page is outside the window")
            self._reactor.report(WriteFailed(held.transfer, error))
            return
        if self._engine is None:
            raise TransferError("this remote is not attached yet")
        try:
            movement = self._engine.post("write", held.region, copies)
        except TransferError as exc:
            self._reactor.report(WriteFailed(held.transfer, PeerLostError(str(exc))))
            self._fail(exc)
            return
        self._posted[held.transfer] = _Write(held.transfer, held.write, movement)
        self.advance()

    def _finish(self, done: _Write[M] | _Read[M]) -> None:
        if isinstance(done, _Read):
            self._reactor.report(ReadCompleted(done.transfer, done.copies.num_bytes))
            return
        self._unsent[done.transfer] = done.write.copies.num_bytes
        if self._connection is not None:
            self._connection.send_batches(self._notice_batches(done.transfer, done.write))
            self._connection.flush()
        self._answer_close(done.write.window)

    def _notice_batches(self, transfer: TransferId, write: PageWrite) -> Iterator[list[memoryview]]:
        yield [memoryview(encode_frame(encode(Notice(write.window, write.notice))))]
        num_bytes = self._unsent.pop(transfer, None)
        if num_bytes is not None:
            self._reactor.report(WriteCompleted(transfer, num_bytes))

    def _answer_close(self, window: TicketId) -> None:
        """Say `Closed` if the peer asked for it and nothing is under way there."""
        if window not in self._closing or self._connection is None:
            return
        for posted in self._posted.values():
            if isinstance(posted, _Write) and posted.write.window == window:
                return
        self._closing.discard(window)
        self._connection.send_body(encode(Closed(window)))

    def _say_whether_moving(self) -> None:
        if self._connection is not None and self.is_moving != self._said_moving:
            self._said_moving = self.is_moving
            self._connection.send_body(encode(Moving() if self.is_moving else Resting()))

    def _read_first(self, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None or self._connection is None:
            return
        match decode_first_from_owner(body):
            case Attached(arrays, introduction):
                if arrays != self.descriptor.arrays:
                    raise ProtocolError("the peer's region is not what its description says")
                engine = self._library.open_engine()
                try:
                    engine.meet(introduction, self.descriptor)
                except TransferError:
                    engine.close()
                    raise
                self._engine = engine
                self._connection.settle()
                self._connection.become(self._read, self.lose)
                self._reactor.report(AttachedEvent(self.id))
            case NotAttached(reason):
                raise PeerUnreachableError(f"the peer refused to attach: {reason}")
            case unknown:
                assert_never(unknown)

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_owner(body):
                case Opened(window, packed):
                    self._open_window(TicketId(window), PageSet(unpack_pages(packed)))
                case Close(window):
                    self._close_window(TicketId(window))
                case NotOpen(window):
                    self._refuse_held(TicketId(window))
                case unknown:
                    assert_never(unknown)

    def _open_window(self, window: TicketId, pages: PageSet) -> None:
        self._num_window_pages += len(pages)
        if len(self._windows) >= MAX_WINDOWS or self._num_window_pages > MAX_WINDOW_PAGES:
            raise ProtocolError("the peer opened more windows than can be remembered")
        if window in self._windows or window in self._closing:
            raise ProtocolError("the peer opened a window twice")
        self._windows[window] = pages
        for held in self._held.pop(window, []):
            self._carry_out(held, pages)

    def _refuse_held(self, window: TicketId) -> None:
        error = TransferError("the window is not open")
        for held in self._held.pop(window, []):
            self._reactor.report(WriteFailed(held.transfer, error))

    def _close_window(self, window: TicketId) -> None:
        pages = self._windows.pop(window, None)
        if pages is None:
            raise ProtocolError("the peer closed a window that it had not opened")
        self._num_window_pages -= len(pages)
        self._closing.add(window)
        self._answer_close(window)


def _has_closed(engine: Engine[Any]) -> bool:
    try:
        engine.close()
    except TransferError:
        logger.exception("what was posted may still be moving: its peer waits for this process")
        return False
    return True


def _ignore_bodies(channel: Channel) -> None:
    channel.receive_bodies()


def _ignore_loss(error: TransferError) -> None:
    del error
