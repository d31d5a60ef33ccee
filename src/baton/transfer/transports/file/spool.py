"""The receiver's folder, in which peers leave part files.

A locked file says that the owner lives: the kernel drops the lock with the process, however it
ends, so what a killed worker left behind is told from what a living one uses.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.errors import PeerUnreachableError, TransferError
from baton.transfer.transports.file.part_file import remove_file

if TYPE_CHECKING:
    from pathlib import Path

    from baton.ids import Epoch

_log = logging.getLogger(__name__)

LOCK: Final = "lock"
PROOF: Final = "proof"
PROOF_BYTES: Final = 16


class Spool:
    """A fresh folder in `directory`. Owns it until `close`."""

    def __init__(self, directory: Path, epoch: Epoch) -> None:
        """Make and lock it.

        Raises:
            TransferError: the directory is not there, or cannot be written.
        """
        self.name = f"baton-{epoch}-{secrets.token_hex(8)}"
        self.path = directory / self.name
        self.proof = secrets.token_bytes(PROOF_BYTES)
        try:
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            shutil.rmtree(self.path, ignore_errors=True)
            raise TransferError(f"cannot keep part files in {directory}: {exc}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / PROOF).write_bytes(self.proof)
        except OSError as exc:
            self.close()
            raise TransferError(f"cannot keep part files in {directory}: {exc}") from exc

    def sweep(self, stale_after_s: float) -> None:
        """Remove other folders whose owners are dead and that are so much older than this one.

        Ages are told by the filesystem's own clock.
        """
        born_s = os.fstat(self._lock).st_mtime
        for path in self.path.parent.glob("baton-*-*"):
            if path != self.path and _is_stale(path, born_s - stale_after_s):
                _log.info("file: removing what a dead worker left: %s", path)
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, link: bytes) -> None:
        """Remove all part files of one link."""
        for path in self.path.glob(f"{link.hex()}-*"):
            remove_file(path)

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def find_spool(directory: Path, name: str, proof: bytes) -> Path:
    """A peer's folder, as this side sees it.

    Raises:
        PeerUnreachableError: this side sees another directory, or none.
    """
    path = directory / name
    try:
        found = (path / PROOF).read_bytes()
    except OSError as exc:
        raise PeerUnreachableError(
            f"the peer's folder cannot be read here, is {directory} the same directory on both "
            f"sides? ({exc})"
        ) from exc
    if found != proof:
        raise PeerUnreachableError(f"{path} is not the peer's folder")
    return path


def _is_stale(path: Path, youngest_s: float) -> bool:
    """Whether no process holds a folder's lock any more. An owner that cannot be asked is alive."""
    try:
        if path.stat().st_mtime > youngest_s:
            return False
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return not (path / LOCK).exists() and path.is_dir()  # it died between two steps
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.close(lock)
    return True
