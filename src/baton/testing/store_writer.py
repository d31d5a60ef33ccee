"""A writer that stops in the middle of an entry: `python -m baton.testing.store_writer`.

Arguments: the tier's kind, its options as JSON, the content's word, the body's bytes, and `unnamed`
or `named`: whether the filesystem is taken to have files without a name. It reports on its standard
output how many bytes it has written when it is half-way, to a file, to the folder's pool, or past
the page cache, then waits to be killed.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING

from baton.clock import MachineClock
from baton.store.folder import bodies, body_pool, direct_files, directory
from baton.store.folder.direct_files import write_piece
from baton.store.interface import TIERS, Body, TierContext
from baton.testing.store_contract import CONTRACT_KEY, body_of, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray


class _StallingBuffers:
    """Buffers of which the last one ends in the middle, for as long as this process lives."""

    def __init__(self, buffers: Iterable[Body]) -> None:
        self._buffers = buffers

    def __iter__(self) -> Iterator[Body]:
        *first, body = self._buffers
        yield from first
        half = body[: len(body) // 2]
        yield half
        _report_and_wait(sum(map(len, first)) + len(half))


def _report_and_wait(num_bytes: int) -> None:
    print(num_bytes, flush=True)  # noqa: T201
    sys.stdin.read()


def _stall_in_pool(views: Iterator[NDArray[np.uint8]], body: Body) -> Iterator[NDArray[np.uint8]]:
    num_copied = 0
    for piece in body_pool.copy_in(views, body):
        if num_copied >= len(body) // 2:
            _report_and_wait(num_copied)
        yield piece
        num_copied += len(piece)


class _StallingWrites:
    """`write_piece` of `direct_files`, for the first half of a body but its first piece alone."""

    def __init__(self, num_bytes: int) -> None:
        self._half = num_bytes // 2
        self._first_half = threading.Event()
        self._is_reported = threading.Lock()

    def __call__(self, fd: int, piece: NDArray[np.uint8], at: int) -> None:
        if 0 < at < self._half:
            write_piece(fd, piece, at)
            self._first_half.set()
            return
        self._first_half.wait(60)
        if self._is_reported.acquire(blocking=False):
            _report_and_wait(self._half)
        threading.Event().wait(60)


def main() -> None:
    """Open the tier and put the entry."""
    kind, options, content, num_bytes, naming = sys.argv[1:]
    context = TierContext("contract", CONTRACT_KEY, MachineClock())
    place = TIERS.build(kind, json.loads(options))(context)

    def write_all(fd: int, buffers: Iterable[Body], min_bytes: int = 0) -> None:
        directory.write_all(fd, _StallingBuffers(buffers), min_bytes)

    vars(bodies)["write_all"] = write_all
    vars(bodies)["copy_in"] = _stall_in_pool
    vars(direct_files)["write_piece"] = _StallingWrites(int(num_bytes))
    if naming == "named":
        directory._try_open_unnamed = lambda *_: None  # noqa: SLF001
    place.put(name_of(content), body_of(content, int(num_bytes)))


if __name__ == "__main__":
    main()
