"""The contract between handoff and whatever moves bytes.

A write copies pages of a local region into pages of a peer's region, then delivers a
*notification*: a few bytes for the peer's handoff, which arrive only after the pages are in place.
The receiver admits writes into a *grant*: a ticket id, the pages it covers and the one incarnation
of the one worker that may write. What a transport can not recall it must be able to wait for: after
`close_grant` it reports `GrantQuiescent` once, when nothing can land in that grant any more.

Two things only some transports do, and are protocols of their own. A read (`ReadsPages`,
`Capabilities.reads`) copies pages of a peer's region into pages of a local one. It needs no
notification: the reader itself knows when it is done, and no peer writes its pages. Where the owner
serves reads itself (`ScopesReads`), they need a grant, too. A view
(`ViewsPages`, `Capabilities.views`) shows the peer's pages where they lie, where two workers share
memory: nothing has to be copied. `as_reader` and `as_viewer` give the transport as one of these.

Every transport is owned by one thread (the handoff agent's); nothing here blocks except where it
is documented, and nothing calls back: results are returned from `poll`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Final,
    Literal,
    NewType,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

import msgspec

from baton.errors import ConfigError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId, WorkerId
from baton.record import Record
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.auth.credentials import Credentials
    from baton.clock import Clock
    from baton.kv.copies import PageCopies
    from baton.kv.device_digest import PieceParts
    from baton.net.tls import Tls
    from baton.telemetry.transfer_report import SegmentCounts

MemoryKind = Literal["host", "shared", "cuda"]
TransferId = NewType("TransferId", int)
RemoteId = NewType("RemoteId", int)
"""A transport's local name for a peer's region that it attached."""

MAX_NOTIFICATION_BYTES: Final = 65_536


class PageArray(msgspec.Struct, frozen=True):
    """Pages of one size at one stride: one layer's pages, `num_pages` of them."""

    offset_bytes: int
    page_bytes: int
    num_pages: int


class DeviceAccess(Protocol):
    """How this process works with a region's memory on a device. Thread: the handoff agent's."""

    def digest(self, layers: range, parts: PieceParts) -> bytes:
        """sum128 (`baton.kv.device_digest`) of each piece in each layer, layer after layer.

        Each has 16 bytes. Waits for the device's work on it, and for none of the model's.

        Raises:
            TransferError: a part is outside the region's pages.
        """
        ...

    def read(self, first_byte: int, num_bytes: int) -> bytes:
        """A copy of some bytes, counted from the region's beginning."""
        ...

    def write(self, first_byte: int, data: bytes) -> None:
        """Put bytes there; they are in place when it returns."""
        ...

    def allocate(self, shapes: Sequence[tuple[int, int]]) -> PagedRegion:
        """Another, zeroed region on the same device: an array for each `(num_pages, page_bytes)`.

        Raises:
            TransferError: there is not that much memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Where a region begins on a GPU: an address of this process, on one of its devices.

    `device` is CUDA's number of it in this process. `holds` is whatever keeps the memory allocated.
    Pages can be handed off only with `access`: their receiver compares digests.
    """

    device: int
    address: int
    holds: tuple[object, ...] = field(default=(), compare=False, repr=False)
    access: DeviceAccess | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PagedRegion:
    """Registered local memory: one page array for each layer.

    `memory` is the whole region, writable, format `B`; nothing where the kind is `cuda`. `fd` is
    the memfd behind it when the kind is `shared`, `device` where it is when the kind is `cuda`
    (there, what lies between two arrays need not be allocated). The owner keeps all of it alive
    until every transport that exposes it is closed. With `is_public` whoever attaches may read all
    of it, over every transport (see `ScopesReads`).
    """

    handle: RegionHandle
    kind: MemoryKind
    memory: memoryview
    arrays: tuple[PageArray, ...]
    fd: int | None = None
    device: DeviceMemory | None = None
    is_public: bool = False


