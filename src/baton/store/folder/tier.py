"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import MAX_PINNED_SHARE, StoredEntry
from baton.store.eviction import EVICTIONS
from baton.store.folder.bodies import FileBodies, count_body_bytes, open_unnoticed
from baton.store.folder.directory import FILE_MODE, remove_unfinished
from baton.store.folder.entry_times import (
    PINNED_MODE,
    read_entry,
    to_times_after_use_ns,
    to_times_ns,
)
from baton.store.folder.evicted_names import EvictedNames
from baton.store.folder.leases import has_name
from baton.store.folder.listing import iter_files
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import EntryName, PutResult, Usage
from baton.store.victims import WaitingVictims, is_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from baton.store.folder.directory import Folder, UnnamedFile
    from baton.store.folder.leases import FileEntryLease
    from baton.store.interface import Body, TierContext

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S: Final = 1.0
"""An entry that was used later than now by more than this: the clock was set back meanwhile."""
COUNT_TOLERANCE_PARTS: Final = 64
"""One part in so many of the capacity may be counted wrongly before all entries are counted."""
EXPIRY_PARTS: Final = 20
_MAX_ROUNDS: Final = 4


class FolderTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`capacity_bytes` is for all that share the folder; it and `eviction` are the same for them.

    What was not used for `ttl_s` is not found any more; None: however old it is.
    """

    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)]
    eviction: str = "lru"
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


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
        self._clock, self._below = context.clock, context.below
        self._num_damaged = self._num_demoted = self._num_dropped = self._num_expired = 0
        self._is_reported = False
        self._looks_again_at = 0.0
        self._policy = EVICTIONS.build(options.eviction, {})
        with mapped({OSError: ConfigError, StoreError: ConfigError}):
            self._capacity = SharedCapacity(folder.fd, options.capacity_bytes)
            make_bodies = make_bodies or (lambda _: FileBodies(folder.fd, context.key))
            self._bodies = make_bodies(self._capacity)
            remove_unfinished(folder.fd)
            if folder.was_unused:
                self._capacity.recount(self._count)
            remembers = self._policy.remembers
            self._victims = WaitingVictims(self._policy, options.capacity_bytes)
            self._evicted = EvictedNames(folder.fd, options.capacity_bytes) if remembers else None

    def find(self, names: Sequence[EntryName]) -> int:
        for index, name in enumerate(names):
            if self._find(name) is None:
                return index
        return len(names)

    def put(self, name: EntryName, body: Body) -> PutResult:
        status = self._find(name)
        if status is not None:
            self._mark_use(name, status)
            return PutResult.EXISTS
        cost = self._bodies.compute_cost(len(body))
        self._reserve(cost, len(body))
        try:
            with self._bodies.write(name, body) as unnamed_file:
                unnamed_file.set_times(to_times_ns(self._make_entry(name, cost)))
                is_new = self._capacity.commit(cost, partial(self._try_link, unnamed_file, name))
        except StoreError:
            self._capacity.release(cost, self._bodies.give_back)
            raise
        finally:
            self._bodies.settle()
        return PutResult.STORED if is_new else PutResult.EXISTS

    def _make_entry(self, name: EntryName, cost: int) -> StoredEntry:
        now = self._clock.unix_now()
        is_back = self._evicted is not None and self._evicted.take(name)
        return StoredEntry(name, cost, used_at=now, queued_at=now, is_protected=is_back)

    def try_lease(self, name: EntryName) -> FileEntryLease | None:
        status = self._find(name)
        if status is None:
            return None
        lease = self._try_open(name, partial(self._remove_damaged, name))
        if lease is not None:
            self._mark_use(name, status)
        return lease

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
            self._evict(excess_bytes)

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

    def _try_open(self, name: EntryName, on_damage: Callable[[], None]) -> FileEntryLease | None:
        try:
            fd = open_unnoticed(name.hex(), self._fd)
        except OSError:
            return None
        try:
            lease = self._bodies.try_lease(fd, name, on_damage)
        except OSError:
            lease = None
        if lease is None:
            is_there = has_name(fd)
            os.close(fd)
            if is_there:
                on_damage()
        return lease

    def discard(self, name: EntryName) -> None:
        self._remove(name)

    def entries(self) -> list[StoredEntry]:
        with mapped({OSError: StoreError}):
            return list(self._iter_entries())

    def is_whole(self, name: EntryName) -> bool:
        lease = self._try_open(name, on_damage=_do_nothing)
        if lease is None:
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
        )

    def close(self) -> None:
        """See `Tier`. The folder stays open: it is the caller's."""
        self._victims.stop_looking()
        self._bodies.close()
        self._capacity.close()
        if self._evicted is not None:
            self._evicted.close()

    def _reserve(self, cost: int, num_bytes: int) -> None:
        """Count an entry as kept, and take memory for its body, making room for both first.

        Raises:
            StoreFullError: it is too large, or others fill what is freed.
            StoreError: the entries cannot be counted.
        """
        if cost > self._capacity_bytes:
            raise StoreFullError(f"an entry of {cost} bytes where {self._capacity_bytes} fit")
        try_take = partial(self._bodies.try_take, num_bytes)
        for num_rounds in range(1, _MAX_ROUNDS + 1):
            shortage = self._capacity.try_reserve(cost, try_take)
            if shortage == 0:
                return
            self._evict(shortage)
            if num_rounds == _MAX_ROUNDS - 1:  # users that were killed may hold memory still
                self._capacity.recount(self._count)
        raise StoreFullError(f"no room for {cost} bytes: others take what is freed")

    def _try_link(self, unnamed_file: UnnamedFile, name: EntryName) -> bool:
        is_new = unnamed_file.try_link(name.hex())
        if not is_new:
            self._bodies.give_back()
        return is_new

    def _evict(self, num_bytes: int) -> None:
        """Make entries go, as the policy chooses; set the count right where it was too high.

        Raises:
            StoreError: they cannot be listed, or another process holds the lock.
        """
        freed = self._evict_waiting(num_bytes)
        if freed < num_bytes:
            committed_bytes = self._capacity.peek().committed_bytes
            entries = list(self._iter_settled())
            self._choose_victims(entries, num_bytes - freed)
            freed += self._evict_waiting(num_bytes - freed)
            # Killed users' removals are not counted.
            too_much = committed_bytes - sum(entry.num_bytes for entry in entries)
            if freed < num_bytes or too_much > self._capacity_bytes // COUNT_TOLERANCE_PARTS:
                self._capacity.recount(self._count)

    def _evict_waiting(self, num_bytes: int) -> int:
        """Make chosen victims go until `num_bytes` are free, or none is left; bytes freed."""
        freed = num_gone = 0
        while freed < num_bytes and (victim := self._victims.pop()) is not None:
            num_gone += 1
            is_demoted = self._below is not None and self._try_demote(victim)
            victim_bytes = self._capacity.remove(partial(self._unlink_victim, victim))
            if not victim_bytes:
                continue
            freed += victim_bytes
            self._num_demoted += is_demoted
            self._num_dropped += not is_demoted
            if self._evicted is not None and not victim.is_protected:
                self._evicted.add(victim.name)
        if self._victims.is_short:
            entries = self._victims.look_on(self._iter_settled, num_gone)
            if entries is not None:
                self._choose_victims(entries, 0)
        return freed

    def _choose_victims(self, entries: Sequence[StoredEntry], num_bytes: int) -> None:
        for entry in self._victims.choose(entries, num_bytes, self._clock.unix_now()):
            self._mark(entry)

    def _try_demote(self, victim: StoredEntry) -> bool:
        """Put a victim into the tier below, unless it was used since; what it refuses is lost."""
        status = self._find(victim.name)
        if status is None or not is_unused(victim, self._read_entry(victim.name, status)):
            return False
        lease = self._try_open(victim.name, partial(self._remove_damaged, victim.name))
        if lease is None or self._below is None:
            return False
        with lease:
            body = memoryview(bytearray(lease.num_bytes))
            try:
                if lease.try_read(body):
                    self._below.put(victim.name, body)
                    return True
            except StoreError as exc:
                self._report(exc)
        return False

    def _remove(self, name: EntryName) -> None:
        with suppress(StoreError):
            self._capacity.remove(partial(self._unlink, name))

    def _unlink(self, name: EntryName) -> int:
        """Remove an entry; the bytes that it took up, 0 if it is not there."""
        try:
            return self._unlink_found(name, self._stat(name))
        except OSError:
            return 0

    def _unlink_victim(self, victim: StoredEntry) -> int:
        """The same, unless it was used or pinned since it was chosen."""
        try:
            status = self._stat(victim.name)
            if is_unused(victim, self._read_entry(victim.name, status)):
                return self._unlink_found(victim.name, status)
        except OSError:
            pass
        return 0

    def _unlink_found(self, name: EntryName, status: os.stat_result) -> int:
        num_bytes = count_body_bytes(status)
        self._bodies.unlink(name, num_bytes)
        return self._bodies.compute_cost(num_bytes)

    def _expire(self, entry: StoredEntry) -> None:
        self._num_expired += 1
        self._remove(entry.name)

    def _count(self) -> int:
        self._bodies.recount((n, count_body_bytes(status)) for n, status in iter_files(self._fd))
        return sum(entry.num_bytes for entry in self._iter_entries())

    def _remove_damaged(self, name: EntryName) -> None:
        self._num_damaged += 1
        logger.warning("store: entry %s in %s is damaged: removed", name.hex(), self._folder.path)
        self._remove(name)

    def _report(self, error: StoreError) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("store: %s lost an entry (logged once): %s", self._folder.path, error)

    def _find(self, name: EntryName) -> os.stat_result | None:
        """The status of an entry that is there, and is not too old."""
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
            times = to_times_ns(entry)
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
        for name, status in iter_files(self._fd):
            yield self._read_entry(name, status)

    def _read_entry(self, name: EntryName, status: os.stat_result) -> StoredEntry:
        return read_entry(name, status, self._bodies.compute_cost(count_body_bytes(status)))


def _do_nothing() -> None:
    """What is damaged stays."""
