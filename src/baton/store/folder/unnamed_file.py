"""A file that appears under its name whole, or not at all, at whatever byte its writer is killed.

Written to a file without a name (O_TMPFILE), which ends with its writer, then linked. Where a
filesystem has no such files, to one with a name of its own, locked while its writer lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from baton.errors import StoreError, StoreFullError
from baton.store.folder.opening import FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from baton.store.interface import Body

UNFINISHED: Final = "new-"
"""Begins the names of files that are being written, where they must have one."""

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


class UnnamedFile:
    """A file that is complete and has no name yet."""

    def __init__(self, folder: int, source: str) -> None:
        self._folder, self._source = folder, source

    def try_link(self, name: str) -> bool:
        """Give it its name; False if another file has it.

        Raises:
            OSError: it cannot be linked.
        """
        try:
            os.link(self._source, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        return True


@contextmanager
def write_unnamed(folder: int, buffers: Iterable[Body]) -> Generator[UnnamedFile]:
    """A file of these bytes, for the length of a block; it stays if it was given a name.

    Raises:
        StoreFullError: the filesystem is full, or allows no file so large.
        StoreError: it cannot be written, or cannot be named.
    """
    try:
        with ExitStack() as stack:
            fd, source = _open(folder, stack)
            _write(fd, buffers)
            yield UnnamedFile(folder, source)
    except OSError as exc:
        kind = StoreFullError if exc.errno in _NO_ROOM else StoreError
        raise kind(f"cannot keep an entry: {exc.strerror}") from exc


def remove_unfinished(folder: int) -> int:
    """Remove what writers left that are dead; how many files."""
    num_removed = 0
    for name in os.listdir(folder):
        if name.startswith(UNFINISHED) and _is_abandoned(folder, name):
            _remove(folder, name)
            num_removed += 1
    return num_removed


def _open(folder: int, stack: ExitStack) -> tuple[int, str]:
    """An empty file, and the path by which it can be linked; `stack` closes it."""
    fd = _try_open_unnamed(folder)
    if fd is not None:
        stack.callback(os.close, fd)
        return fd, f"/proc/self/fd/{fd}"
    unfinished = f"{UNFINISHED}{secrets.token_hex(16)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(unfinished, flags, FILE_MODE, dir_fd=folder)
    stack.callback(os.close, fd)
    stack.callback(_remove, folder, unfinished)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd, unfinished


def _remove(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _try_open_unnamed(folder: int) -> int | None:
    """A file without a name; None where there can be none, or none could be linked (no /proc)."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
    except OSError as exc:
        if exc.errno in _UNSUPPORTED:
            return None
        raise
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        return fd
    os.close(fd)
    return None


def _write(fd: int, buffers: Iterable[Body]) -> None:
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]


def _is_abandoned(folder: int, name: str) -> bool:
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