class RegionDescriptor(msgspec.Struct, frozen=True):
    """What a peer needs to reach a region over one transport. Crosses the wire; never an address.

    `endpoint` is read by the transport named `transport` alone (`host:port`, a socket's name).
    """

    transport: str
    handle: RegionHandle
    epoch: Epoch
    arrays: tuple[PageArray, ...]
    endpoint: str


class Capabilities(msgspec.Struct, frozen=True):
    """What a transport can do, before any peer is known.

    `late_writes`: a write may land after it was reported as failed (hardware, or another library's
    thread, has it); only `GrantQuiescent` means that it can not any more.
    `reads`: pages of an attached remote can be read (`ReadsPages`).
    `views`: pages of an attached remote can be looked at in place (`ViewsPages`).
    `multi_array`: one write, or read, may be of several arrays (`PageCopies.num_layers`).
    `scopes_reads`: peers read only what was granted to them (`ScopesReads`).
    `admits_writes`: its writers can learn of grants from the handoff (`AdmitsWrites`).
    `late_notifications`: a write's notification may be made while its pages are copied
    (`LateNotification`): this process copies them, by its own instructions.
    """

    memory: tuple[MemoryKind, ...]
    same_host_only: bool
    same_process_only: bool = False
    encrypted: bool = False
    reads: bool = False
    late_writes: bool = False
    views: bool = False
    multi_array: bool = False
    scopes_reads: bool = False
    admits_writes: bool = False
    late_notifications: bool = False


class WriteGrant(Record, frozen=True):
    """Permission for `writer` to write into `pages` (the same page indices in every array).

    With `writer_name`, only for a peer whose certificate is that worker's. `is_announced`: the
    writer learns of it from the handoff (`AdmitsWrites`), so a transport need not send it.
    """

    id: TicketId
    region: RegionHandle
    writer: Epoch
    pages: NDArray[np.int64]
    writer_name: WorkerId | None = None
    is_announced: bool = False


class ReadGrant(Record, frozen=True):
    """Permission for the worker `reader_name`, incarnation `reader`, to read pages of a region."""

    id: TicketId
    region: RegionHandle
    reader: Epoch
    reader_name: WorkerId


class LateNotification(Protocol):
    """Makes the notification of one write from its pages, while these are in the cache.

    Only for a transport that claims `Capabilities.late_notifications`. Called by its owner thread,
    within the call that copies the write: `submit`, or the `poll` that finds its grant open. A
    write that fails before that calls neither method.
    """

    def add_pages(self, arrays: range, pages: list[int]) -> None:
        """These local pages of some arrays were just copied: each page pair's once, or none's."""
        ...

    def finish(self) -> bytes:
        """All were copied: the notification. Called once."""
        ...


class PageWrite(Record, frozen=True):
    """Copy `copies` (page indices of the local region → of the remote one), then `notification`.

    `late_notification` makes the notification in place of those bytes.
    """

    remote: RemoteId
    grant: TicketId
    region: RegionHandle
    copies: PageCopies
    notification: bytes = b""
    late_notification: LateNotification | None = None


class PageRead(Record, frozen=True):
    """Copy `copies` (page indices of the remote region → of the local one).

    `grant` is the peer's permission; None for a region that is public. `copied` gets the local
    arrays and the local pages of each part as soon as they are in place, within the call that puts
    them there: a transport whose copies pass through this process's cache calls it, for all pages
    or for none.
    """

    remote: RemoteId
    region: RegionHandle
    copies: PageCopies
    grant: TicketId | None = None
    copied: Callable[[range, list[int]], None] | None = None


class RemoteAttached(Record, frozen=True):
    """The peer's region can be written, or read, from now on."""

    remote: RemoteId


class RemoteLost(Record, frozen=True):
    """Attaching failed, or the connection to the peer broke. Transfers fail one by one."""

    remote: RemoteId
    error: TransferError


