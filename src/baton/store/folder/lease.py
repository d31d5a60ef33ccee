"""A lease of an entry's file: it is read into the reader's memory, and verified there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Self

from baton.store.entry_format import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.store.entry_format import BodyCheck

PIECE_BYTES: Final = 128 << 10


class FileEntryLease:
    """See `EntryLease`. `on_damage` is called once, if the body turns out not to be what was put.

    The body is read, not mapped: what is verified is this process's own copy, which no process can
    change any more, and a file that is cut short is a short read, not a SIGBUS. It is verified
    piece by piece, while each is in the processor's cache: that costs nothing beside the copy.
    """

    def __init__(
        self,
        fd: int,
        num_bytes: int,
        begin_check: Callable[[], BodyCheck],
        on_damage: Callable[[], None],
    ) -> None:
        self._fd, self._num_bytes = fd, num_bytes
        self._begin_check, self._on_damage = begin_check, on_damage

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def try_read(self, into: memoryview) -> bool:
        if self._fd < 0 or len(into) != self._num_bytes:
            raise ValueError(f"{len(into)} bytes for a body of {self._num_bytes}, or released")
        check = self._begin_check()
        if self._read(into, check) and check.is_passed():
            return True
        self._on_damage()
        return False

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _read(self, into: memoryview, check: BodyCheck) -> bool:
        at = 0
        while at < self._num_bytes:
            piece = into[at : at + PIECE_BYTES]
            try:
                num_read = os.preadv(self._fd, [piece], HEADER_BYTES + at)
            except OSError:
                return False
            if num_read == 0:
                return False
            check.add(piece[:num_read])
            at += num_read
        return True
