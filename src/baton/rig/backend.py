"""The interface to whatever moves bytes: a transport, an upper limit, or another project's engine.

One process of the pair is the *driver*: it starts every transfer and times it. The other one, the
*owner*, has the other pool and serves what a transfer needs from it.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from baton.errors import ProtocolError
from baton.rig.pages import PAGE_BYTES, Direction
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.clock import Clock
    from baton.rig.messages import Build
    from baton.rig.pages import Move, Workload
    from baton.transfer.interface import PagedRegion

Role: TypeAlias = Literal["driver", "owner"]
Kind: TypeAlias = Literal["transport", "limit", "peer"]
LimitName: TypeAlias = Literal["memcpy", "tuned socket"]
BytesOf: TypeAlias = Literal["the pools", "its own"]
Processes: TypeAlias = Literal["one", "two", "two on one host", "two contained"]
"""`contained`: in a network namespace of their own, where "all interfaces" is loopback."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Which backend, how it is built, and which processes it needs."""

    kind: Kind
    name: str
    options: Mapping[str, object] = field(hash=False)
    processes: Processes = "two"


class Traits(msgspec.Struct, frozen=True):
    """What is known of a backend once it is connected.

    `used` is what carries the bytes. `limit` is the upper bound that it is compared with: memcpy by
    one core where memory is shared or mapped, one tuned socket where a network is in between.
    `bytes_of`: only the pools' own bytes can be verified.
    """

    used: str
    directions: tuple[Direction, ...]
    limit: LimitName
    bytes_of: BytesOf = "the pools"


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """Several transfers that were timed together: how many, and the mean time of one (seconds)."""

    num_moves: int
    move_s: float


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What one process knows before it builds its backend. `host` is where it may listen."""

    role: Role
    num_pages: int
    host: str
    key: ClusterKey
    clock: Clock
    page_bytes: int = PAGE_BYTES


BuildBackend: TypeAlias = Callable[["Build", BackendContext], "Backend"]


class StopRequested(Protocol):
    """Whether the runner has sent the next command; `fd` is readable then."""

    fd: int

    def __call__(self) -> bool:
        """Poll, without waiting."""
        ...


class Backend:
    """Moves bytes from pool to pool. Owner thread: the process's main thread.

    Call order: both sides `local_metadata`; the owner `connect`s, then `serve`s while the driver
    `connect`s; from then on the driver transfers only while the owner serves.
    `region` is this side's pool, `target` is where bytes arrive on this side: the same one where
    there are two processes.
    """

    traits: Traits
    region: PagedRegion
    target: PagedRegion

    def local_metadata(self) -> bytes:
        """What the other side needs in order to connect."""
        return b""

    def connect(self, metadata: bytes) -> None:
        """Connect to the side that has this metadata. The driver can transfer afterwards.

        Raises:
            TransferError: it failed, or timed out.
        """

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """Driver: a function that makes this transfer and returns when all bytes are in place.

        What an engine does for each request (planning, serialising) is inside that function.
        """
        raise NotImplementedError

    def stop_serving(self) -> None:
        """Driver: let the owner's `serve` return, where the owner cannot see commands itself."""

    def serve(self, stop: StopRequested) -> None:
        """Owner: do what transfers need until the next command arrives."""
        while not stop():
            select.select([stop.fd], [], [])

    def call(self, name: str, payload: bytes) -> bytes:
        """Run an operation that only this backend has.

        Raises:
            ProtocolError: it has no such operation.
        """
        del payload
        raise ProtocolError(f"this backend has no operation {name!r}")

    def close(self) -> None:
        """Release everything."""
        release_region(self.region)
        if self.target is not self.region:
            release_region(self.target)


@runtime_checkable
class ReferenceReader(Protocol):
    """A backend that supports direction `reference`, as the owner."""

    def digest_referenced_pages(self) -> str:
        """XXH3-128 of the pages that were announced last, read in place."""
        ...


@runtime_checkable
class SelfTimed(Protocol):
    """A backend, as the driver, whose external program measures the time itself."""

    def time_moves(self, workload: Workload) -> TimedBatch:
        """Make some transfers of the workload's size.

        Raises:
            TransferError: it failed.
        """
        ...
