"""Large files written past the page cache (O_DIRECT), several pieces at once.

    body ──copy and tag──► slot of the arena ──pwrite by a thread──► disk

O_DIRECT needs aligned memory, which bodies mostly are not: they go through an arena of page-aligned
slots. The copy overlaps with the disk's work on the other slots.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from baton.errors import StoreError
from baton.store.entry_format import HEADER_BYTES, MAGIC
from baton.store.request_threads import RequestThreads
from baton.transfer.huge_pages import advise_huge_pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from baton.store.entry_format import BodySeal
    from baton.store.interface import Body

ALIGNMENT_BYTES: Final = 4096
"""Of memory, offsets and lengths: no common disk needs more."""
PIECE_BYTES: Final = (1 << 20) + ALIGNMENT_BYTES
"""A body of n MiB, with its header, is n pieces."""
NUM_SLOTS: Final = 6
NUM_THREADS: Final = 6
"""Each writes a piece, or waits until a file is on the disk."""
STOP_TIMEOUT_S: Final = 5.0
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})
"""Of O_DIRECT, or of the unnamed file with which it is tried."""


@dataclass(frozen=True, slots=True)
class DiskReport:
    """Where a tier is, or will be; whether files go past the page cache if they can, and can."""

    place: Path
    is_wanted: bool
    is_possible: bool


@runtime_checkable
class ReportsDisk(Protocol):
    """What the factory of a tier on a disk can do besides (`baton doctor`)."""

    def report_disk(self) -> DiskReport:
        """Try its folder, or where it will be made. Nothing stays there.

        Raises:
            StoreError: it cannot be opened.
        """
        ...


def try_direct(folder: int) -> bool:
    """Whether files of this folder can be written past the page cache with our alignment.

    Where that cannot be found out (a full disk), it is taken for possible.
    """
    try:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        fd = os.open(".", flags, 0o600, dir_fd=folder)
    except OSError as exc:
        return exc.errno not in _REFUSED
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
            os.pwrite(fd, block, 0)
    except OSError as exc:
        return exc.errno not in _REFUSED
    finally:
        os.close(fd)
    return True


class DirectWrite:
    """One file that is being written. Its pieces are written by several threads at once."""

    def __init__(self, fd: int, num_pieces: int, *, is_durable: bool) -> None:
        self.pieces: list[Future[None]] = []
        self._fd, self._is_durable = fd, is_durable
        self._num_left = num_pieces
        self._lock = threading.Lock()

    def write(self, piece: NDArray[np.uint8], at: int, on_written: Callable[[], None]) -> None:
        """Write a piece; who writes the last one waits for the disk. By any thread.

        Raises:
            OSError: the disk is full, or fails.
        """
        try:
            write_piece(self._fd, piece, at)
        finally:
            on_written()
        with self._lock:
            self._num_left -= 1
            is_last = self._num_left == 0
        if is_last and self._is_durable:
            os.fdatasync(self._fd)

    def finish(self) -> None:
        """Wait until the file is written, and on the disk where it is to be durable.

        Raises:
            OSError: the disk is full, or fails.
        """
        for piece in self.pieces:
            piece.result()

    def settle(self) -> None:
        """Wait until no thread uses the open file, whatever became of it."""
        wait(self.pieces)


class DirectFiles:
    """One owner thread. The arena and the threads are made for the first file that needs them.

    A disk that does not answer is waited for, as with any system call.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """`piece_bytes`, a multiple of `ALIGNMENT_BYTES`: written by one system call."""
        self._piece_bytes = piece_bytes
        self._arena: mmap.mmap | None = None
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._threads = RequestThreads("baton-store-disk", NUM_THREADS)

    def begin(self, fd: int, body: Body, seal: BodySeal, *, is_durable: bool) -> DirectWrite:
        """Write header and body into a file that was opened with O_DIRECT.

        Zeros follow up to a multiple of `ALIGNMENT_BYTES`: so long the file must be, with all of
        its blocks, so that pieces need no lock of its length. The body is not needed any more then;
        the file must stay open until `DirectWrite.settle`. The header has the body's tag: the
        first piece is written last.

        Raises:
            OSError: the disk is full, or fails.
            StoreError: no thread can be started.
        """
        source = np.frombuffer(body, np.uint8)
        in_first = min(len(source), self._piece_bytes - HEADER_BYTES)
        starts = range(in_first, len(source), self._piece_bytes)
        write = DirectWrite(fd, 1 + len(starts), is_durable=is_durable)
        first = self._take_slot()
        is_given = False
        try:
            filled = _fill(first, source[:in_first], seal, HEADER_BYTES)
            for at in starts:
                slot = self._take_slot()
                piece = _fill(slot, source[at : at + self._piece_bytes], seal)
                self._submit(write, slot, piece, HEADER_BYTES + at)
            first[:HEADER_BYTES] = np.frombuffer(seal.make_header(MAGIC), np.uint8)
            is_given = True
            self._submit(write, first, filled, 0)
        except BaseException:
            write.settle()
            if not is_given:
                self._free.put(first)
            raise
        return write

    def close(self) -> None:
        """End the threads and free the arena. Idempotent."""
        self._threads.stop(STOP_TIMEOUT_S)
        self._free = queue.SimpleQueue()
        arena, self._arena = self._arena, None
        if arena is not None:
            with suppress(BufferError):  # a thread that does not end still has a slot of it
                arena.close()

    def _submit(
        self, write: DirectWrite, slot: NDArray[np.uint8], piece: NDArray[np.uint8], at: int
    ) -> None:
        on_written = partial(self._free.put, slot)
        try:
            future = self._threads.submit(partial(write.write, piece, at, on_written))
        except StoreError:
            on_written()
            raise
        write.pieces.append(future)

    def _take_slot(self) -> NDArray[np.uint8]:
        """A free slot, once there is one: a write that hangs is waited for."""
        if self._arena is None:
            self._arena = mmap.mmap(-1, NUM_SLOTS * self._piece_bytes)
            advise_huge_pages(self._arena)  # a disk's request has a bounded number of pages
            whole = np.frombuffer(self._arena, np.uint8)
            for slot in whole.reshape(NUM_SLOTS, self._piece_bytes):
                self._free.put(slot)
        return self._free.get()


def align(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _fill(
    slot: NDArray[np.uint8], piece: NDArray[np.uint8], seal: BodySeal, at: int = 0
) -> NDArray[np.uint8]:
    """Copy a piece of a body into a slot, with zeros behind it; the part of the slot to write."""
    seal.add(piece.data)  # which brings it into the cache, from which it is copied
    stop = at + len(piece)
    slot[at:stop] = piece
    filled = slot[: align(stop)]
    filled[stop:] = 0
    return filled


def write_piece(fd: int, piece: NDArray[np.uint8], at: int) -> None:
    """Write an aligned piece of a file.

    Raises:
        OSError: the disk is full, or fails.
    """
    while len(piece):
        num_written = os.pwrite(fd, piece.data, at)
        if num_written % ALIGNMENT_BYTES or num_written == 0:
            raise OSError(errno.EIO, f"the disk took {num_written} of {len(piece)} bytes")
        piece, at = piece[num_written:], at + num_written
