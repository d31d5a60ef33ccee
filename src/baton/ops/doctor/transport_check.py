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
import select
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, Self, TypeAlias, TypeVar

import msgspec
import numpy as np

from baton.auth.key import ClusterKey
from baton.errors import BatonError, TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.ops.doctor.isolation import exit_with_parent
from baton.ops.doctor.network import find_open_listeners
from baton.transfer.devices.options import choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    GrantQuiescent,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteLost,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
)
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    release_region,
    view_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.transfer.devices.options import AllocateRegion
    from baton.transfer.interface import (
        Capabilities,
        PagedRegion,
        RemoteId,
        TransferEvent,
        Transport,
    )

FINAL_ERROR_WAIT_S: Final = 0.2
MAX_LINE_BYTES: Final = 1 << 20


class RegionReady(msgspec.Struct, frozen=True, tag="region_ready"):
    """Owner → writer: the region can be attached, its grant is open."""

    descriptor: RegionDescriptor


class PagesVerified(msgspec.Struct, frozen=True, tag="pages_verified"):
    """Owner → writer: every byte is where it should be. What the owner listens on, by the way."""

    listeners: tuple[str, ...]


class CheckFailed(msgspec.Struct, frozen=True, tag="check_failed"):
    """Owner → writer: it cannot go on."""

    reason: str


Message: TypeAlias = RegionReady | PagesVerified | CheckFailed

_decoder: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


class Channel:
    """JSON lines between the two processes. Owner thread: the process's only one."""

    def __init__(self, sock: socket.socket) -> None:
        self.fd = sock.fileno()
        self._sock = sock
        self._text = b""

    def send(self, message: Message) -> None:
        """Send a message to the other process."""
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def read(self) -> RegionReady | PagesVerified | None:
        """The next message, None if not all of it is here yet.

        Raises:
            TransferError: the other process failed, or died.
        """
        more = self._sock.recv(MAX_LINE_BYTES)
        if not more:
            raise TransferError("the other process died while it was tried")
        self._text += more
        line, end, rest = self._text.partition(b"\n")
        if not end:
            return None
        self._text = rest
        message = _decoder.decode(line)
        if isinstance(message, CheckFailed):
            raise TransferError(f"the other process: {message.reason}")
        return message

    def raise_peer_error(self) -> None:
        """Raise what the other process failed by, if that is how it ended."""
        while select.select([self.fd], [], [], FINAL_ERROR_WAIT_S)[0]:
            self.read()


NUM_PAGES: Final = 64
NUM_MOVED: Final = 48
PAGE_BYTES: Final = 32 * 1024


def random_pages(seed: int) -> NDArray[np.uint8]:
    """uint8 `[NUM_PAGES, PAGE_BYTES]`, the same for the same seed."""
    shape = NUM_PAGES, PAGE_BYTES
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def choose_pages() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and destination pages, int64 `[NUM_MOVED]` each, scattered, the same in both."""
    order = np.random.default_rng(2)
    src, dst = order.permutation(NUM_PAGES)[:NUM_MOVED], order.permutation(NUM_PAGES)[:NUM_MOVED]
    return src.astype(np.int64), dst.astype(np.int64)


def describe_copies(src_pages: NDArray[np.int64], dst_pages: NDArray[np.int64]) -> PageCopies:
    """Copies of whole pages."""
    spans = np.array([[0, 0, PAGE_BYTES]], np.int64)
    return PageCopies(0, (CopyGroup(src_pages, dst_pages, spans),))


def expect_landed() -> NDArray[np.uint8]:
    """The owner's pages after the write: what was not named stays 0."""
    src_pages, dst_pages = choose_pages()
    pages = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
    pages[dst_pages] = random_pages(1)[src_pages]
    return pages


def expect_read() -> NDArray[np.uint8]:
    """The writer's pages after it read what it wrote, in another order."""
    src_pages, dst_pages = choose_pages()
    pages = random_pages(1)
    pages[src_pages[::-1]] = expect_landed()[dst_pages]
    return pages


def verify(pages: NDArray[np.uint8], expected: NDArray[np.uint8], verb: str) -> None:
    """Compare all bytes of a region.

    Raises:
        TransferError: gives how many pages differ.
    """
    num_wrong = int((pages != expected).any(axis=1).sum())
    if num_wrong:
        raise TransferError(f"{num_wrong} of {NUM_PAGES} pages are wrong after they were {verb}")


CHECK_TIMEOUT_S: Final = 8.0
BUSY_POLL_S: Final = 0.0005
POLL_S: Final = 0.1
NOTIFICATION: Final = b"baton doctor"

