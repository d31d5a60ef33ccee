"""The seam to a library that moves bytes between two registered memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import MemoryKind, PagedRegion, RegionDescriptor

Direction: TypeAlias = Literal["write", "read"]
M = TypeVar("M")


class OneSidedSession(Protocol[M]):
    """One life of the library, for one peer. Owner thread: the transport's; nothing here blocks.

    `M` is what the library calls a posted transfer. Every method may raise `TransferError`: then
    the engine is of no more use and is to be closed. It starts no thread that spins.

    `peer_process_writes`: the peer's process stores into this side's memory by itself, so that
    closing this engine does not stop it. `needs_serving`: the owner's session has to be served
    while its peer moves bytes, so that the peer sends when it begins and when it ends.
    """

    peer_process_writes: bool
    needs_serving: bool

    def prepare(self, region: PagedRegion) -> int | None:
        """Begin what `get_metadata` needs; the descriptor that is readable when that has started.

        None: it need not be waited for.
        """
        ...

    def get_metadata(self, region: PagedRegion) -> bytes:
        """Let the peer at `region`; what the peer's engine needs (`load_metadata`)."""
        ...

    def load_metadata(self, metadata: bytes, descriptor: RegionDescriptor) -> None:
        """Learn of the peer's region, which is known to have the arrays of `descriptor`.

        `metadata` is untrusted; it may be refused.
        """
        ...

    def post(self, direction: Direction, region: PagedRegion, copies: PageCopies) -> M:
        """Begin to move checked pages between `region`, of this side, and the peer's.

        Copies of a read go from the peer's pages to this side's.
        """
        ...

    def is_done(self, handle: M) -> bool:
        """Whether all of it is in place at its destination; makes progress."""
        ...

    def serve(self) -> None:
        """Do what the peer's transfers need of this side."""
        ...

    def close(self) -> None:
        """Forget the peer; idempotent.

        Nothing that was posted here reads or stores from now on, and nothing of the peer's lands
        here by this process' own hand or by a device's (but see `peer_process_writes`).

        Raises:
            TransferError: that is not certain; only one with `peer_process_writes` may raise
                this. Then the peer is never sent `MemoryReleased`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Library(Generic[M]):
    """How a transport's library is used.

    `open_session` starts one for a peer; it may raise `TransferError`. `reach`: `host` meets its
    peers over a Unix socket, `network` over TCP. `multi_array`: `post` takes copies of several
    arrays.
    """

    open_session: Callable[[], OneSidedSession[M]]
    reach: Literal["host", "network"]
    memory: tuple[MemoryKind, ...] = ("host", "shared")
    multi_array: bool = False
