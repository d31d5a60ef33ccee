"""Which sizes and shapes are measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.bench.workload import Workload
from baton.transfer.links.shape import TransferShape

if TYPE_CHECKING:
    from baton.bench.plan import Entrant

PAGE_SIZES: Final = (2 << 10, 32 << 10, 128 << 10)
ADJACENT_IN: Final = 32 << 10
"""The pool whose pages adjacent bytes are measured in."""
SIZES: Final = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20)
MAX_SCATTERED_PAGES: Final = 32_768
"""More would take the slowest transport minutes."""
QUICK_SIZES: Final = (4 << 10, 256 << 10, 4 << 20)


@dataclass(frozen=True, slots=True)
class ChoiceEffort:
    """`num_surveys` times two workers meet; each cell is timed for `budget_s` in each round.

    A round goes through all transports of one cell, then the next round begins.
    """

    sizes: tuple[int, ...]
    num_surveys: int
    num_rounds: int
    budget_s: float
    max_samples: int


THOROUGH: Final = ChoiceEffort(SIZES, 3, 4, 0.05, 50)
QUICK: Final = ChoiceEffort(QUICK_SIZES, 1, 2, 0.02, 20)


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What is measured."""

    transports: tuple[Entrant, ...]
    effort: ChoiceEffort

    def workloads_of(self, page_bytes: int) -> tuple[Workload, ...]:
        """Those that are measured in pools of such pages: two scattered pages or more."""
        sizes = self.effort.sizes
        scattered = [s for s in sizes if 2 * page_bytes <= s <= MAX_SCATTERED_PAGES * page_bytes]
        return (
            *(Workload("message", size, page_bytes) for size in sizes if page_bytes == ADJACENT_IN),
            *(Workload("scattered", size, page_bytes) for size in scattered),
        )

    def num_pages_of(self, page_bytes: int) -> int:
        """Pages of such a pool."""
        return max(self.effort.sizes) // page_bytes

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All of them."""
        return tuple(each for size in PAGE_SIZES for each in self.workloads_of(size))


def shape_of(workload: Workload) -> TransferShape:
    """What its cost depends on."""
    return TransferShape(workload.num_bytes, workload.num_descriptors)
