"""A simulated worker's blocks of KV: those of running requests, and cached prefixes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True, eq=False)
class Reservation:
    """A request's blocks: `names` are known by what is in them, the first `num_cached` were found.

    `num_unnamed` more are its own. `evicted` had to leave the cache for it.
    """

    names: list[int]
    num_cached: int
    num_unnamed: int
    evicted: list[int]


class SimulatedCache:
    """`num_blocks` blocks. What no request holds stays until room is needed, oldest first.

    As in an engine's block pool: a request holds its whole need from its beginning, and of a
    released prompt its last blocks leave first. Owner: one simulation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_unnamed = 0
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def count_cached(self, names: Sequence[int]) -> int:
        """How many of these are here, from the first on."""
        for num, name in enumerate(names):
            if name not in self._held and name not in self._idle:
                return num
        return len(names)

    def reserve(
        self, names: Sequence[int], num_findable: int, num_needed: int
    ) -> Reservation | None:
        """Hold `num_needed` blocks, of which the first `num_findable` may be found by `names`.

        None if so many are not free now.
        """
        found = [*names[: self.count_cached(names[:num_findable])]]
        num_idle = sum(name in self._idle for name in found)
        num_new = num_needed - len(found)
        num_left = self._num_blocks - len(self._held) - self._num_unnamed
        if num_new + num_idle > num_left:
            return None
        for name in found:
            self._hold(name)
        self._num_unnamed += num_new
        num_over = len(self._idle) - (num_left - num_new - num_idle)
        evicted = [self._idle.popitem(last=False)[0] for _ in range(num_over)]
        return Reservation(found, len(found), num_new, evicted)

    def name(self, held: Reservation, names: Sequence[int]) -> int:
        """What its next blocks hold is known: others find them. How many were not there yet."""
        num_new = 0
        for name in names:
            num_new += not self._hold(name)
        held.names += names
        held.num_unnamed -= len(names)
        self._num_unnamed -= len(names)
        return num_new

    def release(self, held: Reservation) -> None:
        """Its request is over."""
        self._num_unnamed -= held.num_unnamed
        for name in reversed(held.names):
            left = self._held[name] - 1
            if left:
                self._held[name] = left
            else:
                del self._held[name]
                self._idle[name] = None
        held.names, held.num_unnamed = [], 0

    def check_invariants(self) -> None:
        """Raise AssertionError where more is held than there is, or a block is in two places."""
        num = len(self._held) + len(self._idle) + self._num_unnamed
        if num > self._num_blocks or self._num_unnamed < 0:
            raise AssertionError(f"{num} of {self._num_blocks} blocks are in use")
        if self._held.keys() & self._idle.keys():
            raise AssertionError("a block is held and idle")

    def _hold(self, name: int) -> bool:
        """Whether it was there."""
        num = self._held.get(name)
        if num is not None:
            self._held[name] = num + 1
            return True
        self._held[name] = 1
        if name in self._idle:
            del self._idle[name]
            return True
        return False
