"""`file`: pages through a directory; the receiver reads them into place itself.

Because it does, a closed grant is quiescent at once: what still lies there for it is removed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import TransferError
from baton.ids import Epoch, RegionHandle
from baton.net.endpoints import Dialer, Listener
from baton.transfer.bounds import check_copies, check_notification
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    RegionDescriptor,
    RemoteId,
    TransferId,
)
from baton.transfer.messages import encode
from baton.transfer.onesided.endpoints import open_dialer, open_listener
from baton.transfer.page_set import PageSet, check_grant_pages
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays
from baton.transfer.transports.file.inbound import FileInbound, FileWriter
from baton.transfer.transports.file.remote import FileRemote
from baton.transfer.transports.file.spool import Spool
from baton.transfer.transports.file.wire import (
    MAX_BODY_BYTES,
    Attached,
    NotAttached,
    decode_attach,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        TransferEvent,
        TransportContext,
        WriteGrant,
    )
    from baton.transfer.transports.file.options import FileOptions

PURPOSE = "file"


class FileTransport:
    """See `Transport`. Owner thread: whoever calls `poll`, which writes and reads the files.

    A slice of 4 MiB at a time; a filesystem that hangs (a lost NFS server) hangs its caller.
    """

    kind = "file"
    capabilities = Capabilities(memory=("host", "shared"), same_host_only=False, reads=False)

    def __init__(self, options: FileOptions, context: TransportContext) -> None:
        self._options, self._context = options, context
        self._directory = Path(options.directory)
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(
            self._reactor, context.key, PURPOSE, timeout_s=options.connect_timeout_s
        )
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._grants: dict[TicketId, tuple[WriteGrant, PageSet]] = {}
        self._remotes: dict[RemoteId, FileRemote] = {}
        self._inbound: dict[Connection, FileInbound] = {}
        self._listener: Listener | None = None
        self._spool: Spool | None = None
        self._endpoint = ""
        self._num_remotes = self._num_transfers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`. The first call makes this side's folder, and removes dead workers'."""
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"file cannot expose {region.kind} memory")
        check_arrays(region.arrays)
        if self._spool is None:
            self._spool = Spool(self._directory, self._context.epoch)
            self._spool.sweep(self._options.stale_after_s)
        if self._listener is None:
            sock, self._endpoint = open_listener(
                "network", self._context.bind_host, self._options.advertise_host
            )
            self._listener = Listener(
                sock, self._reactor, self._context.key, PURPOSE, on_peer=self._accept_peer
            )
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind:
            raise TransferError(f"a {descriptor.transport} descriptor was given to file")
        check_arrays(descriptor.arrays)
        sock, address = open_dialer("network", descriptor.endpoint)
        self._num_remotes += 1
        remote = FileRemote(
            RemoteId(self._num_remotes),
            descriptor,
            self._context.epoch,
            directory=self._directory,
            options=self._options,
            reactor=self._reactor,
        )
        self._remotes[remote.id] = remote
        try:
            remote.set_connection(self._dialer.dial(sock, address, remote.send_attach, remote.lose))
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        if grant.id in self._grants:
            raise TransferError("this grant is open already")
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        self._grants[grant.id] = (grant, PageSet(grant.pages))

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        if self._grants.pop(grant, None) is None:
            return
        for inbound in list(self._inbound.values()):
            inbound.refuse_grant(grant)
        self._reactor.report(GrantQuiescent(grant))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote = self._remotes.get(write.remote)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        region = self._find_region(write.region)
        check_copies(write.copies, region.arrays, remote.descriptor.arrays)
        check_notification(write.notification)
        self._num_transfers += 1
        transfer = TransferId(self._num_transfers)
        remote.submit(transfer, write, region)
        return transfer

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        return self._reactor.poll()

    def close(self) -> None:
        """See `Transport`."""
        if self.readiness_fd is None:
            return
        for remote in self._remotes.values():
            remote.detach()
        for inbound in self._inbound.values():
            inbound.close()
        self._inbound.clear()
        if self._listener is not None:
            self._listener.close()
        if self._spool is not None:
            self._spool.close()
        self._reactor.close()
        self.readiness_fd = None

    def find_refusal(
        self, grant: TicketId, writer: Epoch, region: PagedRegion, pages: NDArray[np.int64]
    ) -> str | None:
        """See `Admission`."""
        found = self._grants.get(grant)
        if found is None:
            return "the grant is not open"
        admitted, page_set = found
        if admitted.writer != writer or admitted.region != region.handle:
            return "the grant is for another writer or region"
        return None if page_set.covers(pages) else "a page is outside the grant"

    def arrived(self, grant: TicketId, notification: bytes) -> None:
        """See `Admission`."""
        self._reactor.report(Arrived(grant, notification))

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region

    def _accept_peer(self, connection: Connection) -> None:
        """A writer proved itself: its first message names the region that it wants."""
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.set_handlers(partial(self._admit, connection), partial(self._forget, connection))

    def _admit(self, connection: Connection, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None:
            return
        attach = decode_attach(body)
        region = self._regions.get(RegionHandle(attach.region))
        if region is None or self._spool is None:
            connection.send_body(encode(NotAttached("no such region")))
            return
        inbound = FileInbound(
            connection,
            FileWriter(Epoch(attach.epoch), attach.link),
            region,
            spool=self._spool,
            direct=self._options.direct,
            admission=self,
        )
        self._inbound[connection] = inbound
        connection.cancel_deadline()
        connection.set_handlers(inbound.read, partial(self._forget, connection))
        connection.send_body(encode(Attached(region.arrays, self._spool.name, self._spool.proof)))

    def _forget(self, connection: Connection, error: TransferError) -> None:
        del error  # a writer that is gone is its own side's business
        inbound = self._inbound.pop(connection, None)
        if inbound is not None:
            inbound.close()
        if self._listener is not None:
            self._listener.forget(connection)
