"""The entries of a folder: found, opened, removed and counted."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError
from baton.store.folder.bodies import count_body_bytes
from baton.store.folder.directory import remove_unfinished
from baton.store.folder.entry_times import read_place
from baton.store.folder.known_names import KnownNames
from baton.store.folder.leases import ReadFaults
from baton.store.folder.listing import iter_files
from baton.store.folder.shared_capacity import NOTHING_REMOVED, Removed
from baton.store.folder.unreadable_entries import UnreadableEntries
from baton.store.victims import is_unused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.clock import Clock
    from baton.store.capacity import StoredEntry
    from baton.store.folder.directory import Folder
    from baton.store.folder.entry_files import EntryFiles
    from baton.store.folder.leases import FileEntryLease
    from baton.store.interface import EntryName

logger = logging.getLogger(__name__)

EXPIRY_PARTS: Final = 20
_OF_PROCESS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""No fault of the disk: the entry is read as soon as there are descriptors, or memory."""


class FolderEntries:
    """One owner thread: its tier's. Other processes find, use and remove the same entries.

    `num_damaged`: entries that were removed because they were not what was put. `num_expired`:
    those that were too old. `num_read_errors`: attempts to read one that the system refused.
    """

    def __init__(
        self, folder: Folder, files: EntryFiles, clock: Clock, ttl_s: float | None
    ) -> None:
        """Take up work in an open folder; remove what writers left that are dead.

        `files` are those of the folder's entries. What was not used for `ttl_s` is not found any
        more; None: however old it is.

        Raises:
            OSError: the folder cannot be used.
            StoreError: its entries cannot be counted.
        """
        self._path, self._fd = folder.path, folder.fd
        self._bodies, self._capacity = files.bodies, files.capacity
        self.files, self._clock, self._ttl_s = files, clock, ttl_s
        self._unreadable = UnreadableEntries(folder.path, clock)
        self._expires_again_at = 0.0
        self.num_damaged = self.num_expired = 0
        remove_unfinished(folder.fd)
        if folder.was_unused:
            self.recount()
        self._known = KnownNames(folder.fd)

    @property
    def num_read_errors(self) -> int:
        """See the class."""
        return self._unreadable.num_errors

    def count_leading(self, names: Sequence[EntryName]) -> int:
        """How many leading names are there."""
        if self._ttl_s is not None:  # an entry's age has to be looked at
            return next((at for at, n in enumerate(names) if self.find(n) is None), len(names))
        num_known = self._known.count_leading(names, self._clock.now())
        unknown = range(num_known, len(names))
        num_found = next((at for at in unknown if not self._is_there(names[at])), len(names))
        self._known.add(names[num_known:num_found])
        return num_found

    def find(self, name: EntryName) -> os.stat_result | None:
        """The status of an entry that is there, and is not too old."""
        if name in self._unreadable:
            return None
        try:
            status = self.files.stat(name)
        except OSError:
            return None
        if self._ttl_s is not None:
            entry = self.files.read(name, status)
            if self._is_expired(entry):
                self._expire(entry)
                return None
        return status

    def forget(self, name: EntryName) -> None:
        """Look for an entry at the next `count_leading`: it may be gone."""
        self._known.forget(name)

    def discard_unreadable(self, name: EntryName) -> None:
        """Remove an entry that the disk did not read lately: it is about to be put again."""
        if name in self._unreadable:
            self._unreadable.remove(name)
            self.remove(name)

    def try_open(self, name: EntryName) -> FileEntryLease | None:
        """Open an entry; None: it is not there, damaged (removed then), or cannot be read."""
        return self.files.try_open(
            name, ReadFaults(partial(self._remove_damaged, name), partial(self._leave_alone, name))
        )

    def is_whole(self, name: EntryName) -> bool:
        """See `Tier.is_whole`."""
        lease = self.files.try_open(name, ReadFaults(_do_nothing, _raise_unreadable))
        if lease is None:
            self.forget(name)  # its removal may not be reported yet: `find` looks again
            return False
        with lease:
            return lease.try_read(memoryview(bytearray(lease.num_bytes)))

    def remove(self, name: EntryName) -> None:
        """Remove an entry, if it is there."""
        with suppress(StoreError):
            self._capacity.remove(partial(self._unlink, name))

    def remove_victim(self, victim: StoredEntry) -> int:
        """The same, unless it was used or pinned since it was chosen; the bytes that it took up.

        Raises:
            StoreError: the removal cannot be counted. The entry stays.
        """
        return self._capacity.remove(partial(self._unlink_victim, victim))

    def expire_old(self) -> None:
        """Remove what is too old, a twentieth of `ttl_s` after it is at the latest.

        To list a large tier each second would take a good part of a core.

        Raises:
            StoreError: entries cannot be listed.
        """
        now = self._clock.unix_now()
        if self._ttl_s is None or now < self._expires_again_at <= now + self._ttl_s:
            return
        self._expires_again_at = now + self._ttl_s / EXPIRY_PARTS
        for entry in self.files.iter_settled():
            if self._is_expired(entry):
                self._expire(entry)

    def recount(self) -> None:
        """Count all entries, and set right what killed users, or others, have left wrong.

        Raises:
            StoreError: they cannot be listed, or another process holds the lock.
        """
        self._capacity.recount(self._count)

    def close(self) -> None:
        """Close the files."""
        self._known.close()

    def _is_there(self, name: EntryName) -> bool:
        return os.access(name.hex(), os.F_OK, dir_fd=self._fd) and name not in self._unreadable

    def _is_expired(self, entry: StoredEntry) -> bool:
        if self._ttl_s is None or entry.is_pinned:
            return False
        return self._clock.unix_now() - entry.used_at > self._ttl_s

    def _expire(self, entry: StoredEntry) -> None:
        self.num_expired += 1
        self.remove(entry.name)

    def _remove_damaged(self, name: EntryName) -> None:
        self.num_damaged += 1
        logger.warning("store: entry %s in %s is damaged: removed", name.hex(), self._path)
        self.remove(name)

    def _leave_alone(self, name: EntryName, error: OSError) -> None:
        self.forget(name)
        if error.errno not in _OF_PROCESS:
            self._unreadable.add(name, error)

    def _unlink(self, name: EntryName) -> Removed:
        try:
            return self._unlink_found(name, self.files.stat(name))
        except OSError:
            return NOTHING_REMOVED

    def _unlink_victim(self, victim: StoredEntry) -> Removed:
        try:
            status = self.files.stat(victim.name)
            if is_unused(victim, self.files.read(victim.name, status)):
                return self._unlink_found(victim.name, status)
        except OSError:
            pass
        return NOTHING_REMOVED

    def _unlink_found(self, name: EntryName, status: os.stat_result) -> Removed:
        num_bytes = count_body_bytes(status)
        cost = self._bodies.compute_cost(num_bytes)
        is_spare = self._bodies.unlink(name, num_bytes)
        self._known.report_removed(name)
        return Removed(cost, read_place(status), cost if is_spare else 0)

    def _count(self) -> Mapping[int, int]:
        """Bytes that entries take up, by the places of their tenants."""
        remove_unfinished(self._fd)
        self._bodies.recount((n, count_body_bytes(status)) for n, status in iter_files(self._fd))
        held_bytes: Counter[int] = Counter()
        for _, status in iter_files(self._fd):
            cost = self._bodies.compute_cost(count_body_bytes(status))
            held_bytes[read_place(status)] += cost
        return held_bytes


def _do_nothing() -> None:
    """What is damaged stays."""


def _raise_unreadable(error: OSError) -> None:
    raise StoreError(f"an entry cannot be read: {error.strerror}") from error
