"""A user's private folder, shared by processes through locks, and atomic file creation in it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from baton.store.interface import Body

USERS: Final = "users"
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OPEN_TIMEOUT_S: Final = 5
"""For a folder whose last user is taking it away."""
_PAUSE_S: Final = 0.02
_ATTEMPTS: Final = 100


class Folder:
    """An open folder, shared with its other users until `close`.

    `was_unused`: no other process had it open.
    """

    def __init__(self, path: Path) -> None:
        """Make it, if it is not there, and open it.

        Raises:
            ConfigError: it cannot be made, or others than its owner can get at it.
        """
        self.path = path
        self.fd, self._users, self.was_unused = _open(path)

    def close(self) -> None:
        """Leave it, with all that is in it."""
        os.close(self._users)
        os.close(self.fd)

    def close_and_remove_unless_shared(self) -> None:
        """Leave it; the last of its users takes it away with all that is in it."""
        with suppress(BlockingIOError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def remove_if_abandoned(path: Path) -> bool:
    """Remove a folder of this user that no process has open; whether it was removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _why_unsafe(fd) is not None:
            return False
        users = os.open(USERS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return False  # it is being made, or is none of ours
    finally:
        os.close(fd)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(users)
    return True


def _open(path: Path) -> tuple[int, int, bool]:
    """The folder and its users' lock; again, where its last user has just taken it away."""
    for _ in range(_ATTEMPTS):
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(f"cannot keep KV in {path}: {exc.strerror}") from exc
        try:
            joined = _try_join(path, fd)
        except BaseException:
            os.close(fd)
            raise
        if joined is not None:
            return fd, *joined
        os.close(fd)
    raise ConfigError(f"cannot keep KV in {path}: it is taken away again and again")


def _try_join(path: Path, fd: int) -> tuple[int, bool] | None:
    """The shared lock of a folder that is still there, and whether no other process had it.

    Raises:
        ConfigError: others can get at the folder, or it cannot be written.
    """
    unsafe = _why_unsafe(fd)
    if unsafe is not None:
        raise ConfigError(f"cannot keep KV in {path}: {unsafe}")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        users = os.open(USERS, flags, FILE_MODE, dir_fd=fd)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"cannot keep KV in {path}: {exc.strerror}") from exc
    was_unused = _try_lock_alone(users)
    if not _try_share(users):
        os.close(users)
        raise ConfigError(
            f"cannot keep KV in {path}: another process holds its lock for {OPEN_TIMEOUT_S} s:"
            " was it stopped while it opened or removed the folder?"
        )
    if _is_still_there(path, fd, users):
        return users, was_unused
    os.close(users)
    return None


def _try_lock_alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_share(users: int) -> bool:
    """Share the lock; False if another process holds it for too long."""
    for _ in range(int(OPEN_TIMEOUT_S / _PAUSE_S)):
        try:
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _is_still_there(path: Path, fd: int, users: int) -> bool:
    """Whether the folder was not removed while this process waited for its lock."""
    try:
        is_same = os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
    return is_same and os.fstat(users).st_nlink > 0


def _why_unsafe(fd: int) -> str | None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to this one ({os.geteuid()})"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "others may get at it: chmod 700"
    return None


UNFINISHED: Final = "new-"
"""Begins the names of files that are being written, where they must have one."""

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


class UnnamedFile:
    """A file that is complete and has no name yet."""

    def __init__(self, folder: int, fd: int, source: str) -> None:
        self._folder, self._fd, self._source = folder, fd, source

    def make_durable(self) -> None:
        """Wait until its bytes are on the disk.

        Raises:
            OSError: the disk is full, or fails.
        """
        os.fdatasync(self._fd)

    def set_times(self, times_ns: tuple[int, int]) -> None:
        """Its access time and its modification time.

        Raises:
            OSError: they cannot be set.
        """
        os.utime(self._source, ns=times_ns, dir_fd=self._folder)

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
def write_unnamed(
    folder: int, buffers: Iterable[Body], min_bytes: int = 0
) -> Generator[UnnamedFile]:
    """A file of these bytes; see `fill_unnamed`.

    It has `min_bytes` at least: a hole follows what was written.
    """
    with fill_unnamed(folder, partial(_write, buffers, min_bytes)) as file:
        yield file


@contextmanager
def fill_unnamed(folder: int, fill: Callable[[int], None]) -> Generator[UnnamedFile]:
    """A file for the length of a block; it stays if it was given a name.

    `fill` writes it: it gets the open file, which is empty, and may raise OSError.

    Raises:
        StoreFullError: the filesystem is full, or allows no file so large.
        StoreError: it cannot be written, or cannot be named.
    """
    try:
        with ExitStack() as stack:
            fd, source = _open_unfinished(folder, stack)
            fill(fd)
            yield UnnamedFile(folder, fd, source)
    except OSError as exc:
        kind = StoreFullError if exc.errno in _NO_ROOM else StoreError
        raise kind(f"cannot keep an entry: {exc.strerror}") from exc


def remove_unfinished(folder: int) -> int:
    """Remove what writers left that are dead; how many files."""
    names = [name for name in os.listdir(folder) if name.startswith(UNFINISHED)]
    return sum(_remove_if_abandoned(folder, name) for name in names)


def _open_unfinished(folder: int, stack: ExitStack) -> tuple[int, str]:
    """An empty file, and the path by which it can be linked; `stack` closes it."""
    fd = _try_open_unnamed(folder)
    if fd is not None:
        stack.callback(os.close, fd)
        return fd, f"/proc/self/fd/{fd}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        unfinished = f"{UNFINISHED}{secrets.token_hex(16)}"
        fd = os.open(unfinished, flags, FILE_MODE, dir_fd=folder)
        if _try_lock_alone(fd) and os.fstat(fd).st_nlink:
            stack.callback(os.close, fd)
            stack.callback(_remove, folder, unfinished)
            return fd, unfinished
        os.close(fd)  # another process met it before it was locked, and takes it for abandoned


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
    if _have_paths():
        return fd
    os.close(fd)
    return None


@lru_cache(maxsize=1)
def _have_paths() -> bool:
    """Whether open files have paths in this process: by those they are linked."""
    return os.path.lexists("/proc/self/fd")


def _write(buffers: Iterable[Body], min_bytes: int, fd: int) -> None:
    num_bytes = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        num_bytes += len(rest)
        while rest:
            rest = rest[os.write(fd, rest) :]
    if num_bytes < min_bytes:
        os.ftruncate(fd, min_bytes)


def _remove_if_abandoned(folder: int, name: str) -> bool:
    """Remove a file that no process has locked; whether it was one. Locked meanwhile."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder, name)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
