"""The initiating end: one peer's region, written or read by this side's engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from baton.errors import BatonError, PeerLostError, TransferError
from baton.net.framing import encode
from baton.transfer.base_transport import Reactor, refused_to_attach
from baton.transfer.grant_messages import GrantClosed
from baton.transfer.interface import (
    PagedRegion,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteId,
    TransferId,
    WriteFailed,
)
from baton.transfer.messages import MAX_BODY_BYTES, NotAttached
from baton.transfer.onesided.wire import (
    Attach,
    Attached,
    TransfersActive,
    TransfersIdle,
    WriteNotification,
    decode_first_from_owner,
    decode_from_owner,
)
from baton.transfer.peer_writes import PeerWritesRemote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.ids import Epoch, TicketId
    from baton.kv.copies import PageCopies
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.onesided.session import Direction, Library, OneSidedSession

logger: Final = logging.getLogger(__name__)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class _Write(Generic[M]):
    """A write, under way."""

    transfer: TransferId
    write: PageWrite
    handle: M


@dataclass(frozen=True, slots=True)
class _Read(Generic[M]):
    """A checked read, under way."""

    transfer: TransferId
    copies: PageCopies
    handle: M


class OneSidedRemote(PeerWritesRemote, Generic[M]):
    """See `BaseRemote`.

    A notification leaves once the session reports that its pages are in place, and `GrantClosed`
    once nothing posted into that grant is in progress. A session that fails loses the remote.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        reactor: Reactor,
        *,
        epoch: Epoch,
        library: Library[M],
    ) -> None:
        super().__init__(id_, descriptor, reactor)
        self._epoch, self._library = epoch, library
        self._session: OneSidedSession[M] | None = None
        self._posted: dict[TransferId, _Write[M] | _Read[M]] = {}
        self._is_active_sent = False

    @property
    def is_active(self) -> bool:
        """Whether the engine has something under way."""
        return bool(self._posted)

    def send_attach(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        connection.set_handlers(self._read_first, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle)))

    def read(self, transfer: TransferId, copies: PageCopies, region: PagedRegion) -> None:
        """Begin a checked read."""
        self._poll_inbound()
        if self._loss is not None or self._session is None:
            error = self._loss or TransferError("this remote is not attached yet")
            self._reactor.report(ReadFailed(transfer, error))
            return
        handle = _post(self._session, "read", region, copies)
        if isinstance(handle, PeerLostError):
            self._reactor.report(ReadFailed(transfer, handle))
            self._fail(handle)
            return
        self._posted[transfer] = _Read(transfer, copies, handle)
        self.advance()

    def advance(self) -> None:
        """Make progress; report what is done."""
        error = self._finish_done()
        if error is not None:
            self._fail(error)
        self._send_activity()

    def _finish_done(self) -> PeerLostError | None:
        """Report what is done; an error of the session, as of `_post`."""
        try:
            for posted in list(self._posted.values()):
                if self._session is None:  # the peer was lost while the one before was reported
                    break
                if self._session.is_done(posted.handle):
                    del self._posted[posted.transfer]
                    self._finish(posted)
        except TransferError as exc:
            return PeerLostError(str(exc))
        return None

    def _fail(self, error: PeerLostError) -> None:
        """The engine is of no more use: lose the remote, and give the peer its memory back.

        The end of the connection alone would prove nothing to a peer that waits for this process.
        No cause of `error` may be in flight: its frames hold the engine, which has to end first.
        """
        if self._loss is None:
            self.lose(error)
            self._send_memory_released()

    def _poll_inbound(self) -> None:
        """Before a transfer: a grant may just have been opened or closed, or the peer be lost."""
        if self._connection is not None and self._loss is None:
            self._connection.step()

    def _release_memory(self, error: TransferError) -> bool:
        """Close the session, so that nothing moves any more; then report what was posted."""
        posted, self._posted = list(self._posted.values()), {}
        session, self._session = self._session, None
        is_released = session is None or _has_closed(session)
        for each in posted:
            failed = WriteFailed if isinstance(each, _Write) else ReadFailed
            self._reactor.report(failed(each.transfer, error))
        return is_released

    def _start_write(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        if self._session is None:
            raise TransferError("this remote is not attached yet")
        handle = _post(self._session, "write", region, write.copies)
        if isinstance(handle, PeerLostError):
            self._reactor.report(WriteFailed(transfer, handle))
            self._fail(handle)
            return
        self._posted[transfer] = _Write(transfer, write, handle)
        self.advance()

    def _finish(self, done: _Write[M] | _Read[M]) -> None:
        if isinstance(done, _Read):
            self._reactor.report(ReadCompleted(done.transfer, done.copies.num_bytes))
            return
        self._unsent[done.transfer] = done.write.copies.num_bytes
        if self._connection is not None:
            self._connection.send_batches(self._notification_batches(done.transfer, done.write))
            self._connection.flush()
        self._answer_close(done.write.grant)

    def _notification_batches(
        self, transfer: TransferId, write: PageWrite
    ) -> Iterator[list[memoryview]]:
        if self._connection is not None:
            notification = encode(WriteNotification(write.grant, write.notification))
            yield [memoryview(self._connection.channel.seal(notification))]
        self._notification_sent(transfer)

    def _answer_close(self, grant: TicketId) -> None:
        """Send `GrantClosed` if the peer asked for it and nothing is in progress there."""
        if not self._grants.is_closing(grant) or self._connection is None:
            return
        for posted in self._posted.values():
            if isinstance(posted, _Write) and posted.write.grant == grant:
                return
        self._grants.mark_closed(grant)
        self._connection.send_body(encode(GrantClosed(grant)))

    def _send_activity(self) -> None:
        if self._session is None or not self._session.needs_serving:
            return
        if self._connection is not None and self.is_active != self._is_active_sent:
            self._is_active_sent = self.is_active
            self._connection.send_body(
                encode(TransfersActive() if self.is_active else TransfersIdle())
            )

    def _read_first(self, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None or self._connection is None:
            return
        match decode_first_from_owner(body):
            case Attached(arrays, metadata):
                self._check_arrays(arrays)
                session = self._open_session(metadata)
                if isinstance(session, PeerLostError):
                    self._fail(session)
                    return
                self._session = session
                self._connection.set_handlers(self._read, self.lose)
                self._set_attached()
            case NotAttached(reason):
                raise refused_to_attach(reason)
            case unknown:
                assert_never(unknown)

    def _open_session(self, metadata: bytes) -> OneSidedSession[M] | PeerLostError:
        """A session that knows the peer's region, or why there is none, as of `_post`.

        Raises:
            ProtocolError: the peer sent no metadata.
        """
        try:
            session = self._library.open_session()
            try:
                session.load_metadata(metadata, self.descriptor)
            except BatonError:  # ProtocolError, too
                session.close()
                raise
        except TransferError as exc:
            return PeerLostError(str(exc))
        return session

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            if self._loss is not None:  # a write that an earlier body began has failed
                return
            closing = self._grants.handle(decode_from_owner(body))
            if closing is not None:
                self._answer_close(closing)


def _post(
    session: OneSidedSession[M], direction: Direction, region: PagedRegion, copies: PageCopies
) -> M | PeerLostError:
    """Begin to move pages; an error is a fresh one: the frames of its cause hold the engine."""
    try:
        return session.post(direction, region, copies)
    except TransferError as exc:
        return PeerLostError(str(exc))


def _has_closed(session: OneSidedSession[Any]) -> bool:
    try:
        session.close()
    except TransferError:
        logger.exception("what was posted may still be moving: its peer waits for this process")
        return False
    return True
