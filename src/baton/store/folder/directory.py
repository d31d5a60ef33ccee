"""A user's private folder, shared by processes through locks, and atomic file creation in it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import ExitStack
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

    def leave(self) -> bool:
        """Stop being one of its users; whether this one was the last: others wait to open it then.

        `close`, or `close_and_remove` for the last one, follows.
        """
        return try_lock_alone(self._users)

    def close_and_remove(self) -> None:
        """Remove it with all that is in it."""
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
        try:
            # Locked, it may be another's already: removed and made anew since it was opened.
            if not try_lock_alone(users) or not _is_still_there(path, fd, users):
                return False
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(users)
    except OSError:
        return False  # it is being made, or is none of ours
    finally:
        os.close(fd)
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
    was_unused = try_lock_alone(users)
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


def try_lock_alone(fd: int) -> bool:
    """Lock an open file; False where another process has it locked, or reads it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
_FILESYSTEM_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ROOM: Final = _FILESYSTEM_FULL | {errno.EFBIG, errno.ENOMEM}


class FilesystemFullError(StoreFullError):
    """The filesystem, or the user's quota, has less room than the tier may take."""


class UnnamedFile:
    """A file that has no name yet, or one that shows that it is being written, and is locked.

    `fd` is open for reading and writing.
    """

    def __init__(self, folder: int, fd: int, source: str, *, is_locked: bool = False) -> None:
        self.fd, self._folder, self._source = fd, folder, source
        self._is_locked = is_locked

    def make_durable(self) -> None:
        """Wait until its bytes are on the disk.

        Raises:
            OSError: the disk is full, or fails.
        """
        os.fdatasync(self.fd)

    def set_times(self, times_ns: tuple[int, int]) -> None:
        """Its access time and its modification time.

        Raises:
            OSError: they cannot be set.
        """
        os.utime(self.fd, ns=times_ns)

    def try_link(self, name: str) -> bool:
        """Give it its name; False if another file has it.

        Raises:
            OSError: it cannot be linked.
        """
        if self._is_locked:  # it is written: its readers may come as soon as it has its name
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._is_locked = False
        try:
            os.link(self._source, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        return True


def open_unnamed(folder: int, stack: ExitStack, flags: int = 0) -> UnnamedFile:
    """An empty file, opened with `flags` besides; `stack` closes it.

    It stays if it was given a name.

    Raises:
        OSError: it cannot be made.
    """
    fd = _try_open_unnamed(folder, flags)
    if fd is not None:
        stack.callback(os.close, fd)
        return UnnamedFile(folder, fd, f"/proc/self/fd/{fd}")
    flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        unfinished = make_unfinished_name()
        fd = os.open(unfinished, flags, FILE_MODE, dir_fd=folder)
        if try_lock_alone(fd) and os.fstat(fd).st_nlink:
            return adopt_unfinished(folder, fd, unfinished, stack)
        os.close(fd)  # another process met it before it was locked, and takes it for abandoned


def make_unfinished_name() -> str:
    """A name that no other file has."""
    return f"{UNFINISHED}{secrets.token_hex(16)}"


def adopt_unfinished(folder: int, fd: int, unfinished: str, stack: ExitStack) -> UnnamedFile:
    """A locked file under such a name, to be written: `stack` removes the name, and closes it."""
    stack.callback(os.close, fd)
    stack.callback(_remove_or_leave, folder, unfinished)
    return UnnamedFile(folder, fd, unfinished, is_locked=True)


def _remove_or_leave(folder: int, unfinished: str) -> None:
    with suppress(OSError):  # `remove_unfinished` will
        remove_if_there(folder, unfinished)


def write_all(fd: int, buffers: Iterable[Body], min_bytes: int = 0) -> None:
    """Write an empty file: of `min_bytes` at least, a hole follows what was written.

    Raises:
        OSError: the filesystem is full, or fails.
    """
    num_bytes = 0
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        num_bytes += len(rest)
        while rest:
            rest = rest[os.write(fd, rest) :]
    if num_bytes < min_bytes:
        os.ftruncate(fd, min_bytes)


def to_store_error(error: OSError) -> StoreError:
    """What a put reports where its file cannot be written or named."""
    kind = StoreFullError if error.errno in _NO_ROOM else StoreError
    if error.errno in _FILESYSTEM_FULL:
        kind = FilesystemFullError
    return kind(f"cannot keep an entry: {error.strerror}")


def remove_unfinished(folder: int) -> int:
    """Remove what writers left that are dead; how many files."""
    names = [name for name in os.listdir(folder) if name.startswith(UNFINISHED)]
    return sum(_remove_if_abandoned(folder, name) for name in names)


def remove_if_there(folder: int, name: str) -> None:
    """Take away a name.

    Raises:
        OSError: it is there, and cannot be taken away.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _try_open_unnamed(folder: int, flags: int) -> int | None:
    """A file without a name; None where there can be none, or none could be linked (no /proc)."""
    if not _has_proc():
        return None
    try:
        flags |= os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        return os.open(".", flags, FILE_MODE, dir_fd=folder)
    except OSError as exc:
        if exc.errno in _UNSUPPORTED:
            return None
        raise


@lru_cache(maxsize=1)
def _has_proc() -> bool:
    return os.path.lexists("/proc/self/fd")


def _remove_if_abandoned(folder: int, name: str) -> bool:
    """Remove a file that no process has locked; whether it was one. Locked meanwhile."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_if_there(folder, name)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
