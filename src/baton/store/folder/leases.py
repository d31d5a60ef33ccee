"""Leases of a folder's entries, whose body lies in their file, or in the folder's pool."""

from __future__ import annotations

import fcntl
import os
import stat
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from baton.errors import StoreError
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder.body_pool import MAX_PACKED_BYTES, Run, unpack_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.entry_format import BodyCheck
    from baton.store.folder.body_pool import BodyPool
    from baton.store.folder.direct_files import DirectFiles


PIECE_BYTES: Final = 128 << 10
FREED_MODE: Final = 0
"""Of the file of a removed entry whose extents are free."""


@dataclass(slots=True, eq=False)
class FolderEntryLease(ABC):
    """See `EntryLease`. `on_damage` is called once, if the body turns out not to be what was put.

    The body is read, not mapped: what is verified is this process's own copy, which no process can
    change any more, and a file that is cut short is a short read, not a SIGBUS. It is verified
    piece by piece, while each is in the processor's cache: that costs nothing beside the copy.
    """

    fd: int
    num_bytes: int
    on_damage: Callable[[], None]

    def try_read(self, into: memoryview) -> bool:
        if self.fd < 0 or len(into) != self.num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self.num_bytes}, or released")
        if self._is_read(into):
            return True
        self._report_damage()
        return False

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @abstractmethod
    def _is_read(self, into: memoryview) -> bool:
        """Read the body; whether it is what was put."""

    def _report_damage(self) -> None:
        self.on_damage()

    def _close(self, fd: int) -> None:
        os.close(fd)


@dataclass(slots=True, eq=False)
class FileEntryLease(FolderEntryLease):
    """See `EntryLease`: of a file whose header was read already."""

    begin_check: Callable[[], BodyCheck]

    def _is_read(self, into: memoryview) -> bool:
        check = self.begin_check()
        return self._read(into, check) and check.is_passed()

    def _read(self, into: memoryview, check: BodyCheck) -> bool:
        at = 0
        while at < self.num_bytes:
            piece = into[at : at + PIECE_BYTES]
            try:
                num_read = os.preadv(self.fd, [piece], HEADER_BYTES + at)
            except OSError:
                return False
            if num_read == 0:
                return False
            check.add(piece[:num_read])
            at += num_read
        return True


@dataclass(slots=True, eq=False)
class DirectEntryLease(FolderEntryLease):
    """See `EntryLease`: of a file that is read past the page cache, its header together with it.

    `begin_check` is given the header; None: it is not that of this entry.
    """

    begin_check: Callable[[bytes], BodyCheck | None]
    files: DirectFiles

    def _is_read(self, into: memoryview) -> bool:
        target = np.frombuffer(into, np.uint8)
        check: BodyCheck | None = None
        at = 0
        try:
            with closing(self.files.read(self.fd, HEADER_BYTES + self.num_bytes)) as pieces:
                for piece in pieces:
                    body = piece
                    if check is None:
                        check = self.begin_check(piece[:HEADER_BYTES].tobytes())
                        body = piece[HEADER_BYTES:]
                    if check is None:
                        return False
                    target[at : at + len(body)] = body
                    check.add(target[at : at + len(body)].data)
                    at += len(body)
        except OSError:
            return False
        return check is not None and at == self.num_bytes and check.is_passed()


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

    def _report_damage(self) -> None:
        if has_name(self.fd):
            self.on_damage()

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
    """Lock an entry's file as one of its readers; False where the entry is being removed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
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
