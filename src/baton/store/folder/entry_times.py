"""What eviction must know of an entry, kept in its file's times: set at once, read by one stat.

    modification time   used last; its last three bits, in ns: 4 if it is protected, and its uses
    access time         since when it has been in its queue; its last twelve bits, in ns: the place
                        where its tenant is counted (`tenant_counts`)

No read changes them: entries are opened with O_NOATIME. A file without permission to write is
pinned. Where a filesystem keeps no nanoseconds, uses are lost and S3-FIFO is a FIFO, and no
entry is any tenant's.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from baton.store.capacity import MAX_USES, StoredEntry, count_use

if TYPE_CHECKING:
    import os

    from baton.store.interface import EntryName, TenantLabel

PINNED_MODE: Final = 0o400
_PROTECTED: Final = MAX_USES + 1
_STATE_BITS: Final = _PROTECTED | MAX_USES
_NS: Final = 1_000_000_000
NUM_PLACES: Final = 4096
"""For tenants; a power of two."""


def read_entry(
    name: EntryName, status: os.stat_result, num_bytes: int, tenant: TenantLabel
) -> StoredEntry:
    """An entry that takes up so many bytes, as its file's status shows it."""
    state = status.st_mtime_ns & _STATE_BITS
    return StoredEntry(
        name,
        num_bytes,
        used_at=status.st_mtime_ns / _NS,
        queued_at=status.st_atime_ns / _NS,
        num_uses=state & MAX_USES,
        is_protected=bool(state & _PROTECTED),
        is_pinned=not status.st_mode & stat.S_IWUSR,
        tenant=tenant,
    )


def read_place(status: os.stat_result) -> int:
    """The place where the tenant of an entry is counted."""
    return status.st_atime_ns % NUM_PLACES


def to_times_ns(entry: StoredEntry, place: int) -> tuple[int, int]:
    """The times of an entry's file, for `os.utime(ns=...)`."""
    state = entry.num_uses | (_PROTECTED if entry.is_protected else 0)
    used_ns = int(entry.used_at * _NS) & ~_STATE_BITS
    queued_ns = int(entry.queued_at * _NS)
    return queued_ns - queued_ns % NUM_PLACES + place, used_ns | state


def to_times_after_use_ns(status: os.stat_result, now: float) -> tuple[int, int]:
    """The times of an entry's file after one more use: of a worker's every read."""
    state = status.st_mtime_ns & _STATE_BITS
    num_uses = count_use(state & MAX_USES)
    return status.st_atime_ns, int(now * _NS) & ~_STATE_BITS | state & _PROTECTED | num_uses
