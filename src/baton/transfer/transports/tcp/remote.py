"""The dialing end of `tcp`: one peer's region, reached over several streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Final, assert_never

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, TicketId, new_region_handle
from baton.net.channel import Channel, ReadAhead, skip_bytes
from baton.net.connection import Connection, count_moved_bytes
from baton.net.framing import encode
from baton.transfer.base_transport import BaseRemote, Reactor, refused_to_attach
from baton.transfer.interface import (
    PageArray,
    PagedRegion,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteId,
    TransferId,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.messages import MAX_BODY_BYTES, NotAttached
from baton.transfer.scatter_gather import MAX_PART_BYTES, cut_parts, target_of, write_batches
from baton.transfer.transports.tcp.sockets import TcpOptions, fit_buffers
from baton.transfer.transports.tcp.wire import (
    Attach,
    Attached,
    Fetch,
    FetchRefused,
    FetchServed,
    WriteLanded,
    WriteRefused,
    cut_stripes,
    decode_from_listener,
    outgoing_batches,
    whole_write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.kv.copies import CopyGroup
    from baton.transfer.transports.tcp.segments import SegmentMeter

MAX_FETCHES_IN_FLIGHT: Final = 4
"""On one stream: enough that the peer always has the next one."""
MAX_STEP_BYTES: Final = 8 << 20
"""Page bytes read before other connections get their turn."""


@dataclass(slots=True)
class PendingRead:
    """A read in flight. `refusal`: why the peer did not send some of it."""

    transfer: TransferId
    grant: TicketId | None
    num_bytes: int
    num_missing_parts: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class FetchPart:
    """One part of a read: one request, and where its bytes go."""

    sequence: int
    pending: PendingRead
    part: CopyGroup
    array: int
    region: PagedRegion

    def encode(self) -> bytes:
        """The request."""
        pages, spans = self.part.packed_sources
        return encode(Fetch(self.sequence, self.array, pages, spans, self.pending.grant))

    def landing_batches(self) -> Iterator[list[memoryview]]:
        """Where the answer's bytes go."""
        array = self.region.arrays[self.array]
        return write_batches(target_of(self.part), self.region.memory, array)


class TcpStream:
    """One authenticated connection. `on_over` is called for each part: in place, or refused."""

    def __init__(self, connection: Connection, on_over: Callable[[FetchPart], None]) -> None:
        self.connection, self._on_over = connection, on_over
        self.is_attached = False
        self.num_unanswered_bytes = 0
        self._asked: deque[FetchPart] = deque()
        self._batches: Iterator[list[memoryview]] = iter(())
        self._batch: list[memoryview] = []
        self._num_missing_bytes = 0

    @property
    def num_asked(self) -> int:
        """Parts that were requested and are not over."""
        return len(self._asked)

    def ask(self, fetch_part: FetchPart) -> None:
        """Request one more; the answers come in this order."""
        self._asked.append(fetch_part)
        self.connection.send_body(fetch_part.encode())

    def take_served(self, sequence: int) -> None:
        """The bytes of the oldest part come next.

        Raises:
            ProtocolError: the peer sends something else.
        """
        oldest = self._find_oldest(sequence)
        self._batches = oldest.landing_batches()
        self._num_missing_bytes = oldest.part.num_bytes
        self._advance()

    def take_refused(self, sequence: int, reason: str) -> None:
        """The oldest part will not come.

        Raises:
            ProtocolError: it is another one.
        """
        self._find_oldest(sequence).pending.refusal = reason
        self._on_over(self._asked.popleft())

    def bodies(self, channel: Channel) -> Iterator[bytes]:
        """Received frames, up to a bound; page bytes between them are put in place."""
        budget = MAX_STEP_BYTES
        # What was read ahead stays where it is once the peer is lost: its reads have failed.
        while budget > 0 and self.connection.is_open:
            if self._batch:
                num_bytes = channel.receive_into(self._batch)
                if num_bytes == 0:
                    return
                budget -= num_bytes
                self._num_missing_bytes -= num_bytes
                channel.expect_bytes(self._num_missing_bytes)
                self._batch = skip_bytes(self._batch, num_bytes)
                if not self._batch:
                    self._advance()
            else:
                body = channel.receive_body()
                if body is None:
                    return
                budget -= len(body)
                yield body

    def _find_oldest(self, sequence: int) -> FetchPart:
        if not self._asked or self._asked[0].sequence != sequence:
            raise ProtocolError("the peer sent an answer without a request")
        return self._asked[0]

    def _advance(self) -> None:
        self._batch = next(self._batches, [])
        if not self._batch:
            self._batches = iter(())
            self._on_over(self._asked.popleft())


@dataclass(frozen=True, slots=True)
class _PostedWrite:
    """A write without an answer yet: how many bytes of it each stream carries."""

    transfer: TransferId
    num_bytes: int
    loads: tuple[tuple[TcpStream, int], ...]


