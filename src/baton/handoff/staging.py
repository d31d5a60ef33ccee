"""Staging pages: given to handoffs in the order of asking, as many as each needs at once. Pure.

A face without staging has none to give: an order's blocks are its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from baton.errors import HandoffError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.handoff.faces import Face
    from baton.ids import TicketId

STAGING_STAGE = "staging"


@dataclass(frozen=True, slots=True)
class Holder:
    """A handoff that holds staging pages, or waits for some."""

    side: Literal["receive", "send"]
    ticket: TicketId


class StagingPages:
    """Who holds which pages of one staging memory, and who waits. Owner: the agent's thread.

    Strictly first come, first served: a large handoff is not overtaken by small ones for ever.
    """

    def __init__(self, num_pages: int) -> None:
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._held: dict[Holder, NDArray[np.int64]] = {}
        self._waiting: OrderedDict[Holder, int] = OrderedDict()
        self._served: list[Holder] = []

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return int(self._is_free.sum())

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait their turn."""
        return len(self._waiting)

    def ask(self, holder: Holder, num_pages: int) -> NDArray[np.int64] | None:
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
        if holder not in self._held and holder not in self._waiting:
            self._waiting[holder] = num_pages
            self._serve()
            if holder in self._held:
                self._served.remove(holder)
        return self._held.get(holder)

    def give_back(self, holder: Holder) -> None:
        """A handoff is over: nothing can land in its pages, and nobody reads them. Idempotent."""
        self._waiting.pop(holder, None)
        pages = self._held.pop(holder, None)
        if pages is not None:
            self._is_free[pages] = True
        if holder in self._served:
            self._served.remove(holder)
        self._serve()

    def take_served(self) -> list[Holder]:
        """Who waited and holds pages since the last call."""
        served, self._served = self._served, []
        return served

    def check_invariants(self) -> None:
        """Raise AssertionError where a page has two holders, or is lost, or waits in vain."""
        held = np.concatenate([np.empty(0, dtype=np.int64), *self._held.values()])
        if len(np.unique(held)) != len(held) or self._is_free[held].any():
            raise AssertionError("a staging page is held twice, or held and free")
        if len(held) + self.num_free != len(self._is_free):
            raise AssertionError("a staging page was lost")
        if self._held.keys() & self._waiting.keys():
            raise AssertionError("a handoff holds pages and waits for some")
        if self._waiting and next(iter(self._waiting.values())) <= self.num_free:
            raise AssertionError("the first in line waits though there is room")

    def _serve(self) -> None:
        while self._waiting:
            holder, num_pages = next(iter(self._waiting.items()))
            if num_pages > self.num_free:
                return
            del self._waiting[holder]
            # The lowest free ones: adjacent pages are copied in one go.
            pages = np.flatnonzero(self._is_free)[:num_pages].astype(np.int64)
            self._is_free[pages] = False
            self._held[holder] = pages
            self._served.append(holder)


def make_staging_pages(face: Face) -> StagingPages | None:
    """All pages of the face's region, if it is staging memory."""
    if face.staging is None:
        return None
    return StagingPages(min(array.num_pages for array in face.region.arrays))
