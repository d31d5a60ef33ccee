"""Copies as runs of bytes, neighbours joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.copies import CopyGroup
    from baton.transfer.interface import PageArray


def compute_runs(group: CopyGroup, source: PageArray, target: PageArray) -> NDArray[np.int64]:
    """All spans of all pages, in order, those made one that touch on both sides.

    Returns:
        int64 `[r, 3]`: offsets in the source's and in the target's region, and bytes.
    """
    pieces = np.empty((len(group.src_pages), len(group.spans), 3), np.int64)
    for side, pages, array in ((0, group.src_pages, source), (1, group.dst_pages, target)):
        firsts = array.offset_bytes + pages * array.page_bytes
        pieces[:, :, side] = firsts[:, None] + group.spans[:, side]
    pieces[:, :, 2] = group.spans[:, 2]
    rows = pieces.reshape(-1, 3)
    if not len(rows):
        return rows
    is_apart = (rows[1:, :2] != rows[:-1, :2] + rows[:-1, 2:]).any(axis=1)
    firsts = np.concatenate(([0], np.flatnonzero(is_apart) + 1))
    runs = rows[firsts]
    runs[:, 2] = np.add.reduceat(rows[:, 2], firsts)
    return runs
