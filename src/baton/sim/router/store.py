"""A simulated store: blocks by name that the workers of one host share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.ids import WorkerId


class SimulatedStore:
    """`num_blocks` blocks; those that were unused for longest leave first. Owner: one simulation.

    Of each block it remembers which workers have reported it: each reports that it is gone.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._reporters: OrderedDict[int, set[WorkerId]] = OrderedDict()

    def count_stored(self, names: Sequence[int]) -> int:
        """How many of these are here, from the first on."""
        for num, name in enumerate(names):
            if name not in self._reporters:
                return num
        return len(names)

    def use(self, names: Sequence[int]) -> None:
        """They are loaded: they leave later. Of a sequence its last blocks leave first."""
        for name in reversed(names):
            self._reporters.move_to_end(name)

    def keep(self, names: Sequence[int], worker: WorkerId) -> tuple[int, dict[WorkerId, list[int]]]:
        """A worker leaves a sequence's blocks here.

        Returns how many of the first ones it has reported already, and the names that had to leave,
        by the workers that have reported them.
        """
        num_reported = 0
        for at, name in enumerate(names):
            reporters = self._reporters.setdefault(name, set())
            num_reported += at == num_reported and worker in reporters
            reporters.add(worker)
        self.use(names)
        evicted: dict[WorkerId, list[int]] = {}
        while len(self._reporters) > self._num_blocks:
            name, reporters = self._reporters.popitem(last=False)
            for each in reporters:
                evicted.setdefault(each, []).append(name)
        return num_reported, evicted

    def check_invariants(self) -> None:
        """Raise AssertionError where more is here than fits, or what no worker has put."""
        if len(self._reporters) > self._num_blocks:
            raise AssertionError(f"{len(self._reporters)} of {self._num_blocks} blocks are stored")
        if not all(self._reporters.values()):
            raise AssertionError("a block is stored that no worker has put there")
