"""The dialing end: one peer's region, reached over several streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.ids import new_region_handle
from baton.net.channel import ReadAhead
from baton.net.connection import count_moved_bytes
from baton.transfer.interface import (
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.messages import encode
from baton.transfer.scatter_gather import MAX_PART_BYTES, cut_parts
from baton.transfer.transports.tcp.addresses import fit_buffers
from baton.transfer.transports.tcp.send_path import (
    cut_stripes,
    outgoing_batches,
    whole_batch,
)
from baton.transfer.transports.tcp.stream import (
    MAX_FETCHES_IN_FLIGHT,
    FetchPart,
    PendingRead,
    TcpStream,
)
from baton.transfer.transports.tcp.wire import (
    MAX_BODY_BYTES,
    Attach,
    Attached,
    FetchServed,
    NotAttached,
    WriteLanded,
    WriteRefused,
    decode_from_listener,
)

if TYPE_CHECKING:
    from baton.ids import Epoch
    from baton.kv.copies import CopyGroup, PageCopies
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import (
        PageArray,
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.reactor import Reactor
    from baton.transfer.transports.tcp.options import TcpOptions


@dataclass(frozen=True, slots=True)
class _PostedWrite:
    """A write that the peer has not answered: what of it each of its streams carries."""

    transfer: TransferId
    num_bytes: int
    loads: tuple[tuple[TcpStream, int], ...]


class TcpRemote:
    """A peer's region as this side sees it: attaching, attached or lost.

    It is lost as a whole when one of its streams is: a peer that is half there is not trusted to
    answer. Owner thread: the transport's.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        epoch: Epoch,
        *,
        options: TcpOptions,
        reactor: Reactor,
    ) -> None:
        self.id, self.descriptor = id_, descriptor
        self._epoch, self._options, self._reactor = epoch, options, reactor
        self._link = bytes(new_region_handle())
        self._whole_bytes = min(options.stripe_bytes, MAX_PART_BYTES)
        self._streams: list[TcpStream] = []
        self._connections: list[Connection] = []
        self._posted: dict[int, _PostedWrite] = {}
        self._pending_reads: dict[TransferId, PendingRead] = {}
        self._fetch_parts: deque[FetchPart] = deque()
        self._next_sequence = self._num_attached = 0
        self._loss: TransferError | None = None

    @property
    def is_attaching(self) -> bool:
        """Neither attached, by every stream, nor lost yet."""
        return self._num_attached < self._options.streams and self._loss is None

    def set_connection(self, connection: Connection) -> None:
        """Close this connection with the rest, whatever becomes of it."""
        self._connections.append(connection)
        if self._loss is not None:
            connection.close()

    def add_stream(self, connection: Connection) -> None:
        """Both ends of this connection have proved themselves: ask for the region."""
        fit_buffers(connection.channel.socket, self._options)
        stream = TcpStream(connection, self._part_landed)
        self._streams.append(stream)
        connection.set_handlers(lambda channel: self._read(stream, channel), self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.channel.ahead = ReadAhead()
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle, self._link)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Send a checked write over the streams that have the least to do."""
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
            return
        self._watch_for_stalls()
        sequence, num_bytes = self._new_sequence(), write.copies.num_bytes
        batch = None
        if num_bytes <= self._whole_bytes:
            batch = whole_batch(write, region, sequence)
        if batch is None:
            self._send_stripes(transfer, write, region, sequence)
            return
        stream = min(self._streams, key=_load_of)
        self._posted[sequence] = _PostedWrite(transfer, num_bytes, ((stream, num_bytes),))
        stream.num_unanswered_bytes += num_bytes
        stream.connection.send_batch(batch)

    def _send_stripes(
        self, transfer: TransferId, write: PageWrite, region: PagedRegion, sequence: int
    ) -> None:
        stripes = cut_stripes(
            write,
            sequence,
            max_stripes=len(self._streams),
            stripe_bytes=self._options.stripe_bytes,
        )
        streams = sorted(self._streams, key=_load_of)[: len(stripes)]
        loads = tuple(
            (stream, stripe.num_bytes) for stream, stripe in zip(streams, stripes, strict=True)
        )
        self._posted[sequence] = _PostedWrite(transfer, sum(load for _, load in loads), loads)
        for stream, stripe in zip(streams, stripes, strict=True):
            stream.num_unanswered_bytes += stripe.num_bytes
            stream.connection.send_batches(outgoing_batches(write, region, stripe))
        for stream in streams:
            stream.connection.flush()

    def read(self, transfer: TransferId, copies: PageCopies, region: PagedRegion) -> None:
        """Ask for checked pages of the peer, in parts, over the streams that are free."""
        if self._loss is not None:
            self._reactor.report(ReadFailed(transfer, self._loss))
            return
        parts = [part for part in self._cut_read(copies) if part.num_bytes > 0]
        if not parts:
            self._reactor.report(ReadCompleted(transfer, 0))
            return
        self._watch_for_stalls()
        pending = self._pending_reads[transfer] = PendingRead(
            transfer, copies.num_bytes, len(parts)
        )
        for part in parts:
            fetch_part = FetchPart(self._new_sequence(), pending, part, copies.layer, region)
            self._fetch_parts.append(fetch_part)
        self._ask()

    def lose(self, error: TransferError) -> None:
        """The peer is gone, or one of its streams: report it and every unanswered write, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done with the peer: what is unfinished fails."""
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))

    def _end(self, error: TransferError) -> None:
        self._loss = error
        for connection in self._connections:
            connection.close()
        for posted in self._posted.values():
            self._reactor.report(WriteFailed(posted.transfer, error))
        for transfer in self._pending_reads:
            self._reactor.report(ReadFailed(transfer, error))
        self._posted.clear()
        self._pending_reads.clear()
        self._fetch_parts.clear()
        self._streams.clear()

    def _new_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1

    def _cut_read(self, copies: PageCopies) -> list[CopyGroup]:
        return cut_parts(copies.groups, min(MAX_PART_BYTES, self._options.stripe_bytes))

    def _ask(self) -> None:
        """Ask for the next parts, as many as may be under way."""
        while self._fetch_parts and self._loss is None:
            stream = min(self._streams, key=lambda stream: stream.num_asked)
            if stream.num_asked >= MAX_FETCHES_IN_FLIGHT:
                return
            stream.ask(self._fetch_parts.popleft())

    def _watch_for_stalls(self) -> None:
        """Before something is asked of the peer: from now on it must go on answering."""
        if not self._posted and not self._pending_reads:
            self._streams[0].connection.fail_unless_progress(
                self._options.stall_timeout_s, "an answer of the peer", self._count_moved_bytes
            )

    def _clear_stall_timer(self) -> None:
        """After something was answered: a peer without outstanding answers may be silent."""
        if not self._posted and not self._pending_reads and self._streams:
            self._streams[0].connection.cancel_deadline()

    def _count_moved_bytes(self) -> int:
        return sum(count_moved_bytes(stream.connection.channel) for stream in self._streams)

    def _part_landed(self, fetch_part: FetchPart) -> None:
        pending = fetch_part.pending
        pending.num_missing_parts -= 1
        if pending.num_missing_parts == 0:
            del self._pending_reads[pending.transfer]
            self._reactor.report(ReadCompleted(pending.transfer, pending.num_bytes))
            self._clear_stall_timer()
        self._ask()

    def _read(self, stream: TcpStream, channel: Channel) -> None:
        for body in stream.bodies(channel):
            self._take(stream, body)

    def _take(self, stream: TcpStream, body: bytes) -> None:
        match decode_from_listener(body):
            case Attached(arrays) if not stream.is_attached:
                self._attached(stream, arrays)
            case NotAttached(reason) if not stream.is_attached:
                raise PeerUnreachableError(f"the peer refused to attach: {reason}")
            case WriteLanded() | WriteRefused() as answer if answer.sequence in self._posted:
                self._answered(answer)
            case FetchServed(sequence):
                stream.take_served(sequence)
            case Attached() | NotAttached() | WriteLanded() | WriteRefused():
                raise ProtocolError("the peer answered what was not asked")
            case unknown:
                assert_never(unknown)

    def _attached(self, stream: TcpStream, arrays: tuple[PageArray, ...]) -> None:
        if arrays != self.descriptor.arrays:
            raise ProtocolError("the peer's region does not match its description")
        stream.is_attached = True
        self._num_attached += 1
        stream.connection.cancel_deadline()
        if not self.is_attaching:
            self._reactor.report(RemoteAttached(self.id))

    def _answered(self, answer: WriteLanded | WriteRefused) -> None:
        posted = self._take_posted(answer.sequence)
        match answer:
            case WriteLanded():
                self._reactor.report(WriteCompleted(posted.transfer, posted.num_bytes))
            case WriteRefused(_, reason):
                error = TransferError(f"the peer refused the write: {reason}")
                self._reactor.report(WriteFailed(posted.transfer, error))
            case unknown:
                assert_never(unknown)

    def _take_posted(self, sequence: int) -> _PostedWrite:
        posted = self._posted.pop(sequence)
        for stream, num_bytes in posted.loads:
            stream.num_unanswered_bytes -= num_bytes
        self._clear_stall_timer()
        return posted


def _load_of(stream: TcpStream) -> int:
    return stream.num_unanswered_bytes
