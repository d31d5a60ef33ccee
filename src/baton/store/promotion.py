"""Which entries of lower tiers are copied into the first one when they are read. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.store.interface import EntryName

MAX_REMEMBERED: Final = 1 << 16
"""Names of entries that were read and not copied yet: about 150 bytes each."""


class PromotionPolicy:
    """An entry is copied at its `at_read`-th read from a lower tier. One owner thread.

    At the first read what is read once pushes out what is used again; at the second it does not,
    and one more read of what is used again takes the way to the lower tier.
    """

    def __init__(self, at_read: int, max_remembered: int = MAX_REMEMBERED) -> None:
        self._at_read, self._max_remembered = at_read, max_remembered
        self._reads: OrderedDict[EntryName, int] = OrderedDict()

    def count_read(self, name: EntryName) -> bool:
        """Whether the entry, which was read from a lower tier now, is to be copied."""
        num_reads = self._reads.pop(name, 0) + 1
        if num_reads >= self._at_read:
            return True
        self._reads[name] = num_reads
        if len(self._reads) > self._max_remembered:
            self._reads.popitem(last=False)
        return False
