"""The names that were evicted lately, as all users of a folder know them: a table in a file.

A name has one place in it, by its first bytes, and what comes to that place later replaces it: so
it needs no lock and no order, and what a killed process has half done is forgotten, no more. It is
a hint for eviction, never for what an entry is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.store.folder.directory import FILE_MODE

if TYPE_CHECKING:
    from baton.store.interface import EntryName

EVICTED_FILE: Final = "evicted"
_MARK_BYTES: Final = 8
_CAPACITY_PER_NAME: Final = 8 << 10
"""Bytes of the tier for each place: several places for each entry, since they collide (ADR 34)."""
_MIN_NAMES: Final = 1 << 10
_MAX_NAMES: Final = 1 << 20


class EvictedNames:
    """One owner thread; other processes have their own."""

    def __init__(self, folder: int, capacity_bytes: int) -> None:
        """Open the table of a folder.

        Raises:
            OSError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(EVICTED_FILE, flags, FILE_MODE, dir_fd=folder)
        self._num_names = min(_MAX_NAMES, max(_MIN_NAMES, capacity_bytes // _CAPACITY_PER_NAME))

    def add(self, name: EntryName) -> None:
        """It was evicted."""
        with suppress(OSError):  # then it is a new one when it returns
            os.pwrite(self._fd, name[-_MARK_BYTES:], self._offset(name))

    def take(self, name: EntryName) -> bool:
        """Whether it was evicted lately; it is forgotten."""
        try:
            is_there = os.pread(self._fd, _MARK_BYTES, self._offset(name)) == name[-_MARK_BYTES:]
            if is_there:
                os.pwrite(self._fd, bytes(_MARK_BYTES), self._offset(name))
        except OSError:
            return False
        return is_there

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _offset(self, name: EntryName) -> int:
        return int.from_bytes(name[:8], "little") % self._num_names * _MARK_BYTES
