"""The contract, for any library that moves bytes one-sidedly.

The owner cannot stop a posted transfer of a peer. It asks (`Close`, `Closed`), and believes
nothing but an answer, or the end of the engine that served the peer; where the peer's process has
a hand of its own in this memory, its death.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle
from baton.transfer.bounds import check_copies, check_notice
from baton.transfer.dialing import Dialer
from baton.transfer.interface import (
    Capabilities,
    RegionDescriptor,
    RemoteId,
    TransferId,
    WindowQuiescent,
)
from baton.transfer.ledger import WindowLedger, WriterId
from baton.transfer.listening import Listener
from baton.transfer.messages import encode
from baton.transfer.onesided.endpoints import open_dialer, open_listener
from baton.transfer.onesided.inbound import Inbound
from baton.transfer.onesided.pacer import Pacer
from baton.transfer.onesided.remote import Remote
from baton.transfer.onesided.wire import decode_attach
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays
from baton.transfer.window_messages import MAX_BODY_BYTES, MAX_WINDOW_PAGES, NotAttached
from baton.transfer.windows import check_window_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        Window,
    )
    from baton.transfer.onesided.engine import Engine, Library

MAX_PEERS: Final = 64
"""Peers of this side's regions that have an engine here, or had one and may still store."""

MAX_REASON_CHARS: Final = 256

M = TypeVar("M")


