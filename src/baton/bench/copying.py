"""`memcpy` by one thread from one pool to another: no transport on one host is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.bench.contender import Traits
from baton.bench.pool import allocate_pool, view_bytes
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move


class OneCopy:
    """See `Contender`. Both pools are the driver's: there is no owner."""

    def __init__(self, around: Surroundings) -> None:
        self.traits = Traits("memcpy", ("push",), "memcpy")
        self.region = allocate_pool(("host",), around.num_pages)
        self.target = allocate_pool(("host",), around.num_pages)

    def introduce(self) -> bytes:
        """See `Contender`: there is nobody to meet."""
        return b""

    def meet(self, introduction: bytes) -> None:
        """See `Contender`."""

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`."""
        del direction
        source, target, ranges = view_bytes(self.region), view_bytes(self.target), move.ranges

        def copy() -> None:
            for src, dst, num_bytes in ranges.tolist():
                target[dst : dst + num_bytes] = source[src : src + num_bytes]

        return copy

    def rest(self) -> None:
        """See `Contender`."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`."""

    def close(self) -> None:
        """See `Contender`."""
        release_region(self.region)
        release_region(self.target)
