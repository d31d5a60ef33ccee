"""Victims that a policy chose in advance, so that one list of all entries serves many evictions.

    all entries ──look_on, a few at once──► listed ──choose──► waiting ──pop──► the next victim

A list of all entries costs a system call for each. Of the victims that wait, those that were used
meanwhile are passed over (`is_unused`), and what came meanwhile is newer than all of them: so `lru`
evicts in the same order as if it looked at all entries each time. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from baton.store.capacity import StoredEntry
    from baton.store.eviction import EvictionPolicy

MIN_CHOSEN: Final = 256
"""Fewer are chosen from a list that is made at once: it takes some milliseconds."""
FULL_LISTS: Final = 16
"""One list in so many is made at once, so that its sum can be compared with what is counted."""
CLOCK_STEP_S: Final = 1e-6
"""Times of use differ by less than this where an entry was not used: they are kept in floats."""


class WaitingVictims:
    """One owner thread."""

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int) -> None:
        self._policy = policy
        self._lookahead_bytes = int(policy.lookahead_share * capacity_bytes)
        # Twice what makes a list of all by the time at which the other half of the victims is gone.
        self._listed_per_victim = math.ceil(4 / policy.lookahead_share)
        self._waiting: deque[StoredEntry] = deque()
        self._num_chosen = self._num_lists = 0
        self._listed: list[StoredEntry] = []
        self._listing: Generator[StoredEntry] | None = None

    @property
    def is_short(self) -> bool:
        """Whether more than half of those that were chosen are gone: time for `look_on`."""
        is_large = self._num_chosen >= MIN_CHOSEN
        is_full_next = self._num_lists % FULL_LISTS == 0
        return is_large and not is_full_next and 2 * len(self._waiting) < self._num_chosen

    def pop(self) -> StoredEntry | None:
        """The next one, which is a victim if it `is_unused`; None: there is none left."""
        return self._waiting.popleft() if self._waiting else None

    def choose(
        self, entries: Sequence[StoredEntry], num_bytes: int, now: float
    ) -> Sequence[StoredEntry]:
        """Choose anew from all entries, `num_bytes` at least; those that are requeued for it."""
        self.stop_looking()
        num_bytes = max(num_bytes, self._lookahead_bytes)
        eviction = self._policy.choose(entries, num_bytes, now)
        self._waiting = deque(eviction.victims)
        self._num_chosen = len(self._waiting)
        self._num_lists += 1
        return eviction.requeued

    def look_on(
        self, list_all: Callable[[], Generator[StoredEntry]], num_gone: int
    ) -> list[StoredEntry] | None:
        """List some more entries, as `num_gone` victims are gone; all of them, once that is done.

        The list is not of one moment. What `list_all` raises ends it.
        """
        if self._listing is None:
            self._listing = list_all()
        before, num_entries = len(self._listed), self._listed_per_victim * num_gone
        try:
            self._listed += islice(self._listing, num_entries)
        except BaseException:
            self.stop_looking()
            raise
        return self._listed if len(self._listed) < before + num_entries else None

    def stop_looking(self) -> None:
        """Forget a list that is not complete."""
        if self._listing is not None:
            self._listing.close()
        self._listing, self._listed = None, []


def is_unused(chosen: StoredEntry, found: StoredEntry) -> bool:
    """Whether a victim, as it is now, was neither used nor pinned since it was chosen."""
    return not found.is_pinned and found.used_at < chosen.used_at + CLOCK_STEP_S
