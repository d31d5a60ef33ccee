"""One transport, tried for real: two processes, scattered pages, every byte verified.

this process (writer, reader)              its child (owner)
─────────────────────────────              ─────────────────
                               ◄─ Ready    exposes a region, opens a grant
attaches, writes pages, waits
                               ◄─ Landed   saw the notification, verified all bytes, closed the
reads them back, verifies                  grant, waited for quiescence
closes the channel                         ends
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from baton.auth.key import ClusterKey
from baton.errors import BatonError, TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.ops.doctor.isolation import exit_with_parent
from baton.ops.doctor.listeners import find_open_listeners
from baton.ops.doctor.transport_check_channel import (
    Channel,
    CheckFailed,
    PagesVerified,
    RegionReady,
)
from baton.ops.doctor.transport_check_endpoint import NOTIFICATION, CheckEndpoint
from baton.ops.doctor.transport_check_pages import (
    NUM_MOVED,
    PAGE_BYTES,
    choose_pages,
    expect_landed,
    expect_read,
    verify,
)
from baton.transfer.devices.extents import choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    GrantQuiescent,
    TransportContext,
    WriteGrant,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.clock import Clock
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import Transport

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TransferCheckResult:
    """What a trial showed: pages were written, and read back where the transport reads.

    `listeners`: sockets outside loopback that the transport's library opened.
    """

    num_bytes: int
    was_read: bool
    listeners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _CheckSettings:
    """What both processes know before they part."""

    kind: str
    options: Mapping[str, object]
    clock: Clock
    key: ClusterKey = field(default_factory=ClusterKey.generate)
    writer: Epoch = field(default_factory=new_epoch)
    owner: Epoch = field(default_factory=new_epoch)
    grant: TicketId = field(default_factory=new_ticket_id)

    def build(self, epoch: Epoch) -> Transport:
        """This side's transport; it may listen on loopback only."""
        context = TransportContext(self.key, epoch, LOOPBACK, self.clock)
        return TRANSPORTS.build(self.kind, self.options)(context)

    @property
    def allocate(self) -> AllocateRegion:
        """Where engines with these options have their regions."""
        return choose_allocation({self.kind: self.options})


def run_transport_check(
    kind: str, options: Mapping[str, object], clock: Clock
) -> TransferCheckResult:
    """Move pages by one transport between this process and a child of it.

    Raises:
        NotCheckedError: it moves no memory that could be tried.
        TransferError: the transport does not work here; names the step.
        ConfigError: there is no such transport, or its options make no sense.
        Exception: whatever else the plug-in raises while it is loaded or used.
    """
    settings = _CheckSettings(kind, options, clock)
    # Two processes before either loads the plug-in: libraries with threads do not survive a fork.
    own_socket, peer_socket = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        own_socket.close()
        _run_owner_and_exit(settings, peer_socket)
    peer_socket.close()
    with (
        own_socket,
        CheckEndpoint(settings.build(settings.writer), clock, settings.allocate) as writer,
    ):
        channel = Channel(own_socket)
        writer.expose(seed=1)
        try:
            moved = _write_and_read(settings, writer, channel)
        except TransferError:
            channel.raise_peer_error()  # its error, rather than that it closed the channel
            raise
    os.waitpid(pid, 0)  # it tidies up behind itself now that the channel is closed
    return moved


def _write_and_read(
    settings: _CheckSettings, writer: CheckEndpoint, channel: Channel
) -> TransferCheckResult:
    ready = writer.receive(channel, RegionReady, "the other process to expose its region")
    remote = writer.attach(ready.descriptor)
    writer.write(remote, settings.grant)
    landed = writer.receive(channel, PagesVerified, "the pages to arrive")
    reads = writer.transport.capabilities.reads
    if reads:
        writer.read(remote)
        verify(writer.pages, expect_read(), "read")
    listeners = {*landed.listeners, *find_open_listeners()}
    writer.transport.detach(remote)
    return TransferCheckResult(NUM_MOVED * PAGE_BYTES, reads, tuple(sorted(listeners)))


def _run_owner_and_exit(settings: _CheckSettings, sock: socket.socket) -> NoReturn:
    """In the child."""
    try:
        exit_with_parent()
        channel = Channel(sock)
        try:
            with CheckEndpoint(
                settings.build(settings.owner), settings.clock, settings.allocate
            ) as owner:
                _run_owner(settings, owner, channel)
        except Exception as exc:  # noqa: BLE001 - the error is sent to the writer
            channel.send(CheckFailed(describe_error(exc)))
    finally:
        os._exit(0)


def _run_owner(settings: _CheckSettings, owner: CheckEndpoint, channel: Channel) -> None:
    region = owner.expose(seed=None)
    _, dst_pages = choose_pages()
    owner.transport.open_grant(
        WriteGrant(settings.grant, region.handle, settings.writer, dst_pages)
    )
    channel.send(RegionReady(owner.descriptor))
    arrived = owner.wait_for(Arrived, "a write to arrive")
    if arrived != Arrived(settings.grant, NOTIFICATION):
        raise TransferError("another notification arrived than was sent")
    verify(owner.pages, expect_landed(), "written")
    owner.transport.close_grant(settings.grant)
    owner.wait_for(GrantQuiescent, "the closed grant to be quiescent")
    channel.send(PagesVerified(find_open_listeners()))
    owner.serve_until(channel)


def describe_error(error: BaseException) -> str:
    """One line; with the type's name where it is none of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, BatonError) and text else f"{type(error).__name__}: {text}"
