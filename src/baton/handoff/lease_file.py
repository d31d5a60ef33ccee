"""A write lease that processes of one host share: one of them extends it, agents in others read it.

The file holds an instant of the host's monotonic clock: 8 bytes, native, mapped by all.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import TYPE_CHECKING, Final, Self

from baton.clock import Instant
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SIZE_BYTES: Final = 8


class LeaseFile:
    """Implements `WriteLease`. Mapped until this object is gone."""

    def __init__(self, fd: int) -> None:
        self._until = memoryview(mmap.mmap(fd, SIZE_BYTES)).cast("d")

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new file, of this user alone: no process may write yet.

        Raises:
            ConfigError: it cannot be made, as where the file system is full.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # With its block: a write to the mapping that finds no room is a SIGBUS.
                os.posix_fallocate(fd, 0, SIZE_BYTES)
                lease = cls(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            raise ConfigError(f"the write lease {path} cannot be made: {exc.strerror}") from exc
        lease.extend(Instant(-math.inf))
        return lease

    @classmethod
    def open(cls, path: Path) -> Self:
        """One that another process of this host has created.

        Raises:
            ConfigError: there is none.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(
                f"the write lease {path} cannot be opened ({exc.strerror}): a worker that "
                "announces itself keeps it on its host; all its ranks have to run there"
            ) from exc
        try:
            return cls(fd)
        except ValueError as exc:
            raise ConfigError(f"{path} is no write lease: it is too short") from exc
        finally:
            os.close(fd)

    @property
    def until(self) -> Instant:
        """See `WriteLease`."""
        return Instant(self._until[0])

    def extend(self, until: Instant) -> None:
        """Writes may begin until then."""
        self._until[0] = until
