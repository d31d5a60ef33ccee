"""An entry's open file: it stays readable when its name is gone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from baton.store.record import HEADER_BYTES, has_digest

if TYPE_CHECKING:
    from collections.abc import Callable


class FileEntryLease:
    """See `EntryLease`. `on_damage` is called once, if the body turns out not to be what was put.

    The body is read, not mapped: what is verified is this process's own copy, which nobody can
    change any more, and a file that is cut short is a short read, not a SIGBUS.
    """

    def __init__(
        self, fd: int, num_bytes: int, digest: bytes, on_damage: Callable[[], None]
    ) -> None:
        self._fd, self._num_bytes, self._digest = fd, num_bytes, digest
        self._on_damage = on_damage

    @property
    def num_bytes(self) -> int:
        """See `EntryLease`."""
        return self._num_bytes

    def try_read(self, into: memoryview) -> bool:
        """See `EntryLease`."""
        if self._fd < 0 or len(into) != self._num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self._num_bytes}, or released")
        if self._read(into) and has_digest(into, self._digest):
            return True
        self._on_damage()
        return False

    def release(self) -> None:
        """See `EntryLease`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _read(self, into: memoryview) -> bool:
        at = 0
        while at < self._num_bytes:
            try:
                num_read = os.preadv(self._fd, [into[at:]], HEADER_BYTES + at)
            except OSError:
                return False
            if num_read == 0:
                return False
            at += num_read
        return True
