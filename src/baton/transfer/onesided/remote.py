"""The initiating end: one peer's region, written or read by this side's engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
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
from baton.transfer.peer_windows import PeerWindows, Submitted, say_farewell
from baton.transfer.window_messages import (
    MAX_BODY_BYTES,
    Closed,
    NotAttached,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.ids import Epoch, TicketId
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

logger: Final = logging.getLogger(__name__)

M = TypeVar("M")


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
        self._windows: PeerWindows[PagedRegion] = PeerWindows(reactor, self._carry_out)
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
        self._windows.submit(Submitted(transfer, write, region), self._connection)

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
        say_farewell(self._connection, has_let_go=has_let_go)

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
        posted, self._posted = list(self._posted.values()), {}
        engine, self._engine = self._engine, None
        has_let_go = engine is None or _has_closed(engine)
        for each in posted:
            failed = WriteFailed if isinstance(each, _Write) else ReadFailed
            self._reactor.report(failed(each.transfer, error))
        for transfer in self._unsent:
            self._reactor.report(WriteFailed(transfer, error))
        self._unsent.clear()
        self._windows.end(error)
        return has_let_go

    def _carry_out(self, submitted: Submitted[PagedRegion]) -> None:
        transfer, write = submitted.transfer, submitted.write
        if self._engine is None:
            raise TransferError("this remote is not attached yet")
        try:
            movement = self._engine.post("write", submitted.source, write.copies)
        except TransferError as exc:
            self._reactor.report(WriteFailed(transfer, PeerLostError(str(exc))))
            self._fail(exc)
            return
        self._posted[transfer] = _Write(transfer, write, movement)
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
        if not self._windows.is_closing(window) or self._connection is None:
            return
        for posted in self._posted.values():
            if isinstance(posted, _Write) and posted.write.window == window:
                return
        self._windows.told_closed(window)
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
            closing = self._windows.heard(decode_from_owner(body))
            if closing is not None:
                self._answer_close(closing)


def _has_closed(engine: Engine[Any]) -> bool:
    try:
        engine.close()
    except TransferError:
        logger.exception("what was posted may still be moving: its peer waits for this process")
        return False
    return True
