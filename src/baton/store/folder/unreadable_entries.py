"""Entries that the disk refused to read (EIO), as one process has seen it.

Such an entry may be whole: the next attempt may succeed. But an attempt can take a disk seconds.
So the entry is a miss for `READ_AGAIN_S`, and then it is read again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from baton.clock import Clock, Instant
    from baton.store.interface import EntryName

logger = logging.getLogger(__name__)

READ_AGAIN_S: Final = 60.0
MAX_NAMES: Final = 1024
"""Beyond that the oldest are read again."""


class UnreadableEntries:
    """Those of the folder `path`. One owner thread. `num_errors`: attempts that failed."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.num_errors = 0
        self._path, self._clock = path, clock
        self._failed_at: dict[EntryName, Instant] = {}

    def add(self, name: EntryName, error: OSError) -> None:
        """An attempt has failed."""
        self.num_errors += 1
        self._failed_at.pop(name, None)
        self._failed_at[name] = self._clock.now()
        if len(self._failed_at) > MAX_NAMES:
            del self._failed_at[next(iter(self._failed_at))]
        if self.num_errors == 1:
            logger.warning(
                "store: entry %s in %s cannot be read (%s): it stays, and is a miss for %.0f s. "
                "Does the kernel's log report errors of this disk? (logged once)",
                name.hex(),
                self._path,
                error.strerror,
                READ_AGAIN_S,
            )

    def __contains__(self, name: EntryName) -> bool:
        """Whether the entry is not to be read now."""
        failed_at = self._failed_at.get(name)
        return failed_at is not None and self._clock.now() < failed_at + READ_AGAIN_S

    def remove(self, name: EntryName) -> None:
        """The entry was replaced."""
        self._failed_at.pop(name, None)
