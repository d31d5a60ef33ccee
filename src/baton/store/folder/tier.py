"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import StoredEntry, choose_victims
from baton.store.folder.bodies import OPEN_ENTRY, FileBodies, PooledBodies, count_body_bytes
from baton.store.folder.directory import remove_unfinished
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import EntryName, PutResult, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.store.folder.body_pool import BodyPool
    from baton.store.folder.directory import Folder, UnnamedFile
    from baton.store.folder.leases import FileEntryLease
    from baton.store.interface import Body, TierContext


logger = logging.getLogger(__name__)

_MAX_ROUNDS: Final = 4
_ENTRY: Final = re.compile(r"[0-9a-f]{64}")


class FolderTier:
    """See `Tier`. Other processes may have the same folder open, with the same capacity."""

    def __init__(
        self,
        folder: Folder,
        capacity_bytes: int,
        context: TierContext,
        pool: BodyPool | None = None,
    ) -> None:
        """Take up work in a folder, which the caller closes; clean up after dead writers.

        Large bodies go into the pool, if there is one, which is the tier's then.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._folder, self._fd = folder, folder.fd
        self._capacity_bytes = capacity_bytes
        self._clock, self._below = context.clock, context.below
        self._num_damaged = self._num_demoted = self._num_dropped = 0
        self._is_reported = False
        with mapped({OSError: ConfigError, StoreError: ConfigError}):
            self._capacity = SharedCapacity(folder.fd, capacity_bytes)
            self._bodies = FileBodies(folder.fd, context.key)
            if pool is not None:
                self._bodies = PooledBodies(folder.fd, context.key, pool, self._capacity)
            remove_unfinished(folder.fd)
            if folder.was_unused:
                self._capacity.reset(self._count)

    def find(self, names: Sequence[EntryName]) -> int:
        for index, name in enumerate(names):
            if not self._has(name):
                return index
        return len(names)

    def put(self, name: EntryName, body: Body) -> PutResult:
        if self._has(name):
            self._touch(name)
            return PutResult.EXISTS
        cost = self._bodies.compute_cost(len(body))
        self._reserve(cost, len(body))
        try:
            with self._bodies.write(name, body) as unnamed_file:
                is_new = self._capacity.commit(cost, partial(self._try_link, unnamed_file, name))
        except StoreError:
            self._capacity.release(cost, self._bodies.give_back)
            raise
        finally:
            self._bodies.settle()
        if is_new:
            self._touch(name)
        return PutResult.STORED if is_new else PutResult.EXISTS

    def try_lease(self, name: EntryName) -> FileEntryLease | None:
        lease = self._try_open(name, partial(self._remove_damaged, name))
        if lease is not None:
            self._touch(name)
        return lease

    def _try_open(self, name: EntryName, on_damage: Callable[[], None]) -> FileEntryLease | None:
        try:
            fd = os.open(name.hex(), OPEN_ENTRY | self._bodies.access, dir_fd=self._fd)
        except OSError:
            return None
        try:
            lease = self._bodies.try_lease(fd, name, on_damage)
        except OSError:
            lease = None
        if lease is None:
            is_there = bool(os.fstat(fd).st_nlink)
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
        )

    def close(self) -> None:
        """See `Tier`. The folder stays open: it is the caller's."""
        self._bodies.close()
        self._capacity.close()

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
        """Remove the least recently used entries; set the count right where it was too high."""
        with mapped({OSError: StoreError}):
            victims = choose_victims(self._iter_entries(), num_bytes)
        for victim in victims:
            if self._try_demote(victim.name):
                self._num_demoted += 1
            else:
                self._num_dropped += 1
            self._remove(victim.name)
        if sum(victim.num_bytes for victim in victims) < num_bytes:
            self._capacity.recount(self._count)

    def _try_demote(self, name: EntryName) -> bool:
        """Hand an entry down, if there is a tier below; what it does not take is lost."""
        below = self._below
        lease = None if below is None else self.try_lease(name)
        if lease is None or below is None:
            return False
        with lease:
            body = memoryview(bytearray(lease.num_bytes))
            try:
                if lease.try_read(body):
                    below.put(name, body)
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
            status = os.stat(name.hex(), dir_fd=self._fd, follow_symlinks=False)
            self._bodies.unlink(name, count_body_bytes(status))
        except OSError:
            return 0
        return self._bodies.compute_cost(count_body_bytes(status))

    def _count(self) -> int:
        self._bodies.recount((n, count_body_bytes(status)) for n, status in self._iter_files())
        return sum(entry.num_bytes for entry in self._iter_entries())

    def _remove_damaged(self, name: EntryName) -> None:
        self._num_damaged += 1
        logger.warning("store: entry %s in %s is damaged: removed", name.hex(), self._folder.path)
        self._remove(name)

    def _report(self, error: StoreError) -> None:
        if not self._is_reported:
            self._is_reported = True
            logger.warning("store: %s lost an entry (logged once): %s", self._folder.path, error)

    def _has(self, name: EntryName) -> bool:
        try:
            os.stat(name.hex(), dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _touch(self, name: EntryName) -> None:
        with suppress(OSError):
            os.utime(name.hex(), ns=self._now_ns(), dir_fd=self._fd, follow_symlinks=False)

    def _now_ns(self) -> tuple[int, int]:
        now = int(self._clock.unix_now() * 1e9)
        return now, now

    def _iter_entries(self) -> Iterator[StoredEntry]:
        for name, status in self._iter_files():
            cost = self._bodies.compute_cost(count_body_bytes(status))
            yield StoredEntry(name, cost, status.st_mtime)

    def _iter_files(self) -> Iterator[tuple[EntryName, os.stat_result]]:
        with os.scandir(self._fd) as found:
            for entry in found:
                if _ENTRY.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield EntryName(bytes.fromhex(entry.name)), status


def _do_nothing() -> None:
    """What is damaged stays."""
