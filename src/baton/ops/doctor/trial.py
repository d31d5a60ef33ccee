"""One transport, tried for real: two processes, scattered pages, every byte verified.

this process (writer, reader)              its child (owner)
─────────────────────────────              ─────────────────
                               ◄─ Ready    exposes a region, opens a window
attaches, writes pages, waits
                               ◄─ Landed   saw the notice, verified all bytes, closed the
reads them back, verifies                  window, waited for quiescence
closes the channel                         ends
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from baton.authority.key import ClusterKey
from baton.errors import BatonError, TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.ops.doctor.isolation import die_with_parent
from baton.ops.doctor.listeners import find_open_listeners
from baton.ops.doctor.trial_channel import Channel, Failed, Landed, Ready
from baton.ops.doctor.trial_pages import (
    NUM_MOVED,
    PAGE_BYTES,
    choose_pages,
    expect_landed,
    expect_read,
    verify,
)
from baton.ops.doctor.trial_party import NOTICE, Party
from baton.transfer.devices.options import choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    TransportContext,
    Window,
    WindowQuiescent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.clock import Clock
    from baton.transfer.devices.options import AllocateRegion
    from baton.transfer.interface import Transport

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Moved:
    """What a trial showed: pages were written, and read back where the transport reads.

    `listeners`: sockets outside loopback that the transport's library opened.
    """

    num_bytes: int
    was_read: bool
    listeners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Terms:
    """What both processes know before they part."""

    kind: str
    options: Mapping[str, object]
    clock: Clock
    key: ClusterKey = field(default_factory=ClusterKey.generate)
    writer: Epoch = field(default_factory=new_epoch)
    owner: Epoch = field(default_factory=new_epoch)
    window: TicketId = field(default_factory=new_ticket_id)

    def build(self, epoch: Epoch) -> Transport:
        """This side's transport; it may listen on loopback only."""
        context = TransportContext(self.key, epoch, LOOPBACK, self.clock)
        return TRANSPORTS.build(self.kind, self.options)(context)

    @property
    def allocate(self) -> AllocateRegion:
        """Where engines with these options have their regions."""
        return choose_allocation({self.kind: self.options})


def try_transport(kind: str, options: Mapping[str, object], clock: Clock) -> Moved:
    """Move pages by one transport between this process and a child of it.

    Raises:
        NotTriedError: it moves no memory that could be tried.
        TransferError: the transport does not work here; says at which step.
        ConfigError: there is no such transport, or its options make no sense.
        Exception: whatever else the plug-in raises while it is loaded or used.
    """
    terms = _Terms(kind, options, clock)
    # Two processes before either loads the plug-in: libraries with threads do not survive a fork.
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _own_and_exit(terms, theirs)
    theirs.close()
    with ours, Party(terms.build(terms.writer), clock, terms.allocate) as writer:
        channel = Channel(ours)
        writer.expose(seed=1)
        try:
            moved = _write_and_read(terms, writer, channel)
        except TransferError:
            channel.raise_last_words()  # why it hung up says more than that it did
            raise
    os.waitpid(pid, 0)  # it tidies up behind itself now that the channel is closed
    return moved


def _write_and_read(terms: _Terms, writer: Party, channel: Channel) -> Moved:
    ready = writer.hear(channel, Ready, "the other process to expose its region")
    remote = writer.attach(ready.descriptor)
    writer.write(remote, terms.window)
    landed = writer.hear(channel, Landed, "the pages to arrive")
    reads = writer.transport.capabilities.reads
    if reads:
        writer.read(remote)
        verify(writer.pages, expect_read(), "read")
    listeners = {*landed.listeners, *find_open_listeners()}
    writer.transport.detach(remote)
    return Moved(NUM_MOVED * PAGE_BYTES, reads, tuple(sorted(listeners)))


def _own_and_exit(terms: _Terms, sock: socket.socket) -> NoReturn:
    """In the child."""
    try:
        die_with_parent()
        channel = Channel(sock)
        try:
            with Party(terms.build(terms.owner), terms.clock, terms.allocate) as owner:
                _own(terms, owner, channel)
        except Exception as exc:  # noqa: BLE001 - the writer is told, whatever it was
            channel.say(Failed(describe_error(exc)))
    finally:
        os._exit(0)


def _own(terms: _Terms, owner: Party, channel: Channel) -> None:
    region = owner.expose(seed=None)
    _, dst_pages = choose_pages()
    owner.transport.open_window(Window(terms.window, region.handle, terms.writer, dst_pages))
    channel.say(Ready(owner.descriptor))
    arrived = owner.wait_for(Arrived, "a write to arrive")
    if arrived != Arrived(terms.window, NOTICE):
        raise TransferError("another notice arrived than was sent")
    verify(owner.pages, expect_landed(), "written")
    owner.transport.close_window(terms.window)
    owner.wait_for(WindowQuiescent, "the closed window to be quiescent")
    channel.say(Landed(find_open_listeners()))
    owner.serve_until(channel)


def describe_error(error: BaseException) -> str:
    """One line; with the type's name where it is none of ours."""
    text = " ".join(str(error).split())
    return text if isinstance(error, BatonError) and text else f"{type(error).__name__}: {text}"
