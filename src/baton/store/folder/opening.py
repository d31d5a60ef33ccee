"""A folder that is this user's alone, however many processes work in it.

A lock that every user shares says whether anybody else does: the kernel drops it with the process,
however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

USERS: Final = "users"
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_ATTEMPTS: Final = 100


class Folder:
    """An open folder, shared with its other users until `close`.

    `was_unused`: nobody else worked in it when it was opened.
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
    """Remove a folder of this user's that nobody works in; whether it is gone."""
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
    """The shared lock of a folder that is still there, and whether nobody else had it.

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
    fcntl.flock(users, fcntl.LOCK_SH)
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


def _is_still_there(path: Path, fd: int, users: int) -> bool:
    """Whether nobody has taken the folder away while its lock was waited for."""
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
