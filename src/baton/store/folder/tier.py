"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import MAX_PINNED_SHARE, Shortage, StoredEntry
from baton.store.eviction import EVICTIONS
from baton.store.folder.bodies import FileBodies, NewEntry, count_body_bytes, open_unnoticed
from baton.store.folder.compressed_lease import CompressedEntryLease
from baton.store.folder.demotion import VictimBody, demote
from baton.store.folder.directory import FILE_MODE, remove_unfinished
from baton.store.folder.entry_times import (
    PINNED_MODE,
    read_entry,
    read_place,
    to_times_after_use_ns,
    to_times_ns,
)
from baton.store.folder.entry_writer import EntryWriter
from baton.store.folder.evicted_names import EvictedNames
from baton.store.folder.known_names import KnownNames
from baton.store.folder.leases import ReadFaults
from baton.store.folder.listing import iter_files
from baton.store.folder.shared_capacity import NOTHING_REMOVED, Removed, SharedCapacity
from baton.store.folder.unreadable_entries import UnreadableEntries
from baton.store.interface import NO_TENANT, EntryName, NamedBody, PutResult, Usage
from baton.store.puts import take_one
from baton.store.victims import WaitingVictims, is_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from baton.store.folder.directory import Folder
    from baton.store.folder.leases import FileEntryLease
    from baton.store.interface import Body, EntryLease, PutOutcome, TenantLabel, TierContext

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S: Final = 1.0
"""An entry that was used later than now by more than this: the clock was set back meanwhile."""
COUNT_TOLERANCE_PARTS: Final = 64
"""One part in so many of the capacity may be counted wrongly before all entries are counted."""
EXPIRY_PARTS: Final = 20


class FolderTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`capacity_bytes` is for all that share the folder; the options are the same for them.

    What was not used for `ttl_s` is not found any more; None: however old it is. A tenant holds at
    most `tenant_share` of the capacity: beyond that its own entries make room for its next ones.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)]
    eviction: str = "lru"
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


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
        self._folder, self._fd = folder, folder.fd
        self._capacity_bytes, self._ttl_s = options.capacity_bytes, options.ttl_s
        tenant_bytes = int(options.tenant_share * options.capacity_bytes)
        self._clock, self._below = context.clock, context.below
        self._num_damaged = self._num_demoted = self._num_dropped = self._num_expired = 0
        self._unreadable = UnreadableEntries(folder.path, context.clock)
        self._is_reported = False
        self._looks_again_at = 0.0
        self._policy = EVICTIONS.build(options.eviction, {})
        with mapped({OSError: ConfigError, StoreError: ConfigError}):
            self._capacity = SharedCapacity(folder.fd, options.capacity_bytes, tenant_bytes)
            make_bodies = make_bodies or (lambda _: FileBodies(folder.fd, context.key))
            self._bodies = make_bodies(self._capacity)
            remove_unfinished(folder.fd)
            if folder.was_unused:
                if self._capacity.has_older_entries:
                    self._remove_older()
                self._capacity.recount(self._count)
            self._known = KnownNames(folder.fd)
            remembers = self._policy.remembers
            self._victims = WaitingVictims(self._policy, options.capacity_bytes)
            self._evicted = EvictedNames(folder.fd, options.capacity_bytes) if remembers else None
            self._writer = EntryWriter(
                self._bodies,
                self._capacity,
                make_room=self._evict,
                recount=partial(self._capacity.recount, self._count),
                make_entry=self._make_entry,
            )

    def find(self, names: Sequence[EntryName]) -> int:
        num_known = 0
        if self._ttl_s is None:  # else an entry's age has to be looked at
            num_known = self._known.count_leading(names, self._clock.now())
        unknown = range(num_known, len(names))
        num_found = next((at for at in unknown if self._find(names[at]) is None), len(names))
        self._known.add(names[num_known:num_found])
        return num_found

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

    def _use_if_there(self, name: EntryName) -> bool:
        """Whether an entry is there, which counts as its last use."""
        if name in self._unreadable:  # it was computed again: that can be read
            self._unreadable.remove(name)
            self._remove(name)
        status = self._find(name)
        if status is not None:
            self._mark_use(name, status)
        return status is not None

    def _keep(self, entries: Sequence[NewEntry], tenant: TenantLabel) -> list[PutOutcome]:
        """Put entries that were not found."""
        return self._writer.write(entries, tenant)

    def _make_entry(self, name: EntryName, cost: int) -> StoredEntry:
        now = self._clock.unix_now()
        is_back = self._evicted is not None and self._evicted.take(name)
        return StoredEntry(name, cost, used_at=now, queued_at=now, is_protected=is_back)

    def try_lease(self, name: EntryName) -> EntryLease | None:
        status = self._find(name)
        lease = None
        if status is not None:
            lease = self._try_open(name, self._faults_of(name))
        if status is None or lease is None:
            self._known.forget(name)
            return None
        self._mark_use(name, status)
        return self._to_entry_lease(lease)

    def _to_entry_lease(self, lease: FileEntryLease) -> EntryLease:
        """What gives back the body as it was put."""
        is_compressed = bool(lease.header.whole_bytes)
        return CompressedEntryLease(lease, None, self._clock) if is_compressed else lease

    def pin(self, name: EntryName) -> bool:
        """See `PinsEntries`."""
        status = self._find(name)
        if status is None:
            return False
        found = self._read_entry(name, status)
        if not found.is_pinned:
            pinned_bytes = sum(entry.num_bytes for entry in self.entries() if entry.is_pinned)
            if pinned_bytes + found.num_bytes > MAX_PINNED_SHARE * self._capacity_bytes:
                raise StoreFullError(
                    f"{pinned_bytes} bytes are pinned in {self._folder.path}: no more than "
                    f"{MAX_PINNED_SHARE:.0%} of its {self._capacity_bytes} may be"
                )
            self._set_mode(name, PINNED_MODE)
        return True

    def unpin(self, name: EntryName) -> bool:
        """See `PinsEntries`."""
        status = self._find(name)
        if status is not None:
            self._set_mode(name, FILE_MODE)
        return status is not None

    def maintain(self) -> None:
        """See `MaintainsEntries`."""
        self._expire_old()
        excess_bytes = self._capacity.peek().excess_bytes
        if excess_bytes:
            self._evict(Shortage(excess_bytes))

    def _expire_old(self) -> None:
        """Remove what is too old, a twentieth of `ttl_s` after it is at the latest.

        To list a large tier each second would take a good part of a core.
        """
        now = self._clock.unix_now()
        if self._ttl_s is None or now < self._looks_again_at <= now + self._ttl_s:
            return
        self._looks_again_at = now + self._ttl_s / EXPIRY_PARTS
        for entry in self._iter_settled():
            if self._is_expired(entry):
                self._expire(entry)

    def _try_open(self, name: EntryName, faults: ReadFaults) -> FileEntryLease | None:
        try:
            fd = open_unnoticed(name.hex(), self._fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            faults.on_io_error(exc)
            return None
        try:
            lease = self._bodies.try_lease(fd, name, faults)
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
            return os.path.samestat(self._stat(name), os.fstat(fd))
        except OSError:
            return False

    def _faults_of(self, name: EntryName) -> ReadFaults:
        """A damaged entry is removed; one that cannot be read stays, and is left alone."""
        return ReadFaults(partial(self._remove_damaged, name), partial(self._leave_alone, name))

    def discard(self, name: EntryName) -> None:
        self._remove(name)

    def entries(self) -> list[StoredEntry]:
        with mapped({OSError: StoreError}):
            return list(self._iter_entries())

    def is_whole(self, name: EntryName) -> bool:
        lease = self._try_open(name, ReadFaults(_do_nothing, _raise_unreadable))
        if lease is None:
            self._known.forget(name)  # its removal may not be reported yet: `find` looks again
            return False
        with lease:
            return lease.try_read(memoryview(bytearray(lease.num_bytes)))

    def usage(self) -> Usage:
        capacity = self._capacity.peek()
        return Usage(
            used_bytes=capacity.committed_bytes + capacity.reserved_bytes,
            capacity_bytes=self._capacity_bytes,
            num_demoted=self._num_demoted,
            num_dropped=self._num_dropped,
            num_damaged=self._num_damaged,
            num_expired=self._num_expired,
            num_read_errors=self._unreadable.num_errors,
        )

    def close(self) -> None:
        """See `Tier`. The folder stays open: it is the caller's."""
        self._victims.stop_looking()
        self._bodies.close()
        self._capacity.close()
        self._known.close()
        if self._evicted is not None:
            self._evicted.close()

    def _evict(self, shortage: Shortage) -> None:
        """Make entries go, as the policy chooses; set the count right where it was too high.

        Raises:
            StoreError: they cannot be listed, or another process holds the lock.
        """
        if shortage.tenant == NO_TENANT:
            self._evict_any(shortage.num_bytes)
        else:
            self._evict_of_tenant(shortage.tenant, shortage.num_bytes)

    def _evict_any(self, num_bytes: int) -> None:
        freed = self._evict_waiting(num_bytes)
        if freed < num_bytes:
            counted_bytes = self._capacity.peek().committed_bytes
            entries = list(self._iter_settled())
            self._choose_victims(entries, num_bytes - freed)
            freed += self._evict_waiting(num_bytes - freed)
            self._recount_if_wrong(entries, counted_bytes, is_short=freed < num_bytes)

    def _evict_of_tenant(self, tenant: TenantLabel, num_bytes: int) -> None:
        counted_bytes = self._capacity.peek_held(tenant)
        entries = [entry for entry in self._iter_settled() if entry.tenant == tenant]
        eviction = self._policy.choose(entries, num_bytes, self._clock.unix_now())
        for entry in eviction.requeued:
            self._mark(entry)
        freed = self._evict_victims(eviction.victims)
        self._recount_if_wrong(entries, counted_bytes, is_short=freed < num_bytes)

    def _recount_if_wrong(
        self, entries: Sequence[StoredEntry], counted_bytes: int, *, is_short: bool
    ) -> None:
        """Killed users' removals are not counted."""
        too_much = counted_bytes - sum(entry.num_bytes for entry in entries)
        if is_short or too_much > self._capacity_bytes // COUNT_TOLERANCE_PARTS:
            self._capacity.recount(self._count)

    def _evict_waiting(self, num_bytes: int) -> int:
        """Make chosen victims go until `num_bytes` are free, or none is left; bytes freed."""
        freed = num_gone = 0
        while freed < num_bytes and (victims := self._pop_victims(num_bytes - freed)):
            num_gone += len(victims)
            freed += self._evict_victims(victims)
        if self._victims.is_short:
            entries = self._victims.look_on(self._iter_settled, num_gone)
            if entries is not None:
                self._choose_victims(entries, 0)
        return freed

    def _pop_victims(self, num_bytes: int) -> list[StoredEntry]:
        """The next victims that take up so much together; fewer where there are no more."""
        victims: list[StoredEntry] = []
        while num_bytes > 0 and (victim := self._victims.pop()) is not None:
            victims.append(victim)
            num_bytes -= victim.num_bytes
        return victims

    def _evict_victims(self, victims: Sequence[StoredEntry]) -> int:
        """Make victims go, but those used or pinned since they were chosen; bytes freed."""
        demoted: set[EntryName] = set()
        if self._below is not None:
            demoted = demote(
                filter(None, map(self._read_victim, victims)), self._below, self._report
            )
        return sum(self._evict_victim(victim, victim.name in demoted) for victim in victims)

    def _evict_victim(self, victim: StoredEntry, is_demoted: bool) -> int:  # noqa: FBT001 - counted
        victim_bytes = self._capacity.remove(partial(self._unlink_victim, victim))
        if victim_bytes:
            self._num_demoted += is_demoted
            self._num_dropped += not is_demoted
            if self._evicted is not None and not victim.is_protected:
                self._evicted.add(victim.name)
        return victim_bytes

    def _choose_victims(self, entries: Sequence[StoredEntry], num_bytes: int) -> None:
        for entry in self._victims.choose(entries, num_bytes, self._clock.unix_now()):
            self._mark(entry)

    def _read_victim(self, victim: StoredEntry) -> VictimBody | None:
        """A victim as it was put, unless it was used since it was chosen, or is damaged."""
        status = self._find(victim.name)
        if status is None or not is_unused(victim, self._read_entry(victim.name, status)):
            return None
        opened = self._try_open(victim.name, self._faults_of(victim.name))
        if opened is None:
            return None
        with self._to_entry_lease(opened) as lease:
            body = memoryview(bytearray(lease.num_bytes))
            return VictimBody(victim.name, body, lease.tenant) if lease.try_read(body) else None

    def _remove(self, name: EntryName) -> None:
        with suppress(StoreError):
            self._capacity.remove(partial(self._unlink, name))

    def _unlink(self, name: EntryName) -> Removed:
        """Remove an entry, if it is there."""
        try:
            return self._unlink_found(name, self._stat(name))
        except OSError:
            return NOTHING_REMOVED

    def _unlink_victim(self, victim: StoredEntry) -> Removed:
        """The same, unless it was used or pinned since it was chosen."""
        try:
            status = self._stat(victim.name)
            if is_unused(victim, self._read_entry(victim.name, status)):
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

    def _expire(self, entry: StoredEntry) -> None:
        self._num_expired += 1
        self._remove(entry.name)

    def _count(self) -> Mapping[int, int]:
        """Bytes that entries take up, by the places of their tenants."""
        remove_unfinished(self._fd)
        self._bodies.recount((n, count_body_bytes(status)) for n, status in iter_files(self._fd))
        held_bytes: Counter[int] = Counter()
        for _, status in iter_files(self._fd):
            cost = self._bodies.compute_cost(count_body_bytes(status))
            held_bytes[read_place(status)] += cost
        return held_bytes

    def _remove_older(self) -> None:
        """Remove entries of an older version: they could not be read, and state no tenant."""
        names = [name for name, _ in iter_files(self._fd)]
        for name in names:
            os.unlink(name.hex(), dir_fd=self._fd)
        if names:
            logger.info("store: %d entries of an older version are removed", len(names))

    def _remove_damaged(self, name: EntryName) -> None:
        self._num_damaged += 1
        logger.warning("store: entry %s in %s is damaged: removed", name.hex(), self._folder.path)
        self._remove(name)

    def _leave_alone(self, name: EntryName, error: OSError) -> None:
        self._known.forget(name)
        self._unreadable.add(name, error)

    def _report(self, error: StoreError) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("store: %s lost an entry (logged once): %s", self._folder.path, error)

    def _find(self, name: EntryName) -> os.stat_result | None:
        """The status of an entry that is there, and is not too old."""
        if name in self._unreadable:
            return None
        try:
            status = self._stat(name)
        except OSError:
            return None
        if self._ttl_s is not None:
            entry = self._read_entry(name, status)
            if self._is_expired(entry):
                self._expire(entry)
                return None
        return status

    def _stat(self, name: EntryName) -> os.stat_result:
        return os.stat(name.hex(), dir_fd=self._fd, follow_symlinks=False)

    def _is_expired(self, entry: StoredEntry) -> bool:
        if self._ttl_s is None or entry.is_pinned:
            return False
        return self._clock.unix_now() - entry.used_at > self._ttl_s

    def _mark(self, entry: StoredEntry) -> None:
        """Keep what eviction must know of an entry with it. Two users at once: one use is lost."""
        with suppress(OSError):
            # Not by its label: a list that takes long shows older labels than entries.
            times = to_times_ns(entry, read_place(self._stat(entry.name)))
            os.utime(entry.name.hex(), ns=times, dir_fd=self._fd, follow_symlinks=False)

    def _mark_use(self, name: EntryName, status: os.stat_result) -> None:
        with suppress(OSError):
            times = to_times_after_use_ns(status, self._clock.unix_now())
            os.utime(name.hex(), ns=times, dir_fd=self._fd, follow_symlinks=False)

    def _set_mode(self, name: EntryName, mode: int) -> None:
        with mapped({OSError: StoreError}):
            fd = open_unnoticed(name.hex(), self._fd)
            try:
                os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def _iter_settled(self) -> Generator[StoredEntry]:
        """All entries, none of which was used later than now: else it would never go.

        Where the clock was set back, entries count as used now, and are marked so.

        Raises:
            StoreError: they cannot be listed.
        """
        now = self._clock.unix_now()
        with mapped({OSError: StoreError}):
            for entry in self._iter_entries():
                if max(entry.used_at, entry.queued_at) > now + CLOCK_TOLERANCE_S:
                    now = self._clock.unix_now()  # the list may have been begun long ago
                if max(entry.used_at, entry.queued_at) > now + CLOCK_TOLERANCE_S:
                    used_at, queued_at = min(entry.used_at, now), min(entry.queued_at, now)
                    settled = replace(entry, used_at=used_at, queued_at=queued_at)
                    self._mark(settled)
                    yield settled
                else:
                    yield entry

    def _iter_entries(self) -> Iterator[StoredEntry]:
        labels = self._capacity.peek_tenants()
        for name, status in iter_files(self._fd):
            yield self._read_entry(name, status, labels.at(read_place(status)))

    def _read_entry(
        self, name: EntryName, status: os.stat_result, tenant: TenantLabel = NO_TENANT
    ) -> StoredEntry:
        cost = self._bodies.compute_cost(count_body_bytes(status))
        return read_entry(name, status, cost, tenant)


def _do_nothing() -> None:
    """What is damaged stays."""


def _raise_unreadable(error: OSError) -> None:
    raise StoreError(f"an entry cannot be read: {error.strerror}") from error
