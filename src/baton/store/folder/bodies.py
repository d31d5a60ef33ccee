"""Where the bodies of a folder's entries lie: in the entry's file, or, large ones, in its pool.

Files are written by way of the page cache, or, large ones on a disk, past it.

An entry's file is as long as header and body together, wherever the body lies.
"""

from __future__ import annotations

import math
import os
import stat
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError
from baton.store.entry_format import (
    HEADER_BYTES,
    POOLED_MAGIC,
    BodyCheck,
    BodySeal,
    make_header,
    read_header,
)
from baton.store.folder.body_pool import EXTENT_BYTES, copy_in, count_extents, pack_runs
from baton.store.folder.directory import fill_unnamed, write_unnamed
from baton.store.folder.leases import (
    FileEntryLease,
    PooledBody,
    PooledEntryLease,
    UncachedEntryLease,
    free_unless_read,
    read_runs,
    try_share,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from contextlib import AbstractContextManager

    from baton.store.folder.body_pool import BodyPool, Run
    from baton.store.folder.direct_files import DirectFiles
    from baton.store.folder.directory import UnnamedFile
    from baton.store.folder.shared_capacity import SharedCapacity
    from baton.store.interface import Body, EntryName, TenantLabel

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


class FileBodies:
    """Bodies in their entries' files. One owner thread.

    To put one: `try_take`, `write`, then `settle`; `give_back` before that where it is not kept.
    """

    def __init__(self, folder: int, key: bytes, min_durable_bytes: float = math.inf) -> None:
        """Entries with bodies of `min_durable_bytes` or more are on the disk before they are named.

        Of others, what a power cut tears is found by its tag.
        """
        self._folder, self._key, self._min_durable_bytes = folder, key, min_durable_bytes

    def compute_cost(self, num_bytes: int) -> int:
        """Bytes that an entry with such a body takes up."""
        return compute_cost(num_bytes)

    def may_be_put_together(self, num_bytes: int) -> bool:  # noqa: ARG002 - of a pool they may not
        """Whether several bodies of up to so many bytes may be taken memory for at once."""
        return True

    def try_take(self, num_bytes: int) -> bool:  # noqa: ARG002 - a file's is its filesystem's
        """Take memory for a body, under the capacity's lock; False: there is too little."""
        return True

    @contextmanager
    def write(
        self, name: EntryName, body: Body, tenant: TenantLabel, whole_bytes: int
    ) -> Generator[UnnamedFile]:
        """The entry's file, complete but for its name; see `fill_unnamed` and `EntryHeader`."""
        with self._write(name, body, tenant, whole_bytes) as file:
            if len(body) >= self._min_durable_bytes:
                file.make_durable()
            yield file

    def _write(
        self, name: EntryName, body: Body, tenant: TenantLabel, whole_bytes: int
    ) -> AbstractContextManager[UnnamedFile]:
        header = make_header(self._key, name, body, tenant=tenant, whole_bytes=whole_bytes)
        return write_unnamed(self._folder, (header, body))

    def give_back(self) -> None:
        """Under the capacity's lock: the body that memory was taken for is not kept."""

    def settle(self) -> None:
        """The body that memory was taken for has its name, or was given back."""

    def try_lease(
        self, fd: int, name: EntryName, on_damage: Callable[[], None]
    ) -> FileEntryLease | None:
        """A lease, which owns the open file `fd` then.

        None: it is damaged, or no entry; or it was removed, and has no name any more.

        Raises:
            OSError: it cannot be read.
        """
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        header = read_header(name, os.pread(fd, HEADER_BYTES, 0), status.st_size)
        if header is None:
            return None
        begin_check = partial(BodyCheck, self._key, header)
        return self._choose_lease(header.num_bytes)(fd, header, begin_check, on_damage)

    def _choose_lease(self, num_bytes: int) -> type[FileEntryLease]:  # noqa: ARG002 - direct ones
        return FileEntryLease

    def unlink(self, name: EntryName, num_bytes: int) -> None:  # noqa: ARG002 - goes with the file
        """Remove an entry with a body of so many bytes, under the capacity's lock.

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        os.unlink(name.hex(), dir_fd=self._folder)

    def recount(self, entries: Iterable[tuple[EntryName, int]]) -> None:
        """Free what is no entry's, under the lock. `entries`: names, and bytes of bodies."""

    def close(self) -> None:
        """Close what was opened for bodies. Idempotent."""


class DirectBodies(FileBodies):
    """The same, but large bodies are written past the page cache, and do not stay in it."""

    def __init__(
        self,
        folder: int,
        key: bytes,
        files: DirectFiles,
        *,
        min_body_bytes: int,
        min_durable_bytes: float,
    ) -> None:
        """Bodies of `min_body_bytes` or more are large."""
        super().__init__(folder, key, min_durable_bytes)
        self._files, self._min_body_bytes = files, min_body_bytes

    def _write(
        self, name: EntryName, body: Body, tenant: TenantLabel, whole_bytes: int
    ) -> AbstractContextManager[UnnamedFile]:
        if len(body) < self._min_body_bytes:
            return super()._write(name, body, tenant, whole_bytes)
        seal = BodySeal(self._key, name, len(body), tenant=tenant, whole_bytes=whole_bytes)
        return fill_unnamed(self._folder, partial(self._files.write, body=body, seal=seal))

    def _choose_lease(self, num_bytes: int) -> type[FileEntryLease]:
        return UncachedEntryLease if num_bytes >= self._min_body_bytes else FileEntryLease

    def close(self) -> None:
        self._files.close()


class PooledBodies(FileBodies):
    """The same, but large bodies lie in a pool."""

    def __init__(self, folder: int, key: bytes, pool: BodyPool, lock: SharedCapacity) -> None:
        super().__init__(folder, key)
        self._pool, self._lock = pool, lock
        self._taken: tuple[Run, ...] = ()

    def compute_cost(self, num_bytes: int) -> int:
        return compute_pooled_cost(num_bytes) if self._holds(num_bytes) else compute_cost(num_bytes)

    def may_be_put_together(self, num_bytes: int) -> bool:
        return not self._holds(num_bytes)

    def try_take(self, num_bytes: int) -> bool:
        self._taken = ()  # of a body whose place could not be counted: `rebuild` frees it
        if not self._holds(num_bytes):
            return True
        runs = self._pool.take(count_extents(num_bytes))
        self._taken = runs or ()
        return runs is not None

    def _write(
        self, name: EntryName, body: Body, tenant: TenantLabel, whole_bytes: int
    ) -> AbstractContextManager[UnnamedFile]:
        if not self._taken:
            return super()._write(name, body, tenant, whole_bytes)
        seal = BodySeal(self._key, name, len(body), tenant=tenant, whole_bytes=whole_bytes)
        for piece in copy_in(self._pool.views(self._taken, len(body)), body):
            seal.add(piece.data)
        head = seal.make_header(POOLED_MAGIC) + pack_runs(self._taken)
        return write_unnamed(self._folder, (head,), HEADER_BYTES + len(body))

    def give_back(self) -> None:
        if self._taken:
            self._pool.give_back(self._taken)

    def settle(self) -> None:
        if self._taken:
            self._taken = ()
            self._pool.end_claim()

    def try_lease(
        self, fd: int, name: EntryName, on_damage: Callable[[], None]
    ) -> FileEntryLease | None:
        status = os.fstat(fd)
        num_bytes = count_body_bytes(status)
        if not stat.S_ISREG(status.st_mode) or not self._holds(num_bytes):
            return super().try_lease(fd, name, on_damage)
        if not try_share(fd):
            return None
        raw = os.pread(fd, HEADER_BYTES, 0)
        header, runs = read_header(name, raw, status.st_size, POOLED_MAGIC), read_runs(fd)
        if header is None or runs is None:
            return None
        begin_check = partial(BodyCheck, self._key, header)
        body = PooledBody(self._pool, runs, partial(self._free_late, self._pool.generation))
        return PooledEntryLease(fd, header, begin_check, on_damage, body)

    def unlink(self, name: EntryName, num_bytes: int) -> None:
        if not self._holds(num_bytes):
            super().unlink(name, num_bytes)
            return
        try:
            fd = open_unnoticed(name.hex(), self._folder)
        except OSError:
            super().unlink(name, num_bytes)
            return
        try:
            super().unlink(name, num_bytes)
            free_unless_read(fd, self._pool)
        finally:
            os.close(fd)

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
