"""`tcp`: pages over ordinary sockets; the receiver puts them in place.

So a closed grant is quiescent at once: bytes that still arrive for it are dropped. `TcpInbound` is
the listening end of one stream: headers are checked, payloads are received in place, and what the
peer reads is sent from the region as the socket takes it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never
from weakref import WeakValueDictionary

import msgspec

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.net.channel import Channel, ReadAhead, make_zeros, skip_bytes
from baton.net.framing import encode
from baton.net.tls import Tls, TlsListener, make_contexts, wrap_dialer
from baton.transfer.base_transport import ConnectedTransport
from baton.transfer.endpoints import parse_tcp_endpoint
from baton.transfer.grants import AdmittedGrants, GrantHolder, ReadGrants, ReadRequest
from baton.transfer.interface import (
    Capabilities,
    PageArray,
    PagedRegion,
    PageRead,
    ReadGrant,
    RegionDescriptor,
    RemoteId,
    TransferId,
    TransportContext,
    WriteGrant,
)
from baton.transfer.scatter_gather import (
    Geometry,
    discard_batches,
    read_batches,
    sole_batch,
    unpack_geometry,
    unpack_target,
    write_batches,
)
from baton.transfer.transports.tcp.remote import TcpRemote
from baton.transfer.transports.tcp.segments import SegmentMeter
from baton.transfer.transports.tcp.sockets import (
    explain_small_buffers,
    fit_buffers,
    open_listener,
    open_stream,
)
from baton.transfer.transports.tcp.wire import (
    Attach,
    Attached,
    Data,
    Fetch,
    FetchRefused,
    FetchServed,
    WriteLanded,
    WriteRefused,
    decode_attach,
    decode_from_dialer,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from baton.net.connection import Connection
    from baton.telemetry.transfer_report import SegmentCounts
    from baton.transfer.transports.tcp.sockets import TcpOptions

_log = logging.getLogger(__name__)

TLS_SUFFIX = "/tls"
"""At the end of an endpoint where the peer uses TLS."""
MAX_STEP_BYTES: Final = 8 << 20
"""Page bytes read before other connections get their turn."""
MAX_FETCHES: Final = 16
"""Fetches of one connection that wait to be served: more than a correct peer has in flight."""
MAX_UNFINISHED: Final = 4096
MAX_NOTIFICATION_BYTES_HELD: Final = 16 << 20
"""How far one stream of a correct peer may run ahead of another."""


@dataclass(frozen=True, slots=True)
class WholeWrite:
    """A write of which all stripes arrived: in place, unless a part was refused."""

    notification: bytes
    refusal: str | None


@dataclass(slots=True)
class _Unfinished:
    grant: bytes
    num_stripes: int
    num_over: int = 0
    notification: bytes = b""
    refusal: str | None = None


class WriteReassembly:
    """Writes that travel on several streams, until all stripes arrived. Pure."""

    def __init__(self) -> None:
        self._unfinished: dict[int, _Unfinished] = {}
        self._num_notification_bytes = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    def stripe_over(
        self, last: Data, notification: bytes, refusal: str | None
    ) -> WholeWrite | None:
        """The last part of a stripe arrived; the write, if this was the last of its stripes.

        Raises:
            ProtocolError: the stripes of a write contradict each other, or too many writes wait.
        """
        write = self._unfinished.get(last.sequence)
        if write is None:
            if last.stripes == 1:
                return WholeWrite(notification, refusal)
            if len(self._unfinished) >= MAX_UNFINISHED:
                raise ProtocolError("one stream runs too far ahead of another")
            write = self._unfinished[last.sequence] = _Unfinished(last.grant, last.stripes)
        is_alike = (write.grant, write.num_stripes) == (last.grant, last.stripes)
        if not is_alike or (write.notification and notification):
            raise ProtocolError("the stripes of a write contradict each other")
        self._num_notification_bytes += len(notification)
        if self._num_notification_bytes > MAX_NOTIFICATION_BYTES_HELD:
            raise ProtocolError("one stream runs too far ahead of another")
        write.num_over += 1
        write.notification = write.notification or notification
        write.refusal = write.refusal or refusal
        if write.num_over < write.num_stripes:
            return None
        del self._unfinished[last.sequence]
        self._num_notification_bytes -= len(write.notification)
        return WholeWrite(write.notification, write.refusal)


class TcpInbound:
    """Serves one stream of one peer that attached one region. Owner thread: the transport's.

    A stripe's parts follow each other on the connection. Once a part is refused, so is the rest of
    its write; the writer is notified when the last stripe is over, on that one's connection.
    """

    def __init__(
        self,
        connection: Connection,
        peer: GrantHolder,
        region: PagedRegion,
        *,
        reassembly: WriteReassembly,
        grants: AdmittedGrants,
        read_grants: ReadGrants,
    ) -> None:
        self.connection, self.region = connection, region
        self._peer, self._reassembly = peer, reassembly
        self._grants, self._read_grants = grants, read_grants
        self._part: Data | None = None
        self._batches: Iterator[list[memoryview]] = iter(())
        self._batch: list[memoryview] = []
        self._num_missing_bytes = 0
        self._num_fetches = 0
        self._serving: tuple[TicketId | None, bytes] | None = None
        self._unfinished: Data | None = None
        self._last_sequence = -1
        self._refusal: str | None = None
        self._named: tuple[tuple[bytes, bytes, int, int], Geometry] | None = None
        connection.channel.ahead = ReadAhead()

    def read(self, channel: Channel) -> None:
        """Take what has come, up to `MAX_STEP_BYTES`.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the peer broke the protocol.
        """
        budget = MAX_STEP_BYTES
        while budget > 0:
            if self._part is None:
                body = channel.receive_body()
                if body is None:
                    return
                self._handle(body)
                budget -= len(body)
            else:
                num_bytes = channel.receive_into(self._batch)
                if num_bytes == 0:
                    return
                budget -= num_bytes
                self._take_payload(num_bytes)

    def refuse_grant(self, grant: TicketId) -> None:
        """The grant was closed: drop the rest of a part that is in flight for it."""
        if self._part is not None and self._part.grant == grant:
            self._refuse("the grant was closed")

    def stop_serving(self, grant: TicketId) -> None:
        """Its pages may be another request's soon: what is unsent of them leaves as zeros.

        A reader that is slow, on purpose perhaps, gets no byte that is stored from now on.
        """
        if self._serving is not None and self._serving[0] == grant:
            channel, (_, header) = self.connection.channel, self._serving
            kept = [buffer for buffer in channel.unsent if buffer.obj is header]
            num_bytes = sum(map(len, channel.unsent)) - sum(map(len, kept))
            channel.unsent = kept + make_zeros(num_bytes)
            self._serving = None

    def _handle(self, body: bytes) -> None:
        match decode_from_dialer(body):
            case Data() as part:
                self._begin_part(part)
            case Fetch() as fetch:
                self._begin_serving(fetch)
            case unknown:
                assert_never(unknown)

    def _begin_serving(self, fetch: Fetch) -> None:
        if self._num_fetches >= MAX_FETCHES:
            raise ProtocolError("a peer fetches more than it takes")
        array = self._find_array(fetch.array)
        geometry = unpack_geometry(fetch.src_pages, fetch.spans, array)
        self._num_fetches += 1
        self.connection.send_batches(self._serving_batches(fetch, geometry, array))
        self.connection.flush()

    def _serving_batches(
        self, fetch: Fetch, geometry: Geometry, array: PageArray
    ) -> Iterator[list[memoryview]]:
        """The answer, made when its turn to be sent has come: its grant may be closed by then."""
        seal = self.connection.channel.seal
        grant = None if fetch.grant is None else TicketId(fetch.grant)
        refusal = None
        if not self.region.is_public:
            asked = ReadRequest(grant, fetch.array, geometry.pages)
            refusal = self._read_grants.find_refusal(asked, self._peer, self.region.handle)
        if refusal is None:
            header = seal(encode(FetchServed(fetch.sequence)))
            self._serving = grant, header
            payload = read_batches(geometry, self.region.memory, array)
            yield [memoryview(header), *next(payload, [])]
            for batch in payload:
                is_stopped = self._serving is None
                yield make_zeros(sum(map(len, batch))) if is_stopped else batch
            self._serving = None
        else:
            yield [memoryview(seal(encode(FetchRefused(fetch.sequence, refusal))))]
        self._num_fetches -= 1

    def _begin_part(self, part: Data) -> None:
        self._check_order(part)
        array = self._find_array(part.array)
        geometry = self._unpack(part, array)
        self._part = part
        self._num_missing_bytes = geometry.num_bytes
        self.connection.channel.expect_bytes(geometry.num_bytes)
        refusal = self._refusal or self._grants.find_refusal(
            TicketId(part.grant), self._peer, self.region, geometry.pages
        )
        if refusal is not None:
            self._refuse(refusal)
            return
        batch = sole_batch(geometry, self.region.memory, array)
        if batch:
            self._batch = batch
        else:
            self._batches = write_batches(geometry, self.region.memory, array)
            self._next_batch()

    def _unpack(self, part: Data, array: PageArray) -> Geometry:
        """The bytes of a part; consecutive layers have the same pages."""
        named = (part.dst_pages, part.spans, array.num_pages, array.page_bytes)
        if self._named is None or self._named[0] != named:
            self._named = named, unpack_target(part.dst_pages, part.spans, array)
        return self._named[1]

    def _find_array(self, number: int) -> PageArray:
        if number >= len(self.region.arrays):
            raise ProtocolError(f"a part names array {number}, which the region lacks")
        return self.region.arrays[number]

    def _check_order(self, part: Data) -> None:
        begun = self._unfinished
        if begun is None:
            if part.sequence <= self._last_sequence:
                raise ProtocolError("a write's number came twice, or out of order")
            self._last_sequence = part.sequence
            self._refusal = None
        elif (part.sequence, part.stripes) != (begun.sequence, begun.stripes):
            raise ProtocolError("a write began before the one in front of it was whole")
        self._unfinished = part if part.notification is None else None

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._batches = discard_batches(self._num_missing_bytes)
        self._next_batch()

    def _take_payload(self, num_bytes: int) -> None:
        self._num_missing_bytes -= num_bytes
        self.connection.channel.expect_bytes(self._num_missing_bytes)
        self._batch = skip_bytes(self._batch, num_bytes)
        if not self._batch:
            self._next_batch()

    def _next_batch(self) -> None:
        self._batch = next(self._batches, [])
        if not self._batch:
            self._finish_part()

    def _finish_part(self) -> None:
        part, self._part = self._part, None
        self._batches = iter(())
        if part is None or part.notification is None:
            return
        write = self._reassembly.stripe_over(part, part.notification, self._refusal)
        if write is None:
            return
        if write.refusal is not None:
            self.connection.send_body(encode(WriteRefused(part.sequence, write.refusal)))
            return
        self._grants.report_arrived(TicketId(part.grant), write.notification)
        self.connection.send_body(encode(WriteLanded(part.sequence)))


class TcpTransport(ConnectedTransport[TcpRemote, Attach]):
    """See `Transport`. Its owner is the thread that calls `poll`."""

    kind = "tcp"
    capabilities = Capabilities(
        memory=("host", "shared"), same_host_only=False, reads=True, multi_array=True,
        scopes_reads=True,
    )  # fmt: skip

    def __init__(self, options: TcpOptions, context: TransportContext) -> None:
        super().__init__(
            context,
            connect_timeout_s=options.connect_timeout_s,
            max_connections=options.max_connections,
        )
        self._options = options
        self._tls: Tls | None = context.tls
        if options.tls is not None:
            self._tls = make_contexts(options.tls.certificate, options.tls.key, options.tls.ca)
        if self._tls is not None:
            self.capabilities = msgspec.structs.replace(type(self).capabilities, encrypted=True)
        self._grants, self._read_grants = AdmittedGrants(self._reactor), ReadGrants()
        self._inbound: dict[Connection, TcpInbound] = {}
        self._meter = SegmentMeter()
        # Of all streams of one remote of a peer; gone when the last of those is.
        self._reassemblies: WeakValueDictionary[
            tuple[bytes, str, RegionHandle], WriteReassembly
        ] = WeakValueDictionary()

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        self._grants.open(grant, self._find_region(grant.region))

    def finish_grant(self, grant: TicketId) -> bool:
        """See `Transport`."""
        self._grants.finish(grant)
        self._refuse_rest(grant)  # a writer that has reported its last write may begin another one
        return True

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        if self._grants.close(grant):
            self._refuse_rest(grant)

    def admit_reads(self, grant: ReadGrant, arrays: range, pages: NDArray[np.int64]) -> None:
        """See `ScopesReads`."""
        self._read_grants.admit(grant, self._find_region(grant.region), arrays, pages)

    def close_read_grant(self, grant: TicketId) -> None:
        """See `ScopesReads`."""
        if self._read_grants.close(grant):
            for inbound in self._inbound.values():
                inbound.stop_serving(grant)

    def read(self, read: PageRead) -> TransferId:
        """See `ReadsPages`: the peer sends them, from where they lie."""
        transfer, remote, region = self._check_read(read)
        remote.read(transfer, read, region)
        return transfer

    def take_segments(self) -> dict[Epoch, SegmentCounts] | None:
        """See `CountsSegments`."""
        return self._meter.take()

    def _refuse_rest(self, grant: TicketId) -> None:
        for inbound in self._inbound.values():
            inbound.refuse_grant(grant)

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> TcpRemote:
        self._parse_endpoint(descriptor.endpoint)
        return TcpRemote(
            id_,
            descriptor,
            self._reactor,
            epoch=self._context.epoch,
            options=self._options,
            meter=self._meter,
        )

    def _connect(self, remote: TcpRemote) -> None:
        address = self._parse_endpoint(remote.descriptor.endpoint)
        for _ in range(self._options.streams):
            sock = open_stream(address, self._options)
            if self._tls is not None:
                sock = wrap_dialer(sock, self._tls)
            remote.add_connection(self._dialer.dial(sock, address, remote.add_stream, remote.lose))

    def _parse_endpoint(self, endpoint: str) -> tuple[str, int]:
        is_tls = endpoint.endswith(TLS_SUFFIX)
        if is_tls and self._tls is None:
            raise TransferError(
                "the peer speaks TLS, and this worker does not: give both the same security.tls"
            )
        if self._tls is not None and not is_tls:
            raise TransferError("the peer does not speak TLS, and this worker must")
        return parse_tcp_endpoint(endpoint.removesuffix(TLS_SUFFIX))

    def _open_listener(self) -> tuple[socket.socket, str]:
        small = explain_small_buffers(self._options)
        if small is not None:
            _log.warning("%s", small)
        sock, endpoint = open_listener(self._context.bind_host, self._options, self._context.rank)
        self._meter.check(sock)
        if self._tls is None:
            return sock, endpoint
        return TlsListener(sock, self._tls), endpoint + TLS_SUFFIX

    def _accept_peer(self, connection: Connection) -> None:
        fit_buffers(connection.channel.socket, self._options)
        super()._accept_peer(connection)

    def _decode_attach(self, body: bytes) -> Attach:
        return decode_attach(body)

    def _admit(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        link = (attach.link, attach.epoch, region.handle)
        inbound = TcpInbound(
            connection,
            GrantHolder(Epoch(attach.epoch), connection.channel.peer),
            region,
            reassembly=self._reassemblies.setdefault(link, WriteReassembly()),
            grants=self._grants,
            read_grants=self._read_grants,
        )
        self._inbound[connection] = inbound
        self._meter.add(connection, Epoch(attach.epoch))
        connection.cancel_deadline()
        connection.set_handlers(inbound.read, partial(self._disconnected, connection))
        connection.send_body(encode(Attached(region.arrays)))

    def _disconnected(self, connection: Connection, error: TransferError) -> None:
        self._inbound.pop(connection, None)
        super()._disconnected(connection, error)

    def _release(self) -> None:
        self._inbound.clear()
        super()._release()
