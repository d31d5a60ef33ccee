"""Grants where the peer writes the pages itself: messages, and the writing side's table of them.

Of `shared` and of every one-sided transport (docs/wire/transfer.md). The owner of the pages opens
a grant; the peer writes into it, and each `WriteNotification` says that one write is in place.
`PeerGrants` holds a write back until its grant is known to be open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar, assert_never

import msgspec
import numpy as np

from baton.errors import ProtocolError, TransferError
from baton.ids import TicketId
from baton.kv.copies import pack_indices
from baton.transfer.grants import PageSet
from baton.transfer.interface import WriteFailed
from baton.transfer.messages import IdBytes, Reason, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import PageWrite, TransferId
    from baton.transfer.reactor import Reactor

MAX_BODY_BYTES: Final = 1 << 20
MAX_GRANT_PAGES: Final = (MAX_BODY_BYTES - 64) // 4
_PACKED: Final = np.dtype("<u4")


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Owner → peer: there is no such region here, or it cannot be reached by another peer."""

    reason: Reason


class GrantOpened(msgspec.Struct, frozen=True, tag="grant_opened"):
    """Owner → peer: it may write these pages, packed u32 `[n]`, until it receives `CloseGrant`."""

    grant: IdBytes
    pages: bytes


class CloseGrant(msgspec.Struct, frozen=True, tag="close_grant"):
    """Owner → peer: it must not begin another write into this grant."""

    grant: IdBytes


class GrantNotOpen(msgspec.Struct, frozen=True, tag="grant_not_open"):
    """Owner → peer: the grant it asked for is not open to it; else `GrantOpened` was sent."""

    grant: IdBytes


class QueryGrant(msgspec.Struct, frozen=True, tag="query_grant"):
    """Peer → owner: it has a write for a grant of which it has not heard."""

    grant: IdBytes


class GrantClosed(msgspec.Struct, frozen=True, tag="grant_closed"):
    """Peer → owner: no write into this grant is under way, nor will one begin."""

    grant: IdBytes


class MemoryReleased(msgspec.Struct, frozen=True, tag="memory_released"):
    """Peer → owner, last: it can no longer write the region by any way that it had."""


FromOwner: TypeAlias = GrantOpened | CloseGrant | GrantNotOpen


def pack_pages(pages: NDArray[np.int64]) -> bytes:
    """Page indices as packed little-endian u32."""
    return pack_indices(pages)


def unpack_pages(packed: bytes) -> NDArray[np.int64]:
    """Page indices, int64 `[n]`.

    Raises:
        ProtocolError: the bytes end in the middle of one.
    """
    if len(packed) % _PACKED.itemsize:
        raise ProtocolError("packed pages end in the middle of a number")
    return np.frombuffer(packed, _PACKED).astype(np.int64)


MAX_GRANTS: Final = 65_536
MAX_OPEN_PAGES: Final = 1 << 24
"""Of all grants of one remote: what a peer can make this side remember."""
RELEASE_TIMEOUT_S: Final = 5.0

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Submitted(Generic[S]):
    """A checked write, and where its bytes are."""

    transfer: TransferId
    write: PageWrite
    source: S


class PeerGrants(Generic[S]):
    """Of one remote. Owner thread: the transport's.

    `begin` is called with each write that lies in an open grant, within `submit` or when the peer
    says that its grant is open.
    """

    def __init__(self, reactor: Reactor, begin: Callable[[Submitted[S]], None]) -> None:
        self._reactor, self._begin = reactor, begin
        self._open: dict[TicketId, PageSet] = {}
        self._num_pages = 0
        self._closing: set[TicketId] = set()
        self._held: dict[TicketId, list[Submitted[S]]] = {}

    def submit(self, submitted: Submitted[S], connection: Connection | None) -> None:
        """Begin a write; or keep it, and ask the peer whether its grant is open."""
        grant = submitted.write.grant
        pages = self._open.get(grant)
        if pages is not None:
            self._begin_within(submitted, pages)
            return
        waiting = self._held.setdefault(grant, [])
        waiting.append(submitted)
        if len(waiting) == 1 and connection is not None:
            connection.send_body(encode(QueryGrant(grant)))

    def handle(self, message: FromOwner) -> TicketId | None:
        """What the peer says; the grant that it wants to be closed, if that is it.

        Raises:
            ProtocolError: it opened too many, or one twice, or closed one that was not open.
        """
        match message:
            case GrantOpened(grant, packed):
                self._opened(TicketId(grant), PageSet(unpack_pages(packed)))
            case GrantNotOpen(grant):
                error = TransferError("the grant is not open")
                for held in self._held.pop(TicketId(grant), []):
                    self._reactor.report(WriteFailed(held.transfer, error))
            case CloseGrant(grant):
                return self._close(TicketId(grant))
            case unknown:
                assert_never(unknown)
        return None

    def is_closing(self, grant: TicketId) -> bool:
        """Whether the peer waits for `GrantClosed` of this grant."""
        return grant in self._closing

    def mark_closed(self, grant: TicketId) -> None:
        """The peer was told; it may open the grant again."""
        self._closing.discard(grant)

    def end(self, error: TransferError) -> None:
        """Forget all of them; what was held fails."""
        self._open.clear()
        self._closing.clear()
        for held in [each for waiting in self._held.values() for each in waiting]:
            self._reactor.report(WriteFailed(held.transfer, error))
        self._held.clear()

    def _opened(self, grant: TicketId, pages: PageSet) -> None:
        self._num_pages += len(pages)
        if len(self._open) >= MAX_GRANTS or self._num_pages > MAX_OPEN_PAGES:
            raise ProtocolError("the peer opened more grants than can be remembered")
        if grant in self._open or grant in self._closing:
            raise ProtocolError("the peer opened a grant twice")
        self._open[grant] = pages
        for held in self._held.pop(grant, []):
            self._begin_within(held, pages)

    def _close(self, grant: TicketId) -> TicketId:
        pages = self._open.pop(grant, None)
        if pages is None:
            raise ProtocolError("the peer closed a grant that it had not opened")
        self._num_pages -= len(pages)
        self._closing.add(grant)
        return grant

    def _begin_within(self, submitted: Submitted[S], grant: PageSet) -> None:
        if all(grant.covers(group.dst_pages) for group in submitted.write.copies.groups):
            self._begin(submitted)
        else:
            error = TransferError("a page is outside the grant")
            self._reactor.report(WriteFailed(submitted.transfer, error))


def send_memory_released(connection: Connection | None, *, is_released: bool) -> None:
    """Tell the owner that this side cannot write its pages any more, if that is true.

    Else the connection is closed, and the owner waits for the end of this process.
    """
    if connection is None or not connection.is_open:
        return
    if not is_released:
        connection.close()
        return
    connection.set_handlers(_ignore_bodies, _ignore_loss)
    connection.fail_after(RELEASE_TIMEOUT_S, "the peer's farewell")
    connection.send_body(encode(MemoryReleased()))


def _ignore_bodies(channel: Channel) -> None:
    channel.receive_bodies()


def _ignore_loss(error: TransferError) -> None:
    del error
