"""The files of a folder's entries: looked at, opened, listed and marked."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError, mapped
from baton.store.folder.bodies import count_body_bytes, open_unnoticed
from baton.store.folder.entry_times import (
    read_entry,
    read_place,
    to_times_after_use_ns,
    to_times_ns,
)
from baton.store.folder.listing import iter_files
from baton.store.interface import NO_TENANT

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from baton.clock import Clock
    from baton.store.capacity import StoredEntry
    from baton.store.folder.bodies import FileBodies
    from baton.store.folder.leases import FileEntryLease, ReadFaults
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import EntryName, TenantLabel

CLOCK_TOLERANCE_S: Final = 1.0
"""An entry that was used later than now by more than this: the clock was set back meanwhile."""


@dataclass(frozen=True, slots=True)
class EntryFiles:
    """One owner thread: its tier's. `fd`: the open folder. Other processes use the same files."""

    fd: int
    bodies: FileBodies
    capacity: SharedCapacity
    clock: Clock

    def stat(self, name: EntryName) -> os.stat_result:
        """The status of an entry's file.

        Raises:
            OSError: it is not there, or cannot be looked at.
        """
        return os.stat(name.hex(), dir_fd=self.fd, follow_symlinks=False)

    def read(
        self, name: EntryName, status: os.stat_result, tenant: TenantLabel = NO_TENANT
    ) -> StoredEntry:
        """What eviction must know of an entry, as its file's status shows it."""
        cost = self.bodies.compute_cost(count_body_bytes(status))
        return read_entry(name, status, cost, tenant)

    def iter_all(self) -> Iterator[StoredEntry]:
        """All entries, in any order.

        Raises:
            OSError: they cannot be listed.
            StoreError: their tenants cannot be read.
        """
        labels = self.capacity.peek_tenants()
        for name, status in iter_files(self.fd):
            yield self.read(name, status, labels.at(read_place(status)))

    def iter_settled(self) -> Generator[StoredEntry]:
        """All entries, none of which was used later than now: else it would never go.

        Where the clock was set back, entries count as used now, and are marked so.

        Raises:
            StoreError: they cannot be listed.
        """
        now = self.clock.unix_now()
        with mapped({OSError: StoreError}):
            for entry in self.iter_all():
                if max(entry.used_at, entry.queued_at) > now + CLOCK_TOLERANCE_S:
                    now = self.clock.unix_now()  # the list may have been begun long ago
                if max(entry.used_at, entry.queued_at) > now + CLOCK_TOLERANCE_S:
                    used_at, queued_at = min(entry.used_at, now), min(entry.queued_at, now)
                    settled = replace(entry, used_at=used_at, queued_at=queued_at)
                    self.mark(settled)
                    yield settled
                else:
                    yield entry

    def mark(self, entry: StoredEntry) -> None:
        """Keep what eviction must know of an entry with it. Two users at once: one use is lost."""
        with suppress(OSError):
            # Not by its label: a list that takes long shows older labels than entries.
            times = to_times_ns(entry, read_place(self.stat(entry.name)))
            os.utime(entry.name.hex(), ns=times, dir_fd=self.fd, follow_symlinks=False)

    def mark_use(self, name: EntryName, status: os.stat_result) -> None:
        """An entry is used now."""
        with suppress(OSError):
            times = to_times_after_use_ns(status, self.clock.unix_now())
            os.utime(name.hex(), ns=times, dir_fd=self.fd, follow_symlinks=False)

    def set_mode(self, name: EntryName, mode: int) -> None:
        """Change an entry's permissions: they show whether it is pinned.

        Raises:
            StoreError: they cannot be changed.
        """
        with mapped({OSError: StoreError}):
            fd = open_unnoticed(name.hex(), self.fd)
            try:
                os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def try_open(self, name: EntryName, faults: ReadFaults) -> FileEntryLease | None:
        """Open an entry; None: it is not there, is locked, or one of the faults was reported."""
        try:
            fd = open_unnoticed(name.hex(), self.fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            faults.on_io_error(exc)
            return None
        try:
            lease = self.bodies.try_lease(fd, name, faults)
        except BlockingIOError:  # locked for a moment, whatever is in it
            os.close(fd)
            return None
        except OSError as exc:
            os.close(fd)
            faults.on_io_error(exc)
            return None
        if lease is None:
            is_there = self._is_file_of(name, fd)
            os.close(fd)
            if is_there:
                faults.on_damage()
        return lease

    def _is_file_of(self, name: EntryName, fd: int) -> bool:
        """Whether an open file is still that entry's: not if it was removed since, or replaced."""
        try:
            return os.path.samestat(self.stat(name), os.fstat(fd))
        except OSError:
            return False