class OneSidedTransport(Generic[M]):
    """See `Transport`. Owner thread: whoever calls `poll`; `submit` and `read` may copy.

    A forked child has copies of the library's sockets and must leave them alone: there, moving and
    polling raise, and closing does nothing.
    """

    def __init__(
        self,
        kind: str,
        library: Library[M],
        context: TransportContext,
        *,
        connect_timeout_s: float,
        advertise_host: str | None,
    ) -> None:
        self.kind = kind
        self.capabilities = Capabilities(
            memory=library.memory,
            same_host_only=library.reach == "host",
            reads=True,
            posts=True,
        )
        self._library, self._context = library, context
        self._process = os.getpid()
        self._advertise_host = advertise_host
        self._reactor = Reactor(context.clock)
        self._pacer = Pacer(self._reactor, context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(self._reactor, context.key, kind, timeout_s=connect_timeout_s)
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._ledger = WindowLedger()
        self._inbound: dict[WriterId, Inbound] = {}
        self._remotes: dict[RemoteId, Remote[M]] = {}
        self._leaving: list[Remote[M]] = []
        self._listener: Listener | None = None
        self._endpoint = ""
        self._num_remotes = self._num_transfers = self._num_writers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`. The first call starts the library once: it takes a while, and may fail.

        Raises:
            TransferError: this kind of memory cannot be exposed, the library does not work here,
                or a listener cannot be opened.
        """
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"{self.kind} cannot expose {region.kind} memory")
        needs_descriptor = "host" not in self.capabilities.memory
        if needs_descriptor and region.kind == "shared" and region.fd is None:
            raise TransferError(
                f"{self.kind} needs memory with a descriptor of its own; this region lies in a "
                f"device: take {self.kind} out of transfer.transports"
            )
        check_arrays(region.arrays)
        if self._listener is None:
            self._library.open_engine().close()
            self._listen()
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind:
            raise TransferError(f"a {descriptor.transport} descriptor was given to {self.kind}")
        check_arrays(descriptor.arrays)
        sock, address = open_dialer(self._library.reach, descriptor.endpoint)
        self._num_remotes += 1
        remote = Remote(
            RemoteId(self._num_remotes),
            descriptor,
            self._context.epoch,
            library=self._library,
            reactor=self._reactor,
        )
        self._remotes[remote.id] = remote
        try:
            remote.own(self._dialer.dial(sock, address, remote.begin, remote.lose))
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()
            self._leaving = [each for each in (*self._leaving, known) if not each.is_gone]

    def open_window(self, window: Window) -> None:
        """See `Transport`."""
        region = self._find_region(window.region)
        check_window_pages(window.pages, region.arrays)
        if len(window.pages) > MAX_WINDOW_PAGES:
            raise TransferError(f"a window of more than {MAX_WINDOW_PAGES} pages")
        for writer in self._ledger.open_window(window):
            self._inbound[writer].tell_open(window)

    def close_window(self, window: TicketId) -> None:
        """See `Transport`."""
        for writer in self._ledger.close_window(window):
            self._inbound[writer].ask_close(window)
        for quiescent in self._ledger.take_quiescent():
            self._reactor.report(WindowQuiescent(quiescent))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        self._check_process()
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        check_copies(write.copies, region.arrays, remote.descriptor.arrays)
        check_notice(write.notice)
        transfer = self._new_transfer()
        remote.submit(transfer, write, region)
        self._pace()
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`."""
        self._check_process()
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        check_copies(read.copies, remote.descriptor.arrays, region.arrays)
        transfer = self._new_transfer()
        remote.read(transfer, read.copies, region)
        self._pace()
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `Transport`: this one does not lend."""
        del remote, array
        raise TransferError(f"{self.kind} does not lend a peer's pages; read them")

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        self._check_process()
        for remote in list(self._remotes.values()):
            if remote.is_moving:
                remote.advance()
        for inbound in list(self._inbound.values()):
            if inbound.is_moving:
                inbound.serve()
        events = self._reactor.poll()
        if self.readiness_fd is not None:
            if events:
                self._pacer.stir()
            self._pace()
        return [*events, *map(WindowQuiescent, self._ledger.take_quiescent())]

    def close(self) -> None:
        """See `Transport`."""
        if self.readiness_fd is None or self._process != os.getpid():
            return
        for remote in (*self._remotes.values(), *self._leaving):
            remote.close()
        if self._listener is not None:
            self._listener.close()
        for inbound in self._inbound.values():
            inbound.close()
        self._inbound.clear()
        self._pacer.close()
        self._reactor.close()
        self.readiness_fd = None

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise TransferError(f"this {self.kind} transport belongs to the parent process")

    def _pace(self) -> None:
        """Be polled again soon if a library here has something to do that wakes nobody."""
        moving = any(remote.is_moving for remote in self._remotes.values())
        served = any(inbound.is_moving for inbound in self._inbound.values())
        self._pacer.pace(is_under_way=moving or served)

    def _listen(self) -> None:
        sock, self._endpoint = open_listener(
            self._library.reach, self._context.bind_host, self._advertise_host
        )
        self._listener = Listener(
            sock, self._reactor, self._context.key, self.kind, on_peer=self._welcome
        )

    def _welcome(self, connection: Connection) -> None:
        """A peer proved itself: its first message says which region it wants."""
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.become(partial(self._admit, connection), lambda _: self._forget(connection))

    def _admit(self, connection: Connection, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None:
            return
        attach = decode_attach(body)
        region = self._regions.get(RegionHandle(attach.region))
        if region is None:
            connection.send_body(encode(NotAttached("no such region")))
            return
        if self._ledger.num_writers >= MAX_PEERS:
            raise ProtocolError("too many peers hold this memory")
        try:
            engine, introduction = self._introduce(region)
        except TransferError as exc:
            connection.send_body(encode(NotAttached(str(exc)[:MAX_REASON_CHARS])))
            return
        self._num_writers += 1
        writer = WriterId(self._num_writers)
        inbound = Inbound(
            writer,
            connection,
            engine,
            ledger=self._ledger,
            reactor=self._reactor,
            on_over=partial(self._peer_over, connection),
        )
        self._inbound[writer] = inbound
        windows = self._ledger.add_writer(writer, Epoch(attach.epoch), region.handle)
        inbound.welcome(region, introduction, windows)

    def _introduce(self, region: PagedRegion) -> tuple[Engine[M], bytes]:
        engine = self._library.open_engine()
        try:
            return engine, engine.introduce(region)
        except TransferError:
            engine.close()
            raise

    def _peer_over(self, connection: Connection, writer: WriterId) -> None:
        self._forget(connection)
        self._inbound.pop(writer, None)

    def _forget(self, connection: Connection) -> None:
        if self._listener is not None:
            self._listener.forget(connection)

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> Remote[M]:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region
