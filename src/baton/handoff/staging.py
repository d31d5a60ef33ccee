"""Staging pages: given to handoffs in the order of asking, as many as each needs at once. Pure.

A view without staging has none to give: an order's blocks are its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from baton.errors import HandoffError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.handoff.kv_views import KVView
    from baton.ids import TicketId

STAGING_STAGE = "staging"

Side: TypeAlias = Literal["receive", "send"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A handoff that holds staging pages, or waits for some."""

    side: Side
    ticket: TicketId


class StagingPool:
    """Who holds which pages of one staging memory, and who waits. Owner: the agent's thread.

    First come, first served, in each direction: a large handoff is not overtaken by small ones for
    ever. Once a worker has both sent and received, each direction has a half of the pages that the
    other cannot take: else two such workers could each fill theirs with what they receive, and wait
    for what the other cannot send. A handoff larger than a half is served while no other holds
    a page.
    """

    def __init__(self, num_pages: int) -> None:
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._held: dict[Holder, NDArray[np.int64]] = {}
        self._waiting: dict[Side, OrderedDict[Holder, int]] = {}
        self._served: list[Holder] = []

    @property
    def num_free(self) -> int:
        """Pages that no handoff holds."""
        return int(self._is_free.sum())

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait their turn."""
        return sum(map(len, self._waiting.values()))

    def try_reserve(self, holder: Holder, num_pages: int) -> NDArray[np.int64] | None:
        """The pages of a handoff, int64 `[num_pages]`; None while it waits (`take_served`).

        Asking again gives the same answer, not more pages.

        Raises:
            HandoffError: there will never be that many.
        """
        if num_pages > len(self._is_free):
            raise HandoffError(
                f"the handoff needs {num_pages} staging pages where there are {len(self._is_free)}",
                stage=STAGING_STAGE,
            )
        waiting = self._waiting.setdefault(holder.side, OrderedDict())
        if holder not in self._held and holder not in waiting:
            waiting[holder] = num_pages
            self._serve()
            if holder in self._held:
                self._served.remove(holder)
        return self._held.get(holder)

    def release(self, holder: Holder) -> None:
        """A handoff is over: nothing can land in its pages, and none reads them. Idempotent."""
        self._waiting.get(holder.side, OrderedDict()).pop(holder, None)
        pages = self._held.pop(holder, None)
        if pages is not None:
            self._is_free[pages] = True
        if holder in self._served:
            self._served.remove(holder)
        self._serve()

    def take_granted(self) -> list[Holder]:
        """Who waited and holds pages since the last call."""
        served, self._served = self._served, []
        return served

    def check_invariants(self) -> None:
        """Raise AssertionError where a page has two holders or is lost, or a wait is needless."""
        held = np.concatenate([np.empty(0, dtype=np.int64), *self._held.values()])
        if len(np.unique(held)) != len(held) or self._is_free[held].any():
            raise AssertionError("a staging page is held twice, or held and free")
        if len(held) + self.num_free != len(self._is_free):
            raise AssertionError("a staging page was lost")
        for side, waiting in self._waiting.items():
            if self._held.keys() & waiting.keys():
                raise AssertionError("a handoff holds pages and waits for some")
            if waiting and next(iter(waiting.values())) <= self._num_for(side):
                raise AssertionError("the first in line waits though there is room")

    def _num_for(self, side: Side) -> int:
        """The most pages that the next of one direction can have now."""
        if len(self._waiting) < 2 or not self._held:  # noqa: PLR2004 -- there are two directions
            return self.num_free
        share = len(self._is_free) // 2
        num_held = sum(len(pages) for holder, pages in self._held.items() if holder.side == side)
        return min(self.num_free, share - num_held)

    def _serve(self) -> None:
        """Serve the first of each direction, and the next, while there is room for it."""
        is_served = True
        while is_served:
            served = [side for side in self._waiting if self._serve_first(side)]
            is_served = bool(served)

    def _serve_first(self, side: Side) -> bool:
        waiting = self._waiting[side]
        if not waiting:
            return False
        holder, num_pages = next(iter(waiting.items()))
        if num_pages > self._num_for(side):
            return False
        del waiting[holder]
        # The lowest free ones: adjacent pages are copied in one go.
        pages = np.flatnonzero(self._is_free)[:num_pages].astype(np.int64)
        self._is_free[pages] = False
        self._held[holder] = pages
        self._served.append(holder)
        return True


def make_staging_pool(view: KVView) -> StagingPool | None:
    """All pages of the view's region, if it is staging memory."""
    if view.staging is None:
        return None
    return StagingPool(min(array.num_pages for array in view.region.arrays))
