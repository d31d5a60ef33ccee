"""Large files written past the page cache (O_DIRECT), several pieces at once.

    body ──copy and tag──► slot of the arena ──pwrite by a thread──► disk

O_DIRECT needs aligned memory, which bodies mostly are not: they go through an arena of page-aligned
slots. The copy overlaps with the disk's work on the other slots.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from baton.store.entry_format import HEADER_BYTES, MAGIC
from baton.store.request_threads import RequestThreads
from baton.transfer.huge_pages import advise_huge_pages

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from baton.store.entry_format import BodySeal
    from baton.store.interface import Body

ALIGNMENT_BYTES: Final = 4096
"""Of memory, offsets and lengths: no common disk needs more."""
PIECE_BYTES: Final = (1 << 20) + ALIGNMENT_BYTES
"""A body of n MiB, with its header, is n pieces."""
NUM_SLOTS: Final = 4
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
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as exc:
        return exc.errno not in _REFUSED
    try:
        set_direct(fd)
        with mmap.mmap(-1, ALIGNMENT_BYTES) as block:
            os.pwrite(fd, block, 0)
    except OSError as exc:
        return exc.errno not in _REFUSED
    finally:
        os.close(fd)
    return True


def set_direct(fd: int) -> None:
    """From here on writes of this open file bypass the page cache.

    Raises:
        OSError: the filesystem refuses.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


class DirectFiles:
    """One owner thread. The arena and the threads are made for the first file that needs them.

    A disk that does not answer is waited for, as with any system call.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """`piece_bytes`, a multiple of `ALIGNMENT_BYTES`: written by one system call."""
        self._piece_bytes = piece_bytes
        self._arena: mmap.mmap | None = None
        self._slots: list[NDArray[np.uint8]] = []
        self._threads = RequestThreads("baton-store-disk", NUM_SLOTS)

    def write(self, fd: int, body: Body, seal: BodySeal) -> None:
        """Fill an empty file with header and body, of `ALIGNMENT_BYTES` at least.

        The header has the body's tag: the first piece is written last.

        Raises:
            OSError: the disk is full, or fails.
        """
        num_bytes = HEADER_BYTES + len(body)
        source = np.frombuffer(body, np.uint8)
        source, tail = np.split(source, [num_bytes - num_bytes % ALIGNMENT_BYTES - HEADER_BYTES])
        os.posix_fallocate(fd, 0, num_bytes)
        if os.pwrite(fd, tail.data, num_bytes - len(tail)) < len(tail):  # less than O_DIRECT writes
            raise OSError(errno.EIO, "the disk did not take all of a block")
        set_direct(fd)
        first, *slots = self._open()
        pending: deque[Future[None]] = deque()
        in_first = min(len(source), self._piece_bytes - HEADER_BYTES)
        _fill(first[HEADER_BYTES:], source[:in_first], seal)
        try:
            for index, at in enumerate(range(in_first, len(source), self._piece_bytes)):
                slot = slots[index % len(slots)]
                if len(pending) == len(slots):
                    pending.popleft().result()
                filled = _fill(slot, source[at : at + self._piece_bytes], seal)
                pending.append(
                    self._threads.submit(partial(write_piece, fd, filled, HEADER_BYTES + at))
                )
            seal.add(tail.data)
            first[:HEADER_BYTES] = np.frombuffer(seal.make_header(MAGIC), np.uint8)
            write_piece(fd, first[: HEADER_BYTES + in_first], 0)
            for each in pending:
                each.result()
        finally:
            wait(pending)  # the slots, and the open file, are in use until then

    def close(self) -> None:
        """End the threads and free the arena. Idempotent."""
        self._threads.stop(STOP_TIMEOUT_S)
        self._slots.clear()
        arena, self._arena = self._arena, None
        if arena is not None:
            with suppress(BufferError):  # a thread that does not end still has a slot of it
                arena.close()

    def _open(self) -> list[NDArray[np.uint8]]:
        if self._arena is None:
            self._arena = mmap.mmap(-1, NUM_SLOTS * self._piece_bytes)
            advise_huge_pages(self._arena)  # a disk's request has a bounded number of pages
            whole = np.frombuffer(self._arena, np.uint8)
            self._slots = list(whole.reshape(NUM_SLOTS, self._piece_bytes))
        return self._slots


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _fill(slot: NDArray[np.uint8], piece: NDArray[np.uint8], seal: BodySeal) -> NDArray[np.uint8]:
    """Copy a piece of a body into a slot; the part of the slot that has it."""
    seal.add(piece.data)  # which brings it into the cache, from which it is copied
    filled = slot[: len(piece)]
    filled[:] = piece
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
