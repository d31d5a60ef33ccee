"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import MAX_PINNED_SHARE, Shortage, StoredEntry
from baton.store.compressed_lease import CompressedEntryLease
from baton.store.eviction import EVICTIONS
from baton.store.folder.bodies import FileBodies, NewEntry
from baton.store.folder.directory import FILE_MODE
from baton.store.folder.entries import FolderEntries
from baton.store.folder.entry_files import EntryFiles
from baton.store.folder.entry_times import PINNED_MODE
from baton.store.folder.entry_writer import EntryWriter
from baton.store.folder.evictor import FolderEvictor
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import NO_TENANT, EntryName, NamedBody, PutResult, Usage
from baton.store.puts import take_one
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.store.folder.directory import Folder
    from baton.store.folder.leases import FileEntryLease
    from baton.store.interface import Body, EntryLease, PutOutcome, TenantLabel, TierContext


logger = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 60.0
"""Between two lines about entries that are not kept: a full disk refuses every one."""


class FolderTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`capacity_bytes` is for all that share the folder; the options are the same for them.

    What was not used for `ttl_s` is not found any more; None: however old it is. A tenant holds at
    most `tenant_share` of the capacity: beyond that its own entries make room for its next ones.
    Who evicts in the background begins above `high_mark` of the capacity, and ends at `low_mark`.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)]
    eviction: str = "lru"
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    high_mark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    low_mark: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.90

    def __post_init__(self) -> None:
        if self.low_mark > self.high_mark:
            raise ValueError("low_mark is above high_mark")


