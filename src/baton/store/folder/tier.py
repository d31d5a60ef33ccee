"""A tier in a folder: one file per entry, named by its hexadecimal digest."""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from baton.errors import ConfigError, StoreError, StoreFullError, mapped
from baton.store.capacity import StoredEntry, choose_victims
from baton.store.entry_format import HEADER_BYTES, BodyCheck, make_header, read_digest
from baton.store.folder.directory import remove_unfinished, write_unnamed
from baton.store.folder.shared_capacity import SharedCapacity
from baton.store.interface import EntryName, PutResult, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.store.folder.directory import Folder
    from baton.store.interface import Body, TierContext


PIECE_BYTES: Final = 128 << 10


class FileEntryLease:
    """See `EntryLease`. `on_damage` is called once, if the body turns out not to be what was put.

    The body is read, not mapped: what is verified is this process's own copy, which no process can
    change any more, and a file that is cut short is a short read, not a SIGBUS. It is verified
    piece by piece, while each is in the processor's cache: that costs nothing beside the copy.
    """

    def __init__(
        self,
        fd: int,
        num_bytes: int,
        begin_check: Callable[[], BodyCheck],
        on_damage: Callable[[], None],
    ) -> None:
        self._fd, self._num_bytes = fd, num_bytes
        self._begin_check, self._on_damage = begin_check, on_damage

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def try_read(self, into: memoryview) -> bool:
        if self._fd < 0 or len(into) != self._num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self._num_bytes}, or released")
        check = self._begin_check()
        if self._read(into, check) and check.is_passed():
            return True
        self._on_damage()
        return False

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _read(self, into: memoryview, check: BodyCheck) -> bool:
        at = 0
        while at < self._num_bytes:
            piece = into[at : at + PIECE_BYTES]
            try:
                num_read = os.preadv(self._fd, [piece], HEADER_BYTES + at)
            except OSError:
                return False
            if num_read == 0:
                return False
            check.add(piece[:num_read])
            at += num_read
        return True


logger = logging.getLogger(__name__)

ALLOCATION_BYTES: Final = 4096
"""What a filesystem gives a file at least."""
_MAX_ROUNDS: Final = 3
_ENTRY: Final = re.compile(r"[0-9a-f]{64}")
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not blocking: a pipe in the place of an entry would wait for a writer."""


class FolderTier:
    """See `Tier`. Other processes may have the same folder open, with the same capacity."""

    def __init__(self, folder: Folder, capacity_bytes: int, context: TierContext) -> None:
        """Take up work in a folder, which the caller closes; clean up after dead writers.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._folder, self._fd = folder, folder.fd
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
        cost = compute_cost(len(body))
        self._reserve(cost)
        try:
            header = make_header(self._key, name, body)
            with write_unnamed(self._fd, (header, body)) as unnamed_file:
                is_new = self._capacity.commit(cost, lambda: unnamed_file.try_link(name.hex()))
        except StoreError:
            self._capacity.release(cost)
            raise
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
            fd = os.open(name.hex(), _OPEN, dir_fd=self._fd)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            is_file = stat.S_ISREG(status.st_mode)
            header = os.pread(fd, HEADER_BYTES, 0) if is_file else b""
        except OSError:
            header, status = b"", None
        digest = None if status is None else read_digest(name, header, status.st_size)
        if digest is None or status is None:
            os.close(fd)
            on_damage()
            return None
        return FileEntryLease(
            fd,
            status.st_size - HEADER_BYTES,
            partial(BodyCheck, self._key, name, status.st_size - HEADER_BYTES, digest),
            on_damage,
        )

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
        self._capacity.close()

    def _reserve(self, cost: int) -> None:
        """Count an entry as kept, making room for it first.

        Raises:
            StoreFullError: it is too large, or others fill what is freed.
            StoreError: the entries cannot be counted.
        """
        if cost > self._capacity_bytes:
            raise StoreFullError(f"an entry of {cost} bytes where {self._capacity_bytes} fit")
        for _ in range(_MAX_ROUNDS):
            shortage = self._capacity.try_reserve(cost)
            if shortage == 0:
                return
            self._evict(shortage)
        raise StoreFullError(f"no room for {cost} bytes: others take what is freed")

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
            num_bytes = os.stat(name.hex(), dir_fd=self._fd, follow_symlinks=False).st_size
            os.unlink(name.hex(), dir_fd=self._fd)
        except OSError:
            return 0
        return compute_cost(num_bytes - HEADER_BYTES)

    def _count(self) -> int:
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
        with os.scandir(self._fd) as found:
            for entry in found:
                if not _ENTRY.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    cost = compute_cost(status.st_size - HEADER_BYTES)
                    name = EntryName(bytes.fromhex(entry.name))
                    yield StoredEntry(name, cost, status.st_mtime)


def _do_nothing() -> None:
    """What is damaged stays."""


def compute_cost(body_bytes: int) -> int:
    """Bytes that an entry takes up in a filesystem."""
    return -(-(HEADER_BYTES + body_bytes) // ALLOCATION_BYTES) * ALLOCATION_BYTES
