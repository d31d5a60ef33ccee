"""Adjacent pieces merged into runs: of pages, of spans in a page, of bytes in a region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

MAX_FEW: Final = 16
"""Up to so many pieces, `merge_few` is faster than `merge_runs`."""


def find_runs(lengths: NDArray[np.int64] | int, *starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which pieces begin a run: those that do not follow the one before on every side.

    Each of `starts` (one for each side) is int64 `[n]`; so are `lengths`, unless all are alike.
    """
    is_first = np.zeros(len(starts[0]), np.bool_)
    is_first[:1] = True
    before = lengths if isinstance(lengths, int) else lengths[:-1]
    for side in starts:
        is_first[1:] |= side[1:] != side[:-1] + before
    return is_first.nonzero()[0]


def merge_runs(
    lengths: NDArray[np.int64], *starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], ...]:
    """The same pieces in order, as few runs: their lengths, then the starts of each side."""
    if len(lengths) == 0:
        return (lengths, *starts)
    firsts = find_runs(lengths, *starts)
    return (np.add.reduceat(lengths, firsts), *(side[firsts] for side in starts))


def merge_spans(spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """`merge_runs` of rows `(source start, destination start, length)`, int64 `[n, 3]`."""
    firsts = find_runs(spans[:, 2], spans[:, 0], spans[:, 1])
    merged = spans[firsts]
    if len(spans):
        merged[:, 2] = np.add.reduceat(spans[:, 2], firsts)
    return merged


def merge_few(pieces: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """`merge_spans` for a few pieces, without numpy."""
    runs: list[list[int]] = []
    source_end = target_end = -1
    for source, target, length in pieces:
        if source == source_end and target == target_end:
            runs[-1][2] += length
        else:
            runs.append([source, target, length])
        source_end, target_end = source + length, target + length
    return runs
