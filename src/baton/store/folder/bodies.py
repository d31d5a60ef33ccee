"""Where the bodies of a folder's entries lie: in the entry's file, or, large ones, in its pool.

Files are written by way of the page cache, or, large ones on a disk, past it.

An entry's file is as long as header and body together, wherever the body lies; what was written
past the page cache has zeros behind that, up to a multiple of 4,096 bytes.
"""

from __future__ import annotations

import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from baton.errors import StoreError
from baton.store.entry_format import (
    HEADER_BYTES,
    POOLED_MAGIC,
    BodyCheck,
    BodySeal,
    make_header,
    parse_header,
    read_header,
)
from baton.store.folder.body_pool import (
    COPIED_IN_BYTES,
    EXTENT_BYTES,
    copy_in,
    count_extents,
    pack_runs,
    split_runs,
)
from baton.store.folder.directory import open_unnamed, to_store_error, write_all
from baton.store.folder.leases import (
    FileEntryLease,
    PooledBody,
    PooledEntryLease,
    free_unless_read,
    read_runs,
    try_share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import ExitStack

    from baton.store.folder.body_pool import BodyPool, Run
    from baton.store.folder.directory import UnnamedFile
    from baton.store.folder.leases import ReadFaults
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import Body, EntryName, TenantLabel

_T = TypeVar("_T")

ALLOCATION_BYTES: Final = 4096
"""What a filesystem gives a file at least."""
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not blocking: a pipe in the place of an entry would wait for a writer."""


def compute_cost(num_bytes: int) -> int:
    """Bytes that an entry takes up whose body lies in its file."""
    return -(-(HEADER_BYTES + num_bytes) // ALLOCATION_BYTES) * ALLOCATION_BYTES


def compute_pooled_cost(num_bytes: int) -> int:
    """The same where the body lies in the pool: the file has one block."""
    return ALLOCATION_BYTES + count_extents(num_bytes) * EXTENT_BYTES


def count_body_bytes(status: os.stat_result) -> int:
    """Of an entry's file."""
    return status.st_size - HEADER_BYTES


def open_unnoticed(name: str, folder: int) -> int:
    """Open an entry's file without a change of its access time, where that is allowed.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    try:
        return os.open(name, _OPEN | os.O_NOATIME, dir_fd=folder)
    except PermissionError:  # a server maps the owner to another one
        return os.open(name, _OPEN, dir_fd=folder)


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry that is about to be written. `whole_bytes`: see `EntryHeader`."""

    name: EntryName
    body: Body
    whole_bytes: int = 0


class FileBodies:
    """Bodies in their entries' files. One owner thread.

    To put some: `try_take`, `write`, then `settle`; before that `give_back` for those that are not
    kept.
    """

    def __init__(self, folder: int, key: bytes, min_durable_bytes: float = math.inf) -> None:
        """Entries with bodies of `min_durable_bytes` or more are on the disk before they are named.

        Of others, what a power cut tears is found by its tag.
        """
        self._folder, self._key, self._min_durable_bytes = folder, key, min_durable_bytes

    def compute_cost(self, num_bytes: int) -> int:
        """Bytes that an entry with such a body takes up."""
        return compute_cost(num_bytes)

    def try_take(self, sizes: Sequence[int]) -> bool:  # noqa: ARG002 - a file's is its filesystem's
        """Take memory for bodies of these sizes, under the capacity's lock; False: too little."""
        return True

    def want_spares(self, sizes: Sequence[int]) -> bool:  # noqa: ARG002 - a new file for each
        """Keep files of entries that are removed now, for bodies of these sizes.

        Until `settle` or `drop_spares`. Whether there are bodies that could use some.
        """
        return False

    @property
    def spare_bytes(self) -> int:
        """What files that are kept so take up."""
        return 0

    def drop_spares(self) -> None:
        """Remove these files. Idempotent."""

    def write(
        self, entries: Sequence[NewEntry], tenant: TenantLabel, stack: ExitStack
    ) -> list[UnnamedFile | StoreError]:
        """Of each entry its file, complete but for its name, or why there is none.

        The entries are those that memory was taken for. `stack` closes the files.
        """
        begun = [
            _attempt(partial(self._begin, index, entry, tenant, stack))
            for index, entry in enumerate(entries)
        ]
        return [each if isinstance(each, StoreError) else _attempt(each) for each in begun]

    def _begin(
        self,
        index: int,  # noqa: ARG002 - where memory was taken
        entry: NewEntry,
        tenant: TenantLabel,
        stack: ExitStack,
    ) -> Callable[[], UnnamedFile]:
        """Begin to write the entry number `index` of those that memory was taken for.

        Returns what completes its file, and raises as this method does.

        Raises:
            OSError: its file cannot be written.
            StoreError: its memory cannot be used.
        """
        header = make_header(
            self._key, entry.name, entry.body, tenant=tenant, whole_bytes=entry.whole_bytes
        )
        file = open_unnamed(self._folder, stack)
        write_all(file.fd, (header, entry.body))

        def complete() -> UnnamedFile:
            if self._is_durable(entry.body):
                file.make_durable()
            return file

        return complete

    def _is_durable(self, body: Body) -> bool:
        return len(body) >= self._min_durable_bytes

    def _begin_seal(self, entry: NewEntry, tenant: TenantLabel) -> BodySeal:
        return BodySeal(
            self._key, entry.name, len(entry.body), tenant=tenant, whole_bytes=entry.whole_bytes
        )

    def give_back(self, index: int) -> None:
        """The entry of this number is not kept. With or without the capacity's lock.

        Raises:
            StoreError: its memory cannot be given back. `recount` frees it.
        """

    def settle(self) -> None:
        """The bodies that memory was taken for have their names, or were given back."""

    def try_lease(self, fd: int, name: EntryName, faults: ReadFaults) -> FileEntryLease | None:
        """A lease, which owns the open file `fd` then.

        None: it is damaged, or no entry; or it was removed, and has no name any more.

        Raises:
            BlockingIOError: it is locked.
            OSError: it cannot be read.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        # What was written past the page cache may be written again once it is removed: the lock
        # prevents that while it is read. Its length is such a multiple.
        if status.st_size % ALLOCATION_BYTES == 0 and not try_share(fd):
            return None
        header = parse_header(os.pread(fd, HEADER_BYTES, 0))
        if header is None or header.name != name:
            return None
        # What was written past the page cache ends with zeros.
        if status.st_size not in {
            HEADER_BYTES + header.num_bytes,
            self.compute_cost(header.num_bytes),
        }:
            return None
        begin_check = partial(BodyCheck, self._key, header)
        return self._choose_lease(header.num_bytes)(fd, header, begin_check, faults)

    def _choose_lease(self, num_bytes: int) -> type[FileEntryLease]:  # noqa: ARG002 - direct ones
        return FileEntryLease

    def unlink(self, name: EntryName, num_bytes: int) -> bool:  # noqa: ARG002 - goes with the file
        """Remove an entry, under the capacity's lock; whether its file is kept (`want_spares`).

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        os.unlink(name.hex(), dir_fd=self._folder)
        return False

    def recount(self, entries: Iterable[tuple[EntryName, int]]) -> None:
        """Free what is no entry's, under the lock. `entries`: names, and bytes of bodies."""

    def close(self) -> None:
        """Close what was opened for bodies. Idempotent."""


class PooledBodies(FileBodies):
    """The same, but large bodies lie in a pool."""

    def __init__(self, folder: int, key: bytes, pool: BodyPool, lock: SharedCapacity) -> None:
        super().__init__(folder, key)
        self._pool, self._lock = pool, lock
        self._taken: Sequence[tuple[Run, ...]] = ()

    def compute_cost(self, num_bytes: int) -> int:
        return compute_pooled_cost(num_bytes) if self._holds(num_bytes) else compute_cost(num_bytes)

    def try_take(self, sizes: Sequence[int]) -> bool:
        self._taken = ()  # of bodies whose place could not be counted: `rebuild` frees it
        counts = [count_extents(size) if self._holds(size) else 0 for size in sizes]
        if not any(counts):
            return True
        runs = self._pool.take(sum(counts))
        self._taken = split_runs(runs or (), counts if runs else ())
        return runs is not None

    def _begin(
        self, index: int, entry: NewEntry, tenant: TenantLabel, stack: ExitStack
    ) -> Callable[[], UnnamedFile]:
        """See `FileBodies`. The file is made once the bodies of all entries are copied."""
        runs = self._taken[index] if self._taken else ()
        if not runs:
            return super()._begin(index, entry, tenant, stack)
        seal, num_bytes = self._begin_seal(entry, tenant), len(entry.body)
        views = self._pool.views(runs, num_bytes, COPIED_IN_BYTES)
        for piece in copy_in(views, entry.body):
            seal.add(piece.data)

        def complete() -> UnnamedFile:
            file = open_unnamed(self._folder, stack)
            head = seal.make_header(POOLED_MAGIC) + pack_runs(runs)
            write_all(file.fd, (head,), HEADER_BYTES + num_bytes)
            return file

        return complete

    def give_back(self, index: int) -> None:
        if self._taken:
            self._pool.give_back(self._taken[index])

    def settle(self) -> None:
        if self._taken:
            self._taken = ()
            self._pool.end_claim()

    def try_lease(self, fd: int, name: EntryName, faults: ReadFaults) -> FileEntryLease | None:
        status = os.fstat(fd)
        num_bytes = count_body_bytes(status)
        if not stat.S_ISREG(status.st_mode) or not self._holds(num_bytes):
            return super().try_lease(fd, name, faults)
        generation = self._pool.generation  # before: it may be removed, and rebuilt, after it
        if not try_share(fd):
            return None
        raw = os.pread(fd, HEADER_BYTES, 0)
        header, runs = read_header(name, raw, status.st_size, POOLED_MAGIC), read_runs(fd)
        if header is None or runs is None:
            return None
        begin_check = partial(BodyCheck, self._key, header)
        body = PooledBody(self._pool, runs, partial(self._free_late, generation))
        return PooledEntryLease(fd, header, begin_check, faults, body)

    def unlink(self, name: EntryName, num_bytes: int) -> bool:
        if not self._holds(num_bytes):
            return super().unlink(name, num_bytes)
        try:
            fd = open_unnoticed(name.hex(), self._folder)
        except OSError:
            return super().unlink(name, num_bytes)
        try:
            super().unlink(name, num_bytes)
            free_unless_read(fd, self._pool)
        finally:
            os.close(fd)
        return False

    def recount(self, entries: Iterable[tuple[EntryName, int]]) -> None:
        self._pool.rebuild(self._iter_runs(name for name, size in entries if self._holds(size)))

    def close(self) -> None:
        self._pool.close()

    def _holds(self, num_bytes: int) -> bool:
        return num_bytes >= self._pool.min_body_bytes

    def _free_late(self, generation: int, fd: int) -> None:
        """The last reader of a removed entry frees its extents, if they are its still."""

        def free() -> None:
            if self._pool.generation == generation:
                free_unless_read(fd, self._pool)

        with suppress(StoreError):
            self._lock.under_lock(free)

    def _iter_runs(self, names: Iterable[EntryName]) -> Iterator[Run]:
        for name in names:
            with suppress(OSError):
                fd = open_unnoticed(name.hex(), self._folder)
                try:
                    yield from read_runs(fd) or ()
                finally:
                    os.close(fd)


def _attempt(action: Callable[[], _T]) -> _T | StoreError:
    try:
        return action()
    except OSError as exc:
        return to_store_error(exc)
    except StoreError as exc:
        return exc
