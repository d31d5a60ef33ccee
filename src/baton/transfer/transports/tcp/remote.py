"""The writing end: one peer's region, reached over several streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.transfer.interface import Attached as AttachedEvent
from baton.transfer.interface import RemoteLost, WriteCompleted, WriteFailed
from baton.transfer.messages import encode
from baton.transfer.transports.tcp.departure import departing_batches
from baton.transfer.transports.tcp.wire import (
    MAX_BODY_BYTES,
    Attach,
    Attached,
    Landed,
    NotAttached,
    Refused,
    decode_from_receiver,
)

if TYPE_CHECKING:
    from baton.ids import Epoch
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.reactor import Reactor


@dataclass(slots=True)
class _Stream:
    """One connection, and the writes on it that the receiver has not answered, by sequence."""

    connection: Connection
    unanswered: dict[int, tuple[TransferId, int]] = field(default_factory=dict)
    is_attached: bool = False

    @property
    def num_unanswered_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.unanswered.values())


class Remote:
    """A peer's region as this writer sees it: attaching, attached or lost.

    It is lost as a whole when one of its streams is: a peer that is half there is not trusted to
    answer. Owner thread: the transport's.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        epoch: Epoch,
        *,
        num_streams: int,
        reactor: Reactor,
    ) -> None:
        self.id, self.descriptor = id_, descriptor
        self._epoch, self._num_streams, self._reactor = epoch, num_streams, reactor
        self._streams: list[_Stream] = []
        self._connections: list[Connection] = []
        self._next_sequence = 0
        self._loss: TransferError | None = None

    @property
    def is_attaching(self) -> bool:
        """Neither attached, by every stream, nor lost yet."""
        num_attached = sum(stream.is_attached for stream in self._streams)
        return num_attached < self._num_streams and self._loss is None

    def own(self, connection: Connection) -> None:
        """Close this connection with the rest, whatever becomes of it."""
        self._connections.append(connection)
        if self._loss is not None:
            connection.close()

    def add_stream(self, connection: Connection) -> None:
        """Both ends of this connection have proved themselves: ask for the region."""
        stream = _Stream(connection)
        self._streams.append(stream)
        connection.become(lambda channel: self._read(stream, channel), self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Send a checked write over the stream that has the least to do."""
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
            return
        stream = min(self._streams, key=lambda each: each.num_unanswered_bytes)
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        stream.unanswered[sequence] = (transfer, write.copies.num_bytes)
        stream.connection.send_batches(departing_batches(write, region, sequence))
        stream.connection.flush()

    def lose(self, error: TransferError) -> None:
        """The peer is gone, or one of its streams: report it and every unanswered write, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done with the peer: unanswered writes fail."""
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))

    def _end(self, error: TransferError) -> None:
        self._loss = error
        for connection in self._connections:
            connection.close()
        for stream in self._streams:
            for transfer, _ in stream.unanswered.values():
                self._reactor.report(WriteFailed(transfer, error))
            stream.unanswered.clear()

    def _read(self, stream: _Stream, channel: Channel) -> None:
        for body in channel.receive_bodies():
            self._take(stream, body)

    def _take(self, stream: _Stream, body: bytes) -> None:
        match decode_from_receiver(body):
            case Attached(arrays) if not stream.is_attached:
                if arrays != self.descriptor.arrays:
                    raise ProtocolError("the peer's region is not what its description says")
                stream.is_attached = True
                stream.connection.settle()
                if not self.is_attaching:
                    self._reactor.report(AttachedEvent(self.id))
            case NotAttached(reason) if not stream.is_attached:
                raise PeerUnreachableError(f"the peer refused to attach: {reason}")
            case Landed(sequence) if sequence in stream.unanswered:
                transfer, num_bytes = stream.unanswered.pop(sequence)
                self._reactor.report(WriteCompleted(transfer, num_bytes))
            case Refused(sequence, reason) if sequence in stream.unanswered:
                transfer, _ = stream.unanswered.pop(sequence)
                error = TransferError(f"the peer refused the write: {reason}")
                self._reactor.report(WriteFailed(transfer, error))
            case Attached() | NotAttached() | Landed() | Refused():
                raise ProtocolError("the peer answered what was not asked")
            case unknown:
                assert_never(unknown)
