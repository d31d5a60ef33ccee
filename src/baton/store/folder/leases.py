"""Leases of a folder's entries, whose body lies in their file, or in the folder's pool."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from baton.errors import StoreError
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder.body_pool import MAX_PACKED_BYTES, Run, unpack_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.entry_format import BodyCheck, EntryHeader
    from baton.store.folder.body_pool import BodyPool
    from baton.store.interface import TenantLabel


PIECE_BYTES: Final = 128 << 10
FREED_MODE: Final = 0
"""Of the file of a removed entry whose extents are free."""


@dataclass(frozen=True, slots=True)
class ReadFaults:
    """What is called when an entry cannot be read: once for each attempt.

    `on_damage`: it is not what was put. `on_io_error`: the system refuses; it may be whole.
    """

    on_damage: Callable[[], None]
    on_io_error: Callable[[OSError], None]


@dataclass(slots=True, eq=False)
class FileEntryLease:
    """See `EntryLease`.

    The body is read, not mapped: what is verified is this process's own copy, which no process can
    change any more, and a file that is cut short is a short read, not a SIGBUS. It is verified
    piece by piece, while each is in the processor's cache: that costs nothing beside the copy.
    """

    fd: int
    header: EntryHeader
    begin_check: Callable[[], BodyCheck]
    faults: ReadFaults

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes

    @property
    def tenant(self) -> TenantLabel:
        return self.header.tenant

    def try_read(self, into: memoryview) -> bool:
        if self.fd < 0 or len(into) != self.num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self.num_bytes}, or released")
        check = self.begin_check()
        try:
            is_whole = self._read(into, check) and check.is_passed()
        except OSError as exc:
            self.faults.on_io_error(exc)
            return False
        if not is_whole:
            self.report_damage()
        return is_whole

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _read(self, into: memoryview, check: BodyCheck) -> bool:
        """Read the body; False where there is too little of it. Raises OSError."""
        at = 0
        while at < self.num_bytes:
            piece = into[at : at + PIECE_BYTES]
            num_read = os.preadv(self.fd, [piece], HEADER_BYTES + at)
            if num_read == 0:
                return False
            check.add(piece[:num_read])
            at += num_read
        return True

    def report_damage(self) -> None:
        self.faults.on_damage()

    def _close(self, fd: int) -> None:
        os.close(fd)


@dataclass(slots=True, eq=False)
class UncachedEntryLease(FileEntryLease):
    """See `EntryLease`: of a file whose pages do not stay in the page cache.

    It is read through it, for the kernel reads ahead: one thread that reads by O_DIRECT, and four,
    got half as much (ADR 39).
    """

    def _close(self, fd: int) -> None:
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@dataclass(frozen=True, slots=True)
class PooledBody:
    """Where a body lies, and what frees it: called with the file of an entry that was removed."""

    pool: BodyPool
    runs: tuple[Run, ...]
    free: Callable[[int], None]


@dataclass(slots=True, eq=False)
class PooledEntryLease(FileEntryLease):
    """See `EntryLease`: of a body in the pool. Its file is locked (flock, shared) meanwhile.

    Whoever removes the entry leaves its extents to the last reader. What is verified is this
    process's own copy, here too: bytes that were overwritten meanwhile are a miss.
    """

    body: PooledBody

    def _read(self, into: memoryview, check: BodyCheck) -> bool:
        target = np.frombuffer(into, np.uint8)
        at = 0
        try:
            for view in self.body.pool.views(self.body.runs, self.num_bytes):
                piece = target[at : at + len(view)]
                piece[:] = view
                check.add(piece.data)
                at += len(view)
        except StoreError:
            return False
        return True

    def report_damage(self) -> None:
        if has_name(self.fd):
            self.faults.on_damage()

    def _close(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        if not has_name(fd):
            self.body.free(fd)
        os.close(fd)


def has_name(fd: int) -> bool:
    """Whether an entry was not removed yet; also where that cannot be found out."""
    try:
        return os.fstat(fd).st_nlink > 0
    except OSError:
        return True


def try_share(fd: int) -> bool:
    """Lock an entry's file as one of its readers; False where the entry was removed.

    Raises:
        BlockingIOError: who removes it, or looks whether its writer is dead, has it locked.
    """
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return os.fstat(fd).st_nlink > 0


def read_runs(fd: int) -> tuple[Run, ...] | None:
    """The extents of an entry, as its file has them; None where they make no sense.

    Raises:
        OSError: it cannot be read.
    """
    return unpack_runs(os.pread(fd, MAX_PACKED_BYTES, HEADER_BYTES))


def free_unless_read(fd: int, pool: BodyPool) -> None:
    """Free the extents of an entry whose name is gone, unless somebody still reads it.

    Under the capacity's lock. The file's mode shows afterwards that it has none.

    Raises:
        OSError: the file cannot be used.
        StoreError: the pool cannot.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if stat.S_IMODE(os.fstat(fd).st_mode) == FREED_MODE:
        return
    os.fchmod(fd, FREED_MODE)
    pool.give_back(read_runs(fd) or ())
