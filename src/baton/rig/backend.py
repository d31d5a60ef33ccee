"""The interface to whatever moves bytes: a transport, an upper limit, or another project's engine.

One process of the pair is the *driver*: it starts every transfer and times it. The other one, the
*owner*, has the other pool and serves what a transfer needs from it.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from baton.errors import ProtocolError
from baton.rig.machine import Machine
from baton.rig.pages import PAGE_BYTES, Direction, Move, PoolPageBytes, Side, Workload
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.clock import Clock
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
    credentials: Credentials
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


MAX_BODY_BYTES: Final = 1 << 20
MAX_SAMPLES: Final = 10_000
MAX_POOL_PAGES: Final = 1 << 18
"""8 GiB of 32 KiB."""

Metadata: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Build(msgspec.Struct, frozen=True, tag="build"):
    """Build this backend and its pool → `Built`."""

    kind: Kind
    name: str
    options: dict[str, object]
    role: Role
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_PAGES)]
    page_bytes: PoolPageBytes = PAGE_BYTES


class Built(msgspec.Struct, frozen=True, tag="built"):
    """The backend is built, on this machine."""

    traits: Traits
    metadata: Metadata
    machine: Machine


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Connect to the other process → `Done`."""

    metadata: Metadata


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """Owner: serve transfers until `StopServing`. No reply."""


class StopServing(msgspec.Struct, frozen=True, tag="stop"):
    """Owner: stop → `Served`."""


class Served(msgspec.Struct, frozen=True, tag="served"):
    """CPU seconds that serving took."""

    cpu_s: float


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Set the bytes to 0 that the workload's first transfer will write → `Done`."""

    workload: Workload


class ComputeDigest(msgspec.Struct, frozen=True, tag="compute_digest"):
    """Digest one side of the workload's first transfer → `Digest`."""

    workload: Workload
    side: Side


class DigestReferenced(msgspec.Struct, frozen=True, tag="digest_referenced"):
    """Owner: digest the pages that were announced last, in place → `Digest`."""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """XXH3-128, hexadecimal."""

    text: str


class TransferOnce(msgspec.Struct, frozen=True, tag="transfer"):
    """Driver: make the workload's first transfer → `Done`."""

    workload: Workload
    direction: Direction


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Driver: repeat for `budget_s`, `min_samples` to `max_samples` times → `Measured`.

    Fewer on a slow link, but one.
    """

    workload: Workload
    direction: Direction
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    min_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
    max_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Wall time of each transfer; CPU seconds of the driver for all of them, warm-up included."""

    samples_s: tuple[float, ...]
    num_moves: int
    cpu_s: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run an operation that only this backend has → `Called`."""

    name: str
    payload: Metadata = b""


class Called(msgspec.Struct, frozen=True, tag="called"):
    """What the operation returned."""

    payload: Metadata


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command succeeded."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process cannot go on; the reason, in one line. See `UnsupportedError`."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]
    is_unsupported: bool = False


DigestCommand: TypeAlias = Clear | ComputeDigest | DigestReferenced
Command: TypeAlias = (
    Build | Connect | Serve | StopServing | TransferOnce | Measure | Call | DigestCommand
)
Reply: TypeAlias = Built | Served | Digest | Measured | Called | Done | Failed
