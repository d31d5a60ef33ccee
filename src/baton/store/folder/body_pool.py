"""Memory for bodies, mapped once by every process that has a folder open: one file, in extents.

    take ──► extents marked as taken ──► bodies copied in ──► an entry's file names the extents
    give_back ◄── the entry's file is gone, and no process reads it

A file for each body costs the kernel's zeroing of new pages and a copy page by page. Here pages are
zeroed once, when the pool grows, and are huge pages where the kernel gives them.

A process that is killed leaves extents marked, at most until `rebuild`, which looks at all entries.
Bytes that are overwritten while they are read do not pass the reader's check: marks decide how well
the memory is used, never what is read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from baton.errors import StoreError, mapped
from baton.store.folder.directory import FILE_MODE, FilesystemFullError
from baton.transfer.huge_pages import fill_with_huge_pages, map_shared
from baton.transfer.streaming_copy import find_streaming_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.store.interface import Body

EXTENT_BYTES: Final = 16 << 10
MAX_RUNS: Final = 256
"""Runs of extents that a body may consist of: they have room in the first page of its file."""
GROWTH_BYTES: Final = 8 << 20
LEFT_PARTS: Final = 8
MAX_LEFT_BYTES: Final = 256 << 20
"""One part in so many of the filesystem, at most so much, is left to others. They map files there
(vLLM's, NCCL's) that have no memory yet, and are killed (SIGBUS) where they get none."""
PIECE_BYTES: Final = 1 << 20
"""Copied out and checked at once: calls do not count, and it fits the second cache of most CPUs."""
COPIED_IN_BYTES: Final = 2 << 20
"""Tagged and copied in at once: the C library copies shorter pieces more slowly, and what was
tagged is copied from the last cache."""
POOL_FILE: Final = "pool"
EXTENTS_FILE: Final = "extents"
CLAIM_PREFIX: Final = "claim-"
_FREE, _TAKEN = 0, 1
_COUNTS: Final = struct.Struct("<QQ")
_COUNT: Final = struct.Struct("<I")
_RUN: Final = struct.Struct("<II")
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Run(NamedTuple):
    """Extents that lie side by side."""

    first: int
    num_extents: int

    @property
    def stop(self) -> int:
        """The extent behind the last one."""
        return self.first + self.num_extents


def count_extents(num_bytes: int) -> int:
    """Extents that a body takes up."""
    return -(-num_bytes // EXTENT_BYTES)


def pack_runs(runs: Sequence[Run]) -> bytes:
    """Runs as an entry's file, or a claim, has them."""
    return _COUNT.pack(len(runs)) + b"".join(_RUN.pack(*run) for run in runs)


def unpack_runs(packed: bytes) -> tuple[Run, ...] | None:
    """The runs; None where the bytes are no list of runs. What follows the last one is ignored."""
    if len(packed) < _COUNT.size:
        return None
    (num_runs,) = _COUNT.unpack_from(packed)
    stop = _COUNT.size + num_runs * _RUN.size
    if num_runs > MAX_RUNS or stop > len(packed):
        return None
    return tuple(Run(*pair) for pair in _RUN.iter_unpack(packed[_COUNT.size : stop]))


def split_runs(runs: Iterable[Run], counts: Iterable[int]) -> list[tuple[Run, ...]]:
    """Divide runs into so many extents each, in order. `counts` add up to those of the runs."""
    rest, parts = deque(runs), []
    for count in counts:
        part: list[Run] = []
        missing = count
        while missing:
            run = rest.popleft()
            part.append(Run(run.first, min(run.num_extents, missing)))
            missing -= part[-1].num_extents
            if part[-1].stop < run.stop:
                rest.appendleft(Run(part[-1].stop, run.stop - part[-1].stop))
        parts.append(tuple(part))
    return parts


MAX_PACKED_BYTES: Final = _COUNT.size + MAX_RUNS * _RUN.size