E = TypeVar("E")


class NotCheckedError(TransferError):
    """The transport moves only memory of kinds that the doctor does not allocate."""


class CheckEndpoint:
    """One side's transport and region. Events that no call waits for yet are kept.

    All that waits raises `TransferError` when the trial's time is over, or something failed.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        allocate: AllocateRegion = allocate_shared_region,
    ) -> None:
        self.transport, self._allocate = transport, allocate
        self._clock = clock
        self._deadline = clock.now() + CHECK_TIMEOUT_S
        self._events: list[TransferEvent] = []
        self._region: PagedRegion | None = None
        self.descriptor: RegionDescriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        if self._region is not None:
            release_region(self._region)

    @property
    def pages(self) -> NDArray[np.uint8]:
        """uint8 `[NUM_PAGES, PAGE_BYTES]`."""
        region = self.region
        return view_pages(region.memory, region.arrays[0])

    @property
    def region(self) -> PagedRegion:
        """What was exposed."""
        if self._region is None:
            raise TransferError("nothing is exposed yet")
        return self._region

    def expose(self, seed: int | None) -> PagedRegion:
        """Pages of 0, or of random bytes."""
        self._region = _allocate(self.transport.capabilities, self._allocate)
        self.pages[:] = 0 if seed is None else random_pages(seed)
        self.descriptor = self.transport.expose(self._region)
        return self._region

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """Attach, and wait for it."""
        remote = self.transport.attach(descriptor)
        self.wait_for(RemoteAttached, "attaching the other process's region")
        return remote

    def write(self, remote: RemoteId, grant: TicketId) -> None:
        """Write the pages of the trial, and wait for it."""
        copies = describe_copies(*choose_pages())
        self.transport.submit(PageWrite(remote, grant, self.region.handle, copies, NOTIFICATION))
        self.wait_for(WriteCompleted, "the write's completion")

    def read(self, remote: RemoteId) -> None:
        """Read them back, in another order, and wait for it."""
        src_pages, dst_pages = choose_pages()
        copies = describe_copies(dst_pages, src_pages[::-1])
        self.transport.read(PageRead(remote, self.region.handle, copies))
        self.wait_for(ReadCompleted, "the read's completion")

    def receive(self, channel: Channel, kind: type[E], what: str) -> E:
        """The next message, while the transport goes on."""
        received: list[object] = []

        def is_received() -> bool:
            if select.select([channel.fd], [], [], 0)[0]:
                received.append(channel.read())
            return bool(received) and received[-1] is not None

        self._pump(is_received, what, channel.fd)
        if not isinstance(received[-1], kind):
            raise TransferError(f"the other process sent another message: waited for {what}")
        return received[-1]

    def wait_for(self, kind: type[E], what: str) -> E:
        """The first event of a kind.

        Raises:
            TransferError: it did not happen in time, or something failed instead.
        """
        found: list[E] = []

        def is_found() -> bool:
            found.extend(event for event in self._events if isinstance(event, kind))
            return bool(found)

        self._pump(is_found, what)
        self._events = [event for event in self._events if event is not found[0]]
        return found[0]

    def serve_until(self, channel: Channel) -> None:
        """Keep the transport going until the other process hangs up."""
        self._pump(
            lambda: bool(select.select([channel.fd], [], [], 0)[0]),
            "the other process to end",
            channel.fd,
        )

    def _pump(self, is_done: Callable[[], bool], what: str, *fds: int) -> None:
        self._poll()
        while not is_done():
            if self._clock.now() >= self._deadline:
                raise TransferError(f"timed out waiting for {what} ({CHECK_TIMEOUT_S:g} s in all)")
            ready_fd = self.transport.readiness_fd
            watched = [*fds, *([] if ready_fd is None else [ready_fd])]
            select.select(watched, [], [], BUSY_POLL_S if ready_fd is None else POLL_S)
            self._poll()

    def _poll(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, RemoteLost | WriteFailed | ReadFailed):
                raise event.error
            self._events.append(event)


def _allocate(capabilities: Capabilities, allocate_shared: AllocateRegion) -> PagedRegion:
    """Memory of the first kind that the transport takes and this process can allocate.

    Raises:
        NotCheckedError: there is no such kind.
        TransferError: there is not enough memory.
    """
    shapes = [(NUM_PAGES, PAGE_BYTES)]
    for kind in capabilities.memory:
        if kind == "shared":
            return allocate_shared(shapes)
        if kind == "host":
            return allocate_host_region(shapes)
    raise NotCheckedError(f"it moves {' and '.join(capabilities.memory)} memory only")


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
