"""Entries that a server does not give while it gives others: archived, another key's, too large.

Each is a miss for `READ_AGAIN_S`, and then it is read again: one of them must not cost all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.clock import Clock, Instant
    from baton.store.interface import EntryName

READ_AGAIN_S: Final = 60.0
MAX_NAMES: Final = 1024
"""Beyond that the oldest are read again."""
SERVER_REFUSES: Final = 3
"""Different entries, and none that was given between: the server refuses all of them."""


class RefusedReads:
    """Those of one server. One owner thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused_at: dict[EntryName, Instant] = {}
        self._in_a_row: set[EntryName] = set()
        self.counts_rows = True

    def add(self, name: EntryName) -> bool:
        """An entry was refused; whether it is the server that refuses, as far as can be seen."""
        self.leave_alone(name)
        if not self.counts_rows:
            return False
        self._in_a_row.add(name)
        if len(self._in_a_row) < SERVER_REFUSES:
            return False
        self._in_a_row.clear()
        return True

    def leave_alone(self, name: EntryName) -> None:
        """An entry is not to be read for a while, though the server gives it: it is too large."""
        self._refused_at.pop(name, None)
        self._refused_at[name] = self._clock.now()
        if len(self._refused_at) > MAX_NAMES:
            del self._refused_at[next(iter(self._refused_at))]

    def end_row(self) -> None:
        """An entry was given, or it is known to be missing."""
        self._in_a_row.clear()

    def __len__(self) -> int:
        return len(self._refused_at)

    def __contains__(self, name: EntryName) -> bool:
        """Whether the entry is not to be read now."""
        refused_at = self._refused_at.get(name)
        return refused_at is not None and self._clock.now() < refused_at + READ_AGAIN_S
