"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import StoredEntry, choose_victims
from baton.store.entry_format import (
    HEADER_BYTES,
    POOLED_MAGIC,
    BodyCheck,
    BodySeal,
    make_header,
    read_digest,
)
from baton.store.folder.body_pool import EXTENT_BYTES, copy_in, count_extents, pack_runs
from baton.store.folder.directory import remove_unfinished, write_unnamed
from baton.store.folder.leases import (
    FileEntryLease,
    PooledBody,
    PooledEntryLease,
    free_unless_read,
    read_runs,
    try_share,
)
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import MAX_BODY_BYTES, EntryName, PutResult, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from baton.store.folder.body_pool import BodyPool, Run
    from baton.store.folder.directory import Folder, UnnamedFile
    from baton.store.interface import Body, TierContext


logger = logging.getLogger(__name__)

ALLOCATION_BYTES: Final = 4096
"""What a filesystem gives a file at least."""
_MAX_ROUNDS: Final = 4
_ENTRY: Final = re.compile(r"[0-9a-f]{64}")
_OPEN: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not blocking: a pipe in the place of an entry would wait for a writer."""


class FolderTier:
    """See `Tier`. Other processes may have the same folder open, with the same capacity.

    Bodies of at least `min_pooled_bytes` (`MAX_PACKED_BYTES` or more) lie in the pool, where there
    is one, others in their entry's file.
    """

    def __init__(
        self,
        folder: Folder,
        capacity_bytes: int,
        context: TierContext,
        *,
        pool: BodyPool | None = None,
        min_pooled_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Take up work in a folder, which the caller closes; clean up after dead writers.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._folder, self._fd = folder, folder.fd
        self._pool = pool
        self._min_pooled_bytes = MAX_BODY_BYTES + 1 if pool is None else min_pooled_bytes
        self._capacity_bytes = capacity_bytes
        self._clock, self._below, self._key = context.clock, context.below, context.key
        self._num_damaged = self._num_demoted = self._num_dropped = 0
        self._is_reported = False
        with mapped({OSError: ConfigError, StoreError: ConfigError}):
            self._capacity = SharedCapacity(folder.fd, capacity_bytes)
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
        num_bytes = len(body)
        cost = self._compute_cost(num_bytes)
        runs = self._reserve(cost, num_bytes)
        try:
            with self._write(name, body, runs) as unnamed_file:
                try_link = partial(self._try_link, unnamed_file, name, runs)
                is_new = self._capacity.commit(cost, try_link)
        except StoreError:
            self._capacity.release(cost, partial(self._give_back, runs))
            raise
        finally:
            if self._pool is not None and runs:
                self._pool.keep()
        if is_new:
            self._touch(name)
        return PutResult.STORED if is_new else PutResult.EXISTS

    def try_lease(self, name: EntryName) -> FileEntryLease | None:
        lease = self._try_open(name, partial(self._remove_damaged, name))
        if lease is not None:
            self._touch(name)
        return lease

    def _try_open(self, name: EntryName, on_damage: Callable[[], None]) -> FileEntryLease | None:
        access = os.O_RDONLY if self._pool is None else os.O_RDWR
        try:
            fd = os.open(name.hex(), _OPEN | access, dir_fd=self._fd)
        except OSError:
            return None
        try:
            lease = self._try_lease_open(fd, name, on_damage)
        except OSError:
            lease = None
        if lease is None:
            is_there = bool(os.fstat(fd).st_nlink)
            os.close(fd)
            if is_there:
                on_damage()
        return lease

    def _try_lease_open(
        self, fd: int, name: EntryName, on_damage: Callable[[], None]
    ) -> FileEntryLease | None:
        """None: it is damaged, or no entry; or it was removed, and has no name any more.

        Raises:
            OSError: it cannot be read.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        num_bytes = body_bytes(status)
        if self._pool is None or num_bytes < self._min_pooled_bytes:
            digest = read_digest(name, os.pread(fd, HEADER_BYTES, 0), status.st_size)
            if digest is None:
                return None
            begin_check = partial(BodyCheck, self._key, name, num_bytes, digest)
            return FileEntryLease(fd, num_bytes, begin_check, on_damage)
        if not try_share(fd):
            return None
        header = os.pread(fd, HEADER_BYTES, 0)
        digest = read_digest(name, header, status.st_size, POOLED_MAGIC)
        runs = read_runs(fd)
        if digest is None or runs is None:
            return None
        begin_check = partial(BodyCheck, self._key, name, num_bytes, digest)
        free = partial(self._free_late, self._pool.generation)
        body = PooledBody(self._pool, runs, free)
        return PooledEntryLease(fd, num_bytes, begin_check, on_damage, body)

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
        if self._pool is not None:
            self._pool.close()
        self._capacity.close()

    def _reserve(self, cost: int, num_bytes: int) -> tuple[Run, ...]:
        """Count an entry as kept, making room for it first; the extents for its body, if any.

        Raises:
            StoreFullError: it is too large, or others fill what is freed.
            StoreError: the entries cannot be counted.
        """
        if cost > self._capacity_bytes:
            raise StoreFullError(f"an entry of {cost} bytes where {self._capacity_bytes} fit")
        taken: list[Run] = []
        try_take = partial(self._try_take, num_bytes, taken)
        for num_rounds in range(1, _MAX_ROUNDS + 1):
            shortage = self._capacity.try_reserve(cost, try_take)
            if shortage == 0:
                return tuple(taken)
            self._evict(shortage)
            if num_rounds == _MAX_ROUNDS - 1:  # killed users may have left extents marked as taken
                self._capacity.recount(self._count)
        raise StoreFullError(f"no room for {cost} bytes: others take what is freed")

    def _is_pooled(self, num_bytes: int) -> bool:
        return num_bytes >= self._min_pooled_bytes

    def _compute_cost(self, num_bytes: int) -> int:
        """Bytes that an entry takes up: its file, and its extents."""
        return (
            compute_pooled_cost(num_bytes)
            if self._is_pooled(num_bytes)
            else compute_cost(num_bytes)
        )

    def _try_take(self, num_bytes: int, taken: list[Run]) -> bool:
        if self._pool is None or not self._is_pooled(num_bytes):
            return True
        runs = self._pool.take(count_extents(num_bytes))
        taken[:] = runs or ()
        return runs is not None

    def _give_back(self, runs: tuple[Run, ...]) -> None:
        if self._pool is not None and runs:
            self._pool.give_back(runs)

    def _write(
        self, name: EntryName, body: Body, runs: tuple[Run, ...]
    ) -> AbstractContextManager[UnnamedFile]:
        """The entry's file, complete but for its name."""
        if self._pool is None or not runs:
            return write_unnamed(self._fd, (make_header(self._key, name, body), body))
        seal = BodySeal(self._key, name, len(body))
        for piece in copy_in(self._pool.views(runs, len(body)), body):
            seal.add(piece.data)
        head = seal.make_header(POOLED_MAGIC) + pack_runs(runs)
        return write_unnamed(self._fd, (head,), HEADER_BYTES + len(body))

    def _try_link(self, unnamed_file: UnnamedFile, name: EntryName, runs: tuple[Run, ...]) -> bool:
        is_new = unnamed_file.try_link(name.hex())
        if not is_new:
            self._give_back(runs)
        return is_new

    def _free_late(self, generation: int, fd: int) -> None:
        """The last reader of a removed entry frees its extents, if they are its still."""
        pool = self._pool

        def free() -> None:
            if pool is not None and pool.generation == generation:
                free_unless_read(fd, pool)

        with suppress(StoreError):
            self._capacity.under_lock(free)

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
            if self._pool is not None and self._is_pooled(body_bytes(status)):
                self._unlink_pooled(name, self._pool)
            else:
                os.unlink(name.hex(), dir_fd=self._fd)
        except OSError:
            return 0
        return self._compute_cost(body_bytes(status))

    def _unlink_pooled(self, name: EntryName, pool: BodyPool) -> None:
        try:
            fd = os.open(name.hex(), _OPEN | os.O_RDWR, dir_fd=self._fd)
        except OSError:
            os.unlink(name.hex(), dir_fd=self._fd)
            raise
        try:
            os.unlink(name.hex(), dir_fd=self._fd)
            free_unless_read(fd, pool)
        finally:
            os.close(fd)

    def _count(self) -> int:
        if self._pool is not None:
            self._pool.rebuild(self._iter_runs())
        return sum(entry.num_bytes for entry in self._iter_entries())

    def _iter_runs(self) -> Iterator[Run]:
        """The extents of all entries."""
        names = [name for name, status in self._iter_files() if self._is_pooled(body_bytes(status))]
        for name in names:
            with suppress(OSError):
                fd = os.open(name.hex(), _OPEN | os.O_RDONLY, dir_fd=self._fd)
                try:
                    yield from read_runs(fd) or ()
                finally:
                    os.close(fd)

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
            yield StoredEntry(name, self._compute_cost(body_bytes(status)), status.st_mtime)

    def _iter_files(self) -> Iterator[tuple[EntryName, os.stat_result]]:
        with os.scandir(self._fd) as found:
            for entry in found:
                if _ENTRY.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield EntryName(bytes.fromhex(entry.name)), status


def _do_nothing() -> None:
    """What is damaged stays."""


def compute_cost(body_bytes: int) -> int:
    """Bytes that an entry takes up whose body lies in its file."""
    return -(-(HEADER_BYTES + body_bytes) // ALLOCATION_BYTES) * ALLOCATION_BYTES


def compute_pooled_cost(body_bytes: int) -> int:
    """The same of an entry whose body lies in the pool: its file has one block."""
    return ALLOCATION_BYTES + count_extents(body_bytes) * EXTENT_BYTES


def body_bytes(status: os.stat_result) -> int:
    """Of an entry's file: it is as long as header and body, wherever the body lies."""
    return status.st_size - HEADER_BYTES