class WriteCompleted(msgspec.Struct, frozen=True, gc=False):
    """The local pages of this write may be reused; the notification was handed to the peer."""

    transfer: TransferId
    num_bytes: int


class WriteFailed(msgspec.Struct, frozen=True):
    """This write did not complete; some of its pages may have been written.

    Unless `Capabilities.late_writes`, this side will store nothing of it from now on, and what is
    on its way is the receiver's to drop once it has closed the grant: another transport may take
    over.
    """

    transfer: TransferId
    error: TransferError


class ReadCompleted(msgspec.Struct, frozen=True, gc=False):
    """The peer's pages, as they were at some moment since the submission, are in the local ones."""

    transfer: TransferId
    num_bytes: int


class ReadFailed(msgspec.Struct, frozen=True):
    """This read did not complete; some local pages may have changed, none will from now on."""

    transfer: TransferId
    error: TransferError


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A peer's write into `grant` is in place; `notification` is untrusted bytes from the peer."""

    grant: TicketId
    notification: bytes


class GrantQuiescent(Record, frozen=True):
    """Nothing can land in this closed grant any more: its pages may be reused."""

    grant: TicketId


# Those of every transfer are structs, which cost a fifth of a frozen dataclass's time.
TransferEvent: TypeAlias = (
    RemoteAttached
    | RemoteLost
    | WriteCompleted
    | WriteFailed
    | ReadCompleted
    | ReadFailed
    | Arrived
    | GrantQuiescent
)


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What every transport is built from, besides its own options.

    `bind_host` is the only address it may listen on. `clock` bounds connecting and authenticating.
    `tls` set: bytes that leave the host are to be encrypted. `rank`: of the engine's processes with
    the same options, which each listen at a configured port plus their rank.
    """

    credentials: Credentials
    epoch: Epoch
    bind_host: str
    clock: Clock
    tls: Tls | None = None
    rank: int = 0


class Transport(Protocol):
    """Moves pages between two regions. One owner thread; nothing blocks.

    `kind` is its entry point's name. `readiness_fd` becomes readable when `poll` has something to
    do, or is None: then the owner polls on a timer while anything is under way. Timeouts (of
    connecting, of a peer's proof of the key) do not make it readable: poll once a second in any
    case.
    """

    kind: str
    capabilities: Capabilities
    readiness_fd: int | None

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """Let peers who hold the cluster key write into `region`, through grants only.

        Raises:
            TransferError: this kind of memory cannot be exposed, or a listener cannot be opened.
        """
        ...

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """Connect to a peer's region; `RemoteAttached` or `RemoteLost` follows from `poll`.

        Raises:
            TransferError: the descriptor is for another transport or makes no sense.
        """
        ...

    def detach(self, remote: RemoteId) -> None:
        """Forget a remote, lost ones too: its unfinished writes fail. Unknown ids are ignored."""
        ...

    def open_grant(self, grant: WriteGrant) -> None:
        """Admit writes from `grant.writer` into `grant.pages`.

        Raises:
            TransferError: unknown region, a page out of range, or the id is open already.
        """
        ...

    def close_grant(self, grant: TicketId) -> None:
        """Admit no more writes; `GrantQuiescent` follows once from `poll`, perhaps much later.

        A write that arrives from now on is dropped by the receiver where the receiver does the
        writing, or refused by the writer where the peer does. Unknown ids are ignored.
        """
        ...

    def finish_grant(self, grant: TicketId) -> bool:
        """Close a grant whose writer has reported its last write, and all of whose writes arrived.

        Whether nothing can land in it any more; then no event follows. Where that is not certain
        (`late_writes`, or the writer is out of reach), it is `close_grant`.
        """
        ...

    def submit(self, write: PageWrite) -> TransferId:
        """Post a write; `WriteCompleted` or `WriteFailed` follows once from `poll`.

        Source pages must not change until then. Writes may arrive in any order: a receiver counts
        what has landed. To a remote that was lost and not detached, a write is posted and fails.

        Raises:
            TransferError: unknown remote or one that is still attaching, a region that was not
                exposed here, a page out of range, or a notification too long.
        """
        ...

    def poll(self) -> list[TransferEvent]:
        """Make progress and return what happened since the last call, each thing once.

        Transfers that are under way together may end in any order.
        """
        ...

    def close(self) -> None:
        """Release sockets and mappings; idempotent. No event is returned afterwards.

        `readiness_fd` is None from now on.
        """
        ...


@runtime_checkable
class ReadsPages(Protocol):
    """A transport that reads a peer's pages (`Capabilities.reads`)."""

    def read(self, read: PageRead) -> TransferId:
        """Post a read; `ReadCompleted` or `ReadFailed` follows once from `poll`.

        The peer's pages are read whenever the transport gets to it: that they do not change until
        then is the peer's promise to its handoff, and digests show whether it was kept.

        Raises:
            TransferError: unknown remote or one that is still attaching, a region that was not
                exposed here, or a page out of range.
        """
        ...


class AdmitsWrites(Protocol):
    """A transport whose writers must know a grant (`Capabilities.admits_writes`).

    They learn of it from the handoff. Where that has not come yet when a write is submitted, the
    transport itself asks the peer.
    """

    def admit_writes(self, remote: RemoteId, grant: TicketId, pages: NDArray[np.int64]) -> None:
        """The peer has opened a grant: it may be written. One that it has closed stays closed."""
        ...

    def forget_grant(self, remote: RemoteId, grant: TicketId) -> None:
        """The peer has all, and closes the grant without asking. Unknown ids are ignored."""
        ...


class ScopesReads(Protocol):
    """A transport over which a peer reads only granted pages (`Capabilities.scopes_reads`)."""

    def admit_reads(self, grant: ReadGrant, arrays: range, pages: NDArray[np.int64]) -> None:
        """Let the grant's reader read these pages of some arrays, besides those from before.

        Raises:
            TransferError: unknown region, no such array, or a page out of range.
        """
        ...

    def close_read_grant(self, grant: TicketId) -> None:
        """Send nothing of these pages from now on. Unknown ids are ignored.

        A read that is under way fails, or ends with bytes that are not the pages'.
        """
        ...


@runtime_checkable
class ViewsPages(Protocol):
    """A transport that shows a peer's pages in place (`Capabilities.views`)."""

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """The peer's pages of one array where they lie: uint8 `[num_pages, page_bytes]`.

        Nothing is copied, and the peer is not notified: what it stores is seen at once. That pages
        do not change while they are in use is the peer's promise to its handoff, as for reads.

        The view cannot be made writable, so no mistake of its user can reach the peer's pages. It
        is good until the remote is detached or lost, or this transport closed: ask for it when it
        is needed rather than keep it. One that is kept stays readable memory whose content is no
        longer defined, holds that memory back from the kernel until it goes, and keeps no grant
        from becoming quiescent. It is of no use in a forked child.

        Raises:
            PeerLostError: the remote was lost.
            TransferError: unknown remote or one that is still attaching, or no such array.
        """
        ...


@runtime_checkable
class TracksReaders(Protocol):
    """A transport that knows the processes which mapped its regions (`Capabilities.views`)."""

    def open_reader(self, reader: Epoch) -> int | None:
        """A descriptor that becomes readable when that process has ended, with its mappings.

        Of the worker of that incarnation, if it is attached now; None where it is not, or where the
        kernel cannot report it. The caller closes it; it outlives the connection.
        """
        ...


@runtime_checkable
class CountsSegments(Protocol):
    """A transport over TCP whose kernel counts what it sends."""

    def take_segments(self) -> dict[Epoch, SegmentCounts] | None:
        """What was sent to each peer, by its epoch, since the last call.

        Also over connections that are closed, or that the peer opened. None where the kernel does
        not count it, or in a way that is not known, and before a region was exposed.
        """
        ...


def as_reader(transport: Transport) -> ReadsPages:
    """The transport, to read with.

    Raises:
        TransferError: it does not read.
    """
    # Not isinstance, which costs several microseconds for a protocol.
    if transport.capabilities.reads and hasattr(transport, "read"):
        return cast("ReadsPages", transport)
    raise TransferError(
        f"{transport.kind} does not read a peer's pages; ask the peer to write them"
    )


def as_viewer(transport: Transport) -> ViewsPages:
    """The transport, to view with.

    Raises:
        TransferError: it has no views.
    """
    if transport.capabilities.views and hasattr(transport, "view"):
        return cast("ViewsPages", transport)
    instead = "read them" if transport.capabilities.reads else "ask the peer to write them"
    raise TransferError(f"{transport.kind} does not show a peer's pages in place; {instead}")


def find_read_scopes(transports: Sequence[Transport]) -> tuple[ScopesReads, ...]:
    """Those of the transports over which a peer reads only granted pages."""
    return tuple(cast("ScopesReads", t) for t in transports if t.capabilities.scopes_reads)


def as_admitter(transport: Transport) -> AdmitsWrites | None:
    """The transport, where its writers learn of grants from the handoff."""
    return cast("AdmitsWrites", transport) if transport.capabilities.admits_writes else None


class TransportFactory(Protocol):
    """What an entry point of `baton.transports` builds from its options."""

    def __call__(self, context: TransportContext) -> Transport:
        """Build a transport; opens no socket yet."""
        ...


TRANSPORTS: Final[Registry[TransportFactory]] = Registry("baton.transports", "transfer.options")


def build_transports(
    kinds: Sequence[str], options: Mapping[str, Mapping[str, object]], context: TransportContext
) -> tuple[Transport, ...]:
    """Every configured transport, in that order; `options` are by kind.

    Raises:
        ConfigError: an unknown kind or option, or `context.tls` asks for what one cannot do.
        TransferError: one cannot work on this machine.
    """
    transports = tuple(TRANSPORTS.build(kind, options.get(kind, {}))(context) for kind in kinds)
    if context.tls is not None and (plain := [t.kind for t in transports if _is_plain(t)]):
        for transport in transports:
            transport.close()
        raise ConfigError(
            f'security.tls = "all", and {", ".join(plain)} cannot encrypt what leaves the host: '
            "leave it out of transfer.transports"
        )
    return transports


def choose_memory(transports: Sequence[Transport]) -> MemoryKind:
    """Where KV must be so that all of these move it: `shared` memory of the host, or a GPU's.

    Digests of a GPU's memory have no key, so that it is moved within a host only.

    Raises:
        ConfigError: they have neither in common, or one moves a GPU's memory to other hosts.
    """
    if all("shared" in each.capabilities.memory for each in transports):
        return "shared"
    if all("cuda" in each.capabilities.memory for each in transports):
        beyond = [t.kind for t in transports if _leaves_host(t.capabilities)]
        if beyond:
            raise ConfigError(
                f"{', '.join(beyond)} would move a GPU's memory to other hosts, where it could be "
                "changed on its way: its digests have no key. Leave it out of transfer.transports"
            )
        return "cuda"
    kinds = "; ".join(f"{t.kind}: {', '.join(t.capabilities.memory)}" for t in transports)
    raise ConfigError(
        f"no memory can be reached by all of transfer.transports ({kinds}): cuda_ipc goes with no "
        "other transport, since KV stays in the GPU's memory"
    )


def _leaves_host(capabilities: Capabilities) -> bool:
    """Whether a transport reaches other hosts."""
    return not (capabilities.same_host_only or capabilities.same_process_only)


def _is_plain(transport: Transport) -> bool:
    can = transport.capabilities
    return not can.encrypted and _leaves_host(can)