class BodyPool:
    """The extents of one folder, as one process uses them. One owner thread.

    `take` and `rebuild` are called under the lock of the folder's capacity, and `give_back`, too,
    but for what this process claims; the rest without. Files are made when the first body is put.
    """

    def __init__(self, folder: int, capacity_bytes: int, min_body_bytes: int) -> None:
        """`min_body_bytes`, at least `MAX_PACKED_BYTES`: smaller bodies do not go into the pool."""
        self._folder, self.min_body_bytes = folder, min_body_bytes
        self._num_extents = capacity_bytes // EXTENT_BYTES
        self._pool_fd = self._extents_fd = self._claim_fd = -1
        self._claim_name = ""
        self._memory: mmap.mmap | None = None
        self._extents: mmap.mmap | None = None
        self._states: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._hint = 0

    def take(self, num_extents: int) -> tuple[Run, ...] | None:
        """Mark free extents as taken, and claim them for this process; None: there are too few.

        Raises:
            FilesystemFullError: the filesystem has no room for more of the pool.
            StoreError: the pool's files cannot be used.
        """
        with mapped({OSError: StoreError}):
            self._open()
            self._begin_anew_if_cut()
            num_backed, _ = self._read_counts()
            runs = self._find_free(num_extents, num_backed)
            if runs is None:
                num_backed = self._grow(num_backed, num_extents)
                runs = self._find_free(num_extents, num_backed)
            if runs is None:
                return None
            self._claim(runs)
            self._mark(runs, _TAKEN)
        self._hint = runs[-1].stop
        return runs

    def end_claim(self) -> None:
        """What was taken is in an entry's file now, or was given back."""
        with suppress(OSError):
            self._claim(())

    def give_back(self, runs: Iterable[Run]) -> None:
        """Mark extents as free.

        What this process claims no other one takes or frees meanwhile; a `rebuild` that has just
        read the claim may mark it again, until the next one.
        """
        with mapped({OSError: StoreError}):
            self._open()
            self._mark([run for run in runs if run.stop <= len(self._states)], _FREE)

    def rebuild(self, kept: Iterable[Run]) -> None:
        """Free what neither an entry has (`kept`) nor a living process is about to give to one."""
        with mapped({OSError: StoreError}):
            if not self._open_if_there():
                return
            states = np.full_like(self._states, _FREE)
            for run in (*kept, *self._living_claims()):
                states[run.first : run.stop] = _TAKEN
            num_backed, generation = self._read_counts()
            self._write_counts(num_backed, generation + 1)
            # What an entry has is taken before and after: a kill within the copy frees none of it.
            self._states[:] = states

    @property
    def generation(self) -> int:
        """Grows with each `rebuild`: who holds extents since before owns nothing any more."""
        return self._read_counts()[1]

    def views(
        self, runs: Sequence[Run], num_bytes: int, max_piece_bytes: int = PIECE_BYTES
    ) -> Iterator[NDArray[np.uint8]]:
        """The body's bytes, uint8, in pieces of at most so many bytes, in order. Writable.

        Raises:
            StoreError: the extents are not this pool's, or are not as many as the body needs.
        """
        memory = self._map(max((run.stop for run in runs), default=0))
        if sum(run.num_extents for run in runs) != count_extents(num_bytes):
            raise StoreError("an entry's extents are not as many as its bytes need")
        for run in runs:
            at, stop = run.first * EXTENT_BYTES, run.stop * EXTENT_BYTES
            stop = min(stop, at + num_bytes)
            num_bytes -= stop - at
            while at < stop:
                piece_bytes = min(max_piece_bytes, stop - at)
                yield np.frombuffer(memory, np.uint8, piece_bytes, at)
                at += piece_bytes

    def close(self) -> None:
        """Close the files; the last process to leave removes them with the folder. Idempotent."""
        self._states = np.empty(0, np.uint8)
        mappings = self._memory, self._extents
        self._memory = self._extents = None
        for mapping in mappings:
            if mapping is not None:
                with suppress(BufferError):  # somebody still views it: it goes with the last view
                    mapping.close()
        if self._claim_fd >= 0:
            with suppress(OSError):
                os.unlink(self._claim_name, dir_fd=self._folder)
        for fd in (self._pool_fd, self._extents_fd, self._claim_fd):
            if fd >= 0:
                os.close(fd)
        self._pool_fd = self._extents_fd = self._claim_fd = -1

    def _open_if_there(self) -> bool:
        if self._extents_fd >= 0:
            return True
        try:
            os.stat(EXTENTS_FILE, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        self._open()
        return True

    def _open(self) -> None:
        """Open both files and look at as many extents as the largest user has made of them."""
        if self._extents_fd < 0:
            self._pool_fd = os.open(POOL_FILE, _CREATE, FILE_MODE, dir_fd=self._folder)
            self._extents_fd = os.open(EXTENTS_FILE, _CREATE, FILE_MODE, dir_fd=self._folder)
        num_bytes = os.fstat(self._extents_fd).st_size
        num_known = max(0, num_bytes - _COUNTS.size)
        if num_known < self._num_extents:
            num_known = self._num_extents
            os.ftruncate(self._pool_fd, num_known * EXTENT_BYTES)
            # Not made longer before it has memory: who maps a hole of a full filesystem is killed.
            os.posix_fallocate(self._extents_fd, 0, _COUNTS.size + num_known)
        if num_known != len(self._states):
            self._extents = mmap.mmap(self._extents_fd, _COUNTS.size + num_known)
            self._states = np.frombuffer(self._extents, np.uint8, num_known, _COUNTS.size)

    def _begin_anew_if_cut(self) -> None:
        """A pool that is shorter than its extents: a removal of the folder was killed half way."""
        num_bytes = len(self._states) * EXTENT_BYTES
        if os.fstat(self._pool_fd).st_size < num_bytes:
            self._states[:] = _FREE
            self._write_counts(0, self._read_counts()[1] + 1)
            os.ftruncate(self._pool_fd, num_bytes)

    def _map(self, num_extents: int) -> mmap.mmap:
        """The pool's memory, at least so many extents of it."""
        num_bytes = num_extents * EXTENT_BYTES
        if self._memory is None or len(self._memory) < num_bytes:
            with mapped({OSError: StoreError}):
                there = os.fstat(self._pool_fd).st_size if self._open_if_there() else 0
                if there < num_bytes or there == 0:
                    raise StoreError("an entry's extents are not in the pool")
                self._memory = map_shared(self._pool_fd, there)
        return self._memory

    def _find_free(self, num_extents: int, num_backed: int) -> tuple[Run, ...] | None:
        """One run if there is one, the first behind the latest; else several."""
        if self._extents is None:
            return None
        wanted, begin, stop = bytes(num_extents), _COUNTS.size, _COUNTS.size + num_backed
        at = self._extents.find(wanted, begin + self._hint, stop)
        if at < 0:
            at = self._extents.find(wanted, begin, stop)
        if at >= 0:
            return (Run(at - begin, num_extents),)
        return _gather(find_runs(self._states[:num_backed]), num_extents)

    def _grow(self, num_backed: int, num_extents: int) -> int:
        """Allocate more of the pool's memory: one step, or what is needed; how much there is."""
        limit = min(self._num_extents, len(self._states))
        steps = (max(count_extents(GROWTH_BYTES), num_extents), num_extents)
        for step in steps:
            stop = min(limit, num_backed + step)
            if stop == num_backed:
                return num_backed
            if not self._leaves_room((stop - num_backed) * EXTENT_BYTES):
                continue
            try:
                self._back(num_backed, stop)
            except OSError:
                continue
            self._write_counts(stop, self._read_counts()[1])
            return stop
        raise FilesystemFullError("the filesystem of the store has no room for more of its memory")

    def _leaves_room(self, num_bytes: int) -> bool:
        """Whether the filesystem has so much, and what is left to others."""
        found = os.fstatvfs(self._pool_fd)
        left_bytes = min(MAX_LEFT_BYTES, found.f_blocks * found.f_frsize // LEFT_PARTS)
        is_bounded = found.f_blocks > 0
        return not is_bounded or found.f_bavail * found.f_frsize - num_bytes >= left_bytes

    def _back(self, first: int, stop: int) -> None:
        fill_with_huge_pages(self._pool_fd, stop * EXTENT_BYTES, first * EXTENT_BYTES)
        os.posix_fallocate(self._pool_fd, first * EXTENT_BYTES, (stop - first) * EXTENT_BYTES)

    def _mark(self, runs: Iterable[Run], state: int) -> None:
        for run in runs:
            self._states[run.first : run.stop] = state

    def _read_counts(self) -> tuple[int, int]:
        """Extents that have memory, the first ones; and the generation."""
        num_backed, generation = _COUNTS.unpack_from(self._extents) if self._extents else (0, 0)
        return min(num_backed, len(self._states)), generation

    def _write_counts(self, num_backed: int, generation: int) -> None:
        if self._extents is not None:
            _COUNTS.pack_into(self._extents, 0, num_backed, generation)

    def _claim(self, runs: Sequence[Run]) -> None:
        """Report what this process is about to give to an entry: a lock shows that it lives."""
        if self._claim_fd < 0:
            self._claim_name = f"{CLAIM_PREFIX}{secrets.token_hex(16)}"
            flags = _CREATE | os.O_EXCL
            self._claim_fd = os.open(self._claim_name, flags, FILE_MODE, dir_fd=self._folder)
            fcntl.flock(self._claim_fd, fcntl.LOCK_EX)
        os.pwrite(self._claim_fd, pack_runs(runs), 0)

    def _living_claims(self) -> list[Run]:
        """What living processes are about to give to entries; claims of dead ones are removed."""
        claimed: list[Run] = []
        for name in os.listdir(self._folder):  # noqa: PTH208 - a Path is no open folder
            if not name.startswith(CLAIM_PREFIX):
                continue
            try:
                fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            except FileNotFoundError:  # its process has just left
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._folder)
            except BlockingIOError:
                claimed += unpack_runs(os.pread(fd, MAX_PACKED_BYTES, 0)) or ()
            finally:
                os.close(fd)
        return claimed


def find_runs(states: NDArray[np.uint8]) -> list[Run]:
    """The free runs of a pool, in order. `states`: uint8 [extents], 0 where one is free."""
    is_free = np.concatenate(([False], states == _FREE, [False]))
    edges = np.flatnonzero(is_free[1:] != is_free[:-1])
    firsts, stops = edges[::2].tolist(), edges[1::2].tolist()
    return [Run(first, stop - first) for first, stop in zip(firsts, stops, strict=True)]


def _gather(runs: list[Run], num_extents: int) -> tuple[Run, ...] | None:
    """The largest of these runs that are enough together; None where they are too few, or small."""
    gathered: list[Run] = []
    for run in sorted(runs, key=lambda run: -run.num_extents)[:MAX_RUNS]:
        taken = Run(run.first, min(run.num_extents, num_extents))
        gathered.append(taken)
        num_extents -= taken.num_extents
        if num_extents == 0:
            return tuple(gathered)
    return None


def copy_in(views: Iterator[NDArray[np.uint8]], body: Body) -> Iterator[NDArray[np.uint8]]:
    """Copy a body into its extents: yields each piece of it, and copies it after that.

    What the caller does with a piece brings it into the cache, from which it is copied. The copy
    is not: who reads it will do so after much else.
    """
    source, copy = np.frombuffer(body, np.uint8), find_streaming_copy().copy
    at = 0
    for view in views:
        piece = source[at : at + len(view)]
        yield piece
        copy(view, piece)
        at += len(view)