class FolderTier:
    """See `Tier`. Other processes may have the same folder open, with the same capacity."""

    def __init__(
        self,
        folder: Folder,
        options: FolderTierOptions,
        context: TierContext,
        make_bodies: Callable[[SharedCapacity], FileBodies] | None = None,
    ) -> None:
        """Take up work in a folder, which the caller closes; clean up after dead writers.

        `make_bodies`: where bodies lie, if not simply in files; from then on the tier's.

        Raises:
            ConfigError: the folder cannot be used, or there is no such eviction policy.
        """
        self._marks = options.high_mark, options.low_mark
        policy = EVICTIONS.build(options.eviction, {})
        self._path, self._clock = folder.path, context.clock
        self._log = LimitedLog(logger, context.clock, LOG_INTERVAL_S)
        self._tenant_bytes = tenant_bytes = int(options.tenant_share * options.capacity_bytes)
        with mapped({OSError: ConfigError, StoreError: ConfigError}):
            self._capacity = SharedCapacity(folder.fd, options.capacity_bytes, tenant_bytes)
            make_bodies = make_bodies or (lambda _: FileBodies(folder.fd, context.key))
            self._bodies = make_bodies(self._capacity)
            self._files = EntryFiles(folder.fd, self._bodies, self._capacity, context.clock)
            self._entries = FolderEntries(folder, self._files, context.clock, options.ttl_s)
            self._evictor = FolderEvictor(
                folder,
                self._entries,
                self._capacity,
                policy=policy,
                context=context,
                try_lease=self._try_open,
            )
            self._writer = EntryWriter(
                self._bodies,
                self._capacity,
                make_room=self._evictor.evict,
                recount=self._entries.recount,
                make_entry=self._make_entry,
                report_full=self._report_full,
            )

    def find(self, names: Sequence[EntryName]) -> int:
        return self._entries.count_leading(names)

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return take_one(self.put_many((NamedBody(name, body),), tenant))

    def put_many(
        self, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
    ) -> list[PutOutcome]:
        """See `PutsMany`."""
        are_there = [self._use_if_there(entry.name) for entry in entries]
        each = zip(entries, are_there, strict=True)
        new = [NewEntry(*entry) for entry, is_there in each if not is_there]
        outcomes = iter(self._keep(new, tenant))
        return [PutResult.EXISTS if is_there else next(outcomes) for is_there in are_there]

    def try_lease(self, name: EntryName) -> EntryLease | None:
        status = self._entries.find(name)
        lease = self._try_open(name) if status is not None else None
        if status is None or lease is None:
            self._entries.forget(name)
            return None
        self._files.mark_use(name, status)
        return lease

    def has_room(self, num_bytes: int) -> bool:
        """See `DemotesEntries`."""
        return self._capacity.peek().free_bytes >= self._bodies.compute_cost(num_bytes)

    def pin(self, name: EntryName) -> bool:
        """See `PinsEntries`."""
        status = self._entries.find(name)
        if status is None:
            return False
        found = self._files.read(name, status)
        if not found.is_pinned:
            self._check_pin(name, found.num_bytes)
            # Under the lock: else its file may become another entry's in between.
            self._capacity.under_lock(partial(self._files.set_mode, name, PINNED_MODE))
        return True

    def _check_pin(self, name: EntryName, num_bytes: int) -> None:
        """Of the tier, and of what a tenant may hold, a part must be left for other entries."""
        entries = self.entries()
        tenant = next((each.tenant for each in entries if each.name == name), NO_TENANT)
        pinned = [each for each in entries if each.is_pinned]
        bounds = [("", self._capacity.capacity_bytes, pinned)]
        if tenant != NO_TENANT:
            of_tenant = [each for each in pinned if each.tenant == tenant]
            bounds.append((" of one tenant", self._tenant_bytes, of_tenant))
        for whose, most_bytes, others in bounds:
            pinned_bytes = sum(each.num_bytes for each in others)
            if pinned_bytes + num_bytes > MAX_PINNED_SHARE * most_bytes:
                raise StoreFullError(
                    f"{pinned_bytes} bytes{whose} are pinned in {self._path}: no more than "
                    f"{MAX_PINNED_SHARE:.0%} of {most_bytes} may be"
                )

    def unpin(self, name: EntryName) -> bool:
        """See `PinsEntries`."""
        is_there = self._entries.find(name) is not None
        if is_there:
            self._files.set_mode(name, FILE_MODE)
        return is_there

    def maintain(self) -> None:
        """See `MaintainsEntries`."""
        self._entries.expire_old()
        excess_bytes = self._capacity.peek().excess_bytes(*self._marks)
        if excess_bytes:
            self._evictor.evict(Shortage(excess_bytes))

    def discard(self, name: EntryName) -> None:
        self._entries.remove(name)

    def entries(self) -> list[StoredEntry]:
        with mapped({OSError: StoreError}):
            return list(self._files.iter_all())

    def is_whole(self, name: EntryName) -> bool:
        return self._entries.is_whole(name)

    def usage(self) -> Usage:
        capacity = self._capacity.peek()
        return Usage(
            used_bytes=capacity.committed_bytes + capacity.reserved_bytes,
            capacity_bytes=capacity.capacity_bytes,
            num_demoted=self._evictor.num_demoted,
            num_dropped=self._evictor.num_dropped,
            num_damaged=self._entries.num_damaged,
            num_expired=self._entries.num_expired,
            num_read_errors=self._entries.num_read_errors,
        )

    def close(self) -> None:
        """See `Tier`. The folder stays open: it is the caller's."""
        self._evictor.close()
        self._bodies.close()
        self._capacity.close()
        self._entries.close()

    def _use_if_there(self, name: EntryName) -> bool:
        """Whether an entry is there, which counts as its last use."""
        self._entries.discard_unreadable(name)  # it was computed again: that can be read
        status = self._entries.find(name)
        if status is not None:
            self._files.mark_use(name, status)
        return status is not None

    def _keep(self, entries: Sequence[NewEntry], tenant: TenantLabel) -> list[PutOutcome]:
        """Put entries that were not found."""
        outcomes = self._writer.write(entries, tenant)
        for outcome in outcomes:
            if isinstance(outcome, StoreError):
                kind = "full" if isinstance(outcome, StoreFullError) else "failed"
                self._log.warning(kind, f"store: an entry is not kept in {self._path}: {outcome}")
        return outcomes

    def _report_full(self) -> None:
        self._log.warning(
            "filesystem",
            f"store: the filesystem of {self._path} is full before capacity_bytes "
            f"({self._capacity.capacity_bytes}) are used: entries make room as if they were",
        )

    def _make_entry(self, name: EntryName, cost: int) -> StoredEntry:
        now = self._clock.unix_now()
        is_back = self._evictor.take_evicted(name)
        return StoredEntry(name, cost, used_at=now, queued_at=now, is_protected=is_back)

    def _try_open(self, name: EntryName) -> EntryLease | None:
        lease = self._entries.try_open(name)
        return None if lease is None else self._to_entry_lease(lease)

    def _to_entry_lease(self, lease: FileEntryLease) -> EntryLease:
        """What gives back the body as it was put."""
        is_compressed = bool(lease.header.whole_bytes)
        return CompressedEntryLease(lease, None, self._clock) if is_compressed else lease
