"""`file`: pages through a directory; the receiver reads them into place itself.

Because it does, a closed grant is quiescent at once: what still lies there for it is removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, TicketId
from baton.net.framing import encode
from baton.transfer.base_transport import ConnectedTransport
from baton.transfer.endpoints import open_dialer, open_listener, parse_endpoint
from baton.transfer.grants import AdmittedGrants, GrantHolder
from baton.transfer.interface import (
    Capabilities,
    PagedRegion,
    RegionDescriptor,
    RemoteId,
    TransportContext,
    WriteGrant,
)
from baton.transfer.scatter_gather import Geometry, unpack_target, write_batches
from baton.transfer.transports.file.remote import FileOptions, FileRemote
from baton.transfer.transports.file.spool import IncomingPartFile, Spool, is_aligned
from baton.transfer.transports.file.wire import (
    MAX_PART_FILES,
    Attach,
    Attached,
    PartFile,
    PartLanded,
    PartRefused,
    WriteAbandoned,
    decode_attach,
    decode_from_writer,
    part_file_name,
)

if TYPE_CHECKING:
    import socket

    from baton.net.channel import Channel
    from baton.net.connection import Connection


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Who is at the other end, and how its part files' names begin."""

    holder: GrantHolder
    link: bytes


class FileInbound:
    """Takes one writer's part files for one region, in order. Owner thread: the transport's."""

    def __init__(
        self,
        connection: Connection,
        writer: FileWriter,
        region: PagedRegion,
        *,
        spool: Spool,
        direct: bool,
        grants: AdmittedGrants,
    ) -> None:
        self._connection, self._writer, self._region = connection, writer, region
        self._spool, self._direct, self._grants = spool, direct, grants
        self._waiting: deque[PartFile | WriteAbandoned] = deque()
        self._part_file: PartFile | None = None
        self._incoming: IncomingPartFile | None = None
        self._last_number = -1
        self._refusal: str | None = None

    def read(self, channel: Channel) -> None:
        """Queue received messages, then put one slice in place.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the writer did what no honest writer does.
        """
        for body in channel.receive_bodies():
            self._waiting.append(decode_from_writer(body))
        if len(self._waiting) > 2 * MAX_PART_FILES:
            raise ProtocolError("a writer announced more part files than it may")
        self._work()
        if self._part_file is not None or self._waiting:
            self._connection.step_soon()

    def refuse_grant(self, grant: TicketId) -> None:
        """The grant was closed: what is in mid-flight for it lands nowhere."""
        if self._part_file is not None and self._part_file.grant == grant:
            self._finish("the grant was closed")

    def close(self) -> None:
        """The writer is gone: so are its part files."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._part_file = None
        self._waiting.clear()
        self._spool.remove(self._writer.link)

    def _work(self) -> None:
        if self._part_file is None and self._waiting:
            match self._waiting.popleft():
                case PartFile() as part_file:
                    self._begin(part_file)
                case WriteAbandoned():
                    self._refusal = None
                case unknown:
                    assert_never(unknown)
        if self._incoming is not None and self._incoming.read_slice():
            self._finish(None)

    def _begin(self, part_file: PartFile) -> None:
        if part_file.number <= self._last_number:
            raise ProtocolError("a part file's number came twice, or out of order")
        self._last_number = part_file.number
        if part_file.array >= len(self._region.arrays):
            raise ProtocolError(
                f"a part file names array {part_file.array}, which the region lacks"
            )
        array = self._region.arrays[part_file.array]
        geometry = unpack_target(part_file.dst_pages, part_file.spans, array)
        self._part_file = part_file
        self._incoming = self._open(part_file, geometry)
        refusal = self._refusal or self._grants.find_refusal(
            TicketId(part_file.grant), self._writer.holder, self._region, geometry.pages
        )
        if refusal is not None:
            self._finish(refusal)

    def _open(self, part_file: PartFile, geometry: Geometry) -> IncomingPartFile:
        array, memory = self._region.arrays[part_file.array], self._region.memory
        return IncomingPartFile(
            self._spool.path / part_file_name(self._writer.link, part_file.number),
            geometry.num_bytes,
            write_batches(geometry, memory, array),
            direct=self._direct and is_aligned(geometry, memory, array),
        )

    def _finish(self, refusal: str | None) -> None:
        part_file, self._part_file = self._part_file, None
        if part_file is None:
            return
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._refusal = refusal if part_file.notification is None else None
        if refusal is not None:
            self._connection.send_body(encode(PartRefused(part_file.number, refusal)))
            return
        if part_file.notification is not None:
            self._grants.report_arrived(TicketId(part_file.grant), part_file.notification)
        self._connection.send_body(encode(PartLanded(part_file.number)))


class FileTransport(ConnectedTransport[FileRemote, Attach]):
    """See `Transport`. Owner thread: whoever calls `poll`, which writes and reads the files.

    A slice of 4 MiB at a time; a filesystem that hangs (a lost NFS server) hangs its caller.
    """

    kind = "file"
    capabilities = Capabilities(memory=("host", "shared"), same_host_only=False, reads=False)

    def __init__(self, options: FileOptions, context: TransportContext) -> None:
        super().__init__(
            context,
            connect_timeout_s=options.connect_timeout_s,
            max_connections=options.max_connections,
        )
        self._options = options
        self._directory = Path(options.directory)
        self._grants = AdmittedGrants(self._reactor)
        self._inbound: dict[Connection, FileInbound] = {}
        self._spool: Spool | None = None

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

    def _refuse_rest(self, grant: TicketId) -> None:
        for inbound in list(self._inbound.values()):
            inbound.refuse_grant(grant)

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> FileRemote:
        parse_endpoint("network", descriptor.endpoint)
        return FileRemote(
            id_,
            descriptor,
            self._reactor,
            epoch=self._context.epoch,
            directory=self._directory,
            options=self._options,
        )

    def _connect(self, remote: FileRemote) -> None:
        self._dial(remote, *open_dialer("network", remote.descriptor.endpoint))

    def _open_listener(self) -> tuple[socket.socket, str]:
        """Make this side's directory, too, and remove those of workers that are dead."""
        if self._spool is None:
            self._spool = Spool(self._directory, self._context.epoch)
            self._spool.sweep(self._options.stale_after_s)
        return open_listener("network", self._context.bind_host, self._options.advertise_host)

    def _decode_attach(self, body: bytes) -> Attach:
        return decode_attach(body)

    def _admit(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        if self._spool is None:
            raise ProtocolError("a peer attached before there was a region")
        inbound = FileInbound(
            connection,
            FileWriter(GrantHolder(Epoch(attach.epoch), connection.channel.peer), attach.link),
            region,
            spool=self._spool,
            direct=self._options.direct,
            grants=self._grants,
        )
        self._inbound[connection] = inbound
        connection.cancel_deadline()
        connection.set_handlers(inbound.read, partial(self._disconnected, connection))
        connection.send_body(encode(Attached(region.arrays, self._spool.name, self._spool.proof)))

    def _disconnected(self, connection: Connection, error: TransferError) -> None:
        inbound = self._inbound.pop(connection, None)
        if inbound is not None:
            inbound.close()
        super()._disconnected(connection, error)

    def _release(self) -> None:
        for inbound in self._inbound.values():
            inbound.close()
        self._inbound.clear()
        super()._release()
        if self._spool is not None:
            self._spool.close()
