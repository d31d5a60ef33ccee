"""The seam to whatever can move bytes: a transport, a bound, or another project's engine.

One process of the pair is the *driver*: it starts every transfer and times it. The other, the
*owner*, has the other pool and helps where help is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from baton.bench.workload import PAGE_BYTES, Direction

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.key import ClusterKey
    from baton.bench.workload import Move, Workload
    from baton.clock import Clock
    from baton.transfer.interface import PagedRegion

Role: TypeAlias = Literal["driver", "owner"]
Kind: TypeAlias = Literal["transport", "limit", "peer"]
LimitName: TypeAlias = Literal["memcpy", "tuned socket"]
BytesOf: TypeAlias = Literal["the pools", "its own"]


class Traits(msgspec.Struct, frozen=True):
    """What is known of a contender once it was set up.

    `used` is what carries the bytes. `limit` is the bound that it is held against: one core's
    memcpy where memory is shared or mapped, one tuned socket where a network is between.
    `bytes_of`: what it moves; only the pools' bytes can be compared.
    """

    used: str
    directions: tuple[Direction, ...]
    limit: LimitName
    bytes_of: BytesOf = "the pools"


@dataclass(frozen=True, slots=True)
class Lap:
    """Several moves in one go: how many, and the mean time of one in seconds."""

    num_moves: int
    move_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What one process knows before it builds its contender. `host` is where it may listen."""

    role: Role
    num_pages: int
    host: str
    key: ClusterKey
    clock: Clock
    page_bytes: int = PAGE_BYTES


class Contender(Protocol):
    """Moves bytes from pool to pool. Owner thread: the process's only one.

    The order of calls: both sides `introduce`; the owner `meet`s, then `serve`s while the driver
    `meet`s; from then on the driver transfers only while the owner serves.
    `region` is this side's pool, `target` is where bytes land here: the same, where there are two
    processes.
    """

    traits: Traits
    region: PagedRegion
    target: PagedRegion

    def introduce(self) -> bytes:
        """What the other side must know to meet this one."""
        ...

    def meet(self, introduction: bytes) -> None:
        """Connect. The driver's call returns when transfers can start.

        Raises:
            TransferError: it did not work, or not in time.
        """
        ...

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """Driver: a call that makes this move and returns when all bytes are in place.

        What an engine would do anew for each request (planning, serialising) is inside the call.
        """
        ...

    def rest(self) -> None:
        """Driver: let the owner's `serve` return, if the owner cannot see that it is called."""
        ...

    def serve(self, call: CallWaiting) -> None:
        """Owner: do what transfers need until an order waits."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@runtime_checkable
class Borrower(Protocol):
    """A contender whose directions have `lend`, as its owner."""

    def digest_seen(self) -> str:
        """XXH3-128 of the pages that were lent last, read where they lie."""
        ...


@runtime_checkable
class SelfTimed(Protocol):
    """A contender, as the driver, that starts programs which take the time themselves."""

    def time_moves(self, workload: Workload) -> Lap:
        """Make some moves of the workload's size.

        Raises:
            TransferError: it did not work.
        """
        ...


class CallWaiting(Protocol):
    """Whether the conductor has given another order; `fd` is readable then."""

    fd: int

    def __call__(self) -> bool:
        """Look, without waiting."""
        ...
