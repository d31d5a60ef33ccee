"""Names that this process has found in a folder, so that it need not look for them again.

Whoever removes an entry writes its name into a ring in a file, under the lock of the folder's
counts. A process reads what was added since it last looked, and forgets those names: one read for
any number of lookups. A removal that is missed (its process was killed between the two, or somebody
else has removed files) is found by the lease that fails, or after `BELIEVED_S`.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from itertools import filterfalse
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.store.folder.directory import FILE_MODE
from baton.store.interface import NAME_BYTES, EntryName

if TYPE_CHECKING:
    from collections.abc import Sequence

REMOVED_FILE: Final = "removed"
RING_NAMES: Final = 4096
BELIEVED_S: Final = 30.0
MAX_KNOWN: Final = 1 << 18
"""About 120 bytes each. Beyond that all are forgotten: who looks for so many finds most on disk."""
_COUNT: Final = struct.Struct("<Q")
_MAX_COUNT: Final = (1 << 64) - 1
"""A disk may have lost the count: whatever is read is counted on from."""


class KnownNames:
    """One owner thread; other processes have their own. What cannot be read is not known."""

    def __init__(self, folder: int) -> None:
        """Open the ring of a folder.

        Raises:
            OSError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(REMOVED_FILE, flags, FILE_MODE, dir_fd=folder)
        self._names: set[EntryName] = set()
        self._num_seen = -1
        self._forgets_at = Instant(0.0)

    def count_leading(self, names: Sequence[EntryName], now: Instant) -> int:
        """How many leading names are known to be there."""
        try:
            self._forget_removed()
        except OSError:
            self._names.clear()
        if now >= self._forgets_at or len(self._names) > MAX_KNOWN:
            self._names.clear()
            self._forgets_at = Instant(now + BELIEVED_S)
        unknown = next(filterfalse(self._names.__contains__, names), None)
        return len(names) if unknown is None else names.index(unknown)

    def add(self, names: Sequence[EntryName]) -> None:
        """They were there, at a look after the last `count_leading`."""
        self._names.update(names)

    def forget(self, name: EntryName) -> None:
        """It is not there."""
        self._names.discard(name)

    def report_removed(self, name: EntryName) -> None:
        """Have every process forget a name. Under the lock of the folder's counts."""
        self._names.discard(name)
        with suppress(OSError):
            num_removed = self._read_count()
            os.pwrite(self._fd, name, _offset(num_removed))
            os.pwrite(self._fd, _COUNT.pack((num_removed + 1) & _MAX_COUNT), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _forget_removed(self) -> None:
        num_removed = self._read_count()
        num_new = num_removed - self._num_seen
        if num_new == 0:
            return
        if 0 < num_new < RING_NAMES and self._num_seen >= 0:
            names = [self._read_name(at) for at in range(self._num_seen, num_removed)]
            self._names.difference_update(names)
            num_new = self._read_count() - self._num_seen  # some were overwritten meanwhile?
        if not 0 < num_new < RING_NAMES:  # the oldest place is about to be another name's
            self._names.clear()
        self._num_seen = num_removed

    def _read_count(self) -> int:
        raw = os.pread(self._fd, _COUNT.size, 0)
        return int.from_bytes(raw, "little")

    def _read_name(self, at: int) -> EntryName:
        return EntryName(os.pread(self._fd, NAME_BYTES, _offset(at)))


def _offset(at: int) -> int:
    return _COUNT.size + at % RING_NAMES * NAME_BYTES
