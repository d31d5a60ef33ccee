"""Files of entries that make room, kept until the put that needs the room writes into them.

    removed entry ──rename──► new-… (locked) ──written, flushed──► linked under the new entry's name

A new file costs a filesystem its blocks, and a commit of its journal with the flush. A file that
was written before has its blocks: a flush of it is the disk's alone.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.store.folder.directory import (
    FILE_MODE,
    adopt_unfinished,
    make_unfinished_name,
    remove_if_there,
    try_lock_alone,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from baton.store.folder.directory import UnnamedFile

_OPEN: Final = os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
STATUS_BLOCK_BYTES: Final = 512
"""Unit of `st_blocks`."""


class SpareFiles:
    """One owner thread. `remove` is called under the lock of the folder's counts.

    A reader holds a shared lock (flock) on the file that it reads: such a file is not kept.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._wanted: Counter[int] = Counter()
        self._files: dict[int, list[tuple[int, str]]] = {}

    @property
    def num_bytes(self) -> int:
        """Of the files that are kept."""
        return sum(size * len(files) for size, files in self._files.items())

    def want(self, sizes: Sequence[int]) -> None:
        """Keep files of these sizes from now on, as many as there are of each."""
        self._wanted = Counter(sizes)

    def remove(self, name: str) -> bool:
        """Take away an entry's name; whether its file is kept.

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        fd = self._try_open(name) if self._wanted.total() else None
        if fd is None:
            os.unlink(name, dir_fd=self._folder)
            return False
        unfinished = make_unfinished_name()
        try:
            os.rename(name, unfinished, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.close(fd)
            raise
        # Locked after it was renamed: who opens the entry meanwhile finds that it has no name.
        size = _try_own(fd)
        if size is None:
            os.close(fd)
            remove_if_there(self._folder, unfinished)
            return False
        self._wanted[size] -= 1
        self._files.setdefault(size, []).append((fd, unfinished))
        return True

    def try_take(self, size: int, stack: ExitStack) -> UnnamedFile | None:
        """A file of so many bytes, to be written anew; `stack` closes it. None: there is none."""
        files = self._files.get(size)
        return adopt_unfinished(self._folder, *files.pop(), stack) if files else None

    def drop(self) -> None:
        """Remove the files that were not taken, and keep no more. Idempotent."""
        self._wanted.clear()
        files, self._files = self._files, {}
        for fd, unfinished in (each for of_size in files.values() for each in of_size):
            with suppress(OSError):  # the next process that opens the folder removes it
                remove_if_there(self._folder, unfinished)
            os.close(fd)

    def _try_open(self, name: str) -> int | None:
        """An entry's file, if it is of a wanted size, and like a file that a put has written."""
        try:
            fd = os.open(name, _OPEN, dir_fd=self._folder)
        except OSError:
            return None
        if self._is_wanted(fd):
            return fd
        os.close(fd)
        return None

    def _is_wanted(self, fd: int) -> bool:
        try:
            status = os.fstat(fd)
        except OSError:
            return False
        is_whole = status.st_blocks * STATUS_BLOCK_BYTES >= status.st_size
        is_ours = status.st_mode == stat.S_IFREG | FILE_MODE and status.st_nlink == 1
        return is_whole and is_ours and self._wanted[status.st_size] > 0


def _try_own(fd: int) -> int | None:
    """Lock a file; its size. None: somebody reads it, or took it for a dead writer's."""
    try:
        status = os.fstat(fd) if try_lock_alone(fd) else None
    except OSError:
        return None
    return status.st_size if status is not None and status.st_nlink == 1 else None