class TcpRemote(BaseRemote):
    """See `BaseRemote`. Losing one of its streams loses it as a whole."""

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        reactor: Reactor,
        *,
        epoch: Epoch,
        options: TcpOptions,
        meter: SegmentMeter,
    ) -> None:
        super().__init__(id_, descriptor, reactor)
        self._epoch, self._options, self._meter = epoch, options, meter
        self._link = bytes(new_region_handle())
        self._whole_bytes = min(options.stripe_bytes, MAX_PART_BYTES)
        self._streams: list[TcpStream] = []
        self._connections: list[Connection] = []
        self._posted: dict[int, _PostedWrite] = {}
        self._pending_reads: dict[TransferId, PendingRead] = {}
        self._fetch_parts: deque[FetchPart] = deque()
        self._next_sequence = self._num_attached = 0

    def add_connection(self, connection: Connection) -> None:
        """A connection that is being opened: closed with the rest."""
        self._connections.append(connection)
        if self._loss is not None:
            connection.close()

    def add_stream(self, connection: Connection) -> None:
        """Both ends are authenticated: attach to the region."""
        fit_buffers(connection.channel.socket, self._options)
        stream = TcpStream(connection, self._part_over)
        self._streams.append(stream)
        self._meter.add(connection, self.descriptor.epoch)
        connection.set_handlers(lambda channel: self._read(stream, channel), self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.channel.ahead = ReadAhead()
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle, self._link)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Send a checked write over the least loaded streams."""
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
            return
        self._watch_for_stalls()
        sequence, num_bytes = self._new_sequence(), write.copies.num_bytes
        whole = whole_write(write, region, sequence) if num_bytes <= self._whole_bytes else None
        if whole is None:
            self._send_stripes(transfer, write, region, sequence)
            return
        stream = min(self._streams, key=_load_of)
        self._posted[sequence] = _PostedWrite(transfer, num_bytes, ((stream, num_bytes),))
        stream.num_unanswered_bytes += num_bytes
        stream.connection.send_body_with_pages(*whole)

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
            seal = stream.connection.channel.seal
            stream.connection.send_batches(outgoing_batches(write, region, stripe, seal))
        for stream in streams:
            stream.connection.flush()

    def read(self, transfer: TransferId, read: PageRead, region: PagedRegion) -> None:
        """Request checked pages of the peer, in parts, over the least loaded streams."""
        copies = read.copies
        if self._loss is not None:
            self._reactor.report(ReadFailed(transfer, self._loss))
            return
        max_bytes = min(MAX_PART_BYTES, self._options.stripe_bytes)
        parts = [part for part in cut_parts(copies.groups, max_bytes) if part.num_bytes > 0]
        if not parts:
            self._reactor.report(ReadCompleted(transfer, 0))
            return
        self._watch_for_stalls()
        pending = self._pending_reads[transfer] = PendingRead(
            transfer, read.grant, copies.num_bytes, len(parts) * copies.num_layers
        )
        self._fetch_parts.extend(
            FetchPart(self._new_sequence(), pending, part, layer, region)
            for layer, part in product(copies.layers, parts)
        )
        self._ask()

    def _end(self, error: TransferError) -> None:
        super()._end(error)
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

    def _ask(self) -> None:
        """Request the next parts, as many as may be in flight."""
        while self._fetch_parts and self._loss is None:
            stream = min(self._streams, key=_num_asked_of)
            if stream.num_asked >= MAX_FETCHES_IN_FLIGHT:
                return
            stream.ask(self._fetch_parts.popleft())

    def _watch_for_stalls(self) -> None:
        """Before a request: start the stall timer, unless it runs."""
        if not self._posted and not self._pending_reads:
            self._streams[0].connection.fail_unless_progress(
                self._options.stall_timeout_s, "an answer of the peer", self._count_moved_bytes
            )

    def _clear_stall_timer(self) -> None:
        """After an answer: stop the stall timer if no other is outstanding."""
        if not self._posted and not self._pending_reads and self._streams:
            self._streams[0].connection.cancel_deadline()

    def _count_moved_bytes(self) -> int:
        return sum(count_moved_bytes(stream.connection.channel) for stream in self._streams)

    def _part_over(self, fetch_part: FetchPart) -> None:
        pending = fetch_part.pending
        pending.num_missing_parts -= 1
        if pending.num_missing_parts == 0:
            del self._pending_reads[pending.transfer]
            if pending.refusal is None:
                self._reactor.report(ReadCompleted(pending.transfer, pending.num_bytes))
            else:
                error = TransferError(f"the peer refused the read: {pending.refusal}")
                self._reactor.report(ReadFailed(pending.transfer, error))
            self._clear_stall_timer()
        self._ask()

    def _read(self, stream: TcpStream, channel: Channel) -> None:
        for body in stream.bodies(channel):
            self._handle(stream, body)

    def _handle(self, stream: TcpStream, body: bytes) -> None:
        match decode_from_listener(body):
            case Attached(arrays) if not stream.is_attached:
                self._attached(stream, arrays)
            case NotAttached(reason) if not stream.is_attached:
                raise refused_to_attach(reason)
            case WriteLanded(sequence) if sequence in self._posted:
                posted = self._take_posted(sequence)
                self._reactor.report(WriteCompleted(posted.transfer, posted.num_bytes))
            case WriteRefused(sequence, reason) if sequence in self._posted:
                posted = self._take_posted(sequence)
                error = TransferError(f"the peer refused the write: {reason}")
                self._reactor.report(WriteFailed(posted.transfer, error))
            case FetchServed(sequence):
                stream.take_served(sequence)
            case FetchRefused(sequence, reason):
                stream.take_refused(sequence, reason)
            case Attached() | NotAttached() | WriteLanded() | WriteRefused():
                raise ProtocolError("the peer sent an answer without a request")
            case unknown:
                assert_never(unknown)

    def _attached(self, stream: TcpStream, arrays: tuple[PageArray, ...]) -> None:
        self._check_arrays(arrays)
        stream.is_attached = True
        self._num_attached += 1
        stream.connection.cancel_deadline()
        if self._num_attached == self._options.streams and self._loss is None:
            self._set_attached()

    def _take_posted(self, sequence: int) -> _PostedWrite:
        posted = self._posted.pop(sequence)
        for stream, num_bytes in posted.loads:
            stream.num_unanswered_bytes -= num_bytes
        self._clear_stall_timer()
        return posted


_load_of = attrgetter("num_unanswered_bytes")
_num_asked_of = attrgetter("num_asked")
