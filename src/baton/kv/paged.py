"""Which blocks hold which tokens of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import ProtocolError
from baton.record import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout


class BlockTable(Record, frozen=True):
    """Which block holds which tokens of one sequence.

    `blocks[i]`, int64, holds tokens `[(first + i) * block_size, (first + i + 1) * block_size)`.
    `first` is above 0 where the leading blocks are not this table's business (a cached prefix).
    """

    first: int
    blocks: NDArray[np.int64]

    def slice_tokens(self, start: int, stop: int, block_size: int) -> BlockTable:
        """The blocks that hold tokens `[start, stop)`, all of which the table has."""
        held, first = blocks_holding(start, stop, block_size), self.first
        return BlockTable(held.start, self.blocks[held.start - first : held.stop - first])


def blocks_holding(start: int, stop: int, block_size: int) -> range:
    """Which of a sequence's blocks hold tokens `[start, stop)`: none, where that is empty."""
    first = start // block_size
    return range(first, count_blocks(stop, block_size) if start < stop else first)


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a sequence's first `num_tokens` tokens; the last may be partly filled."""
    return -(-num_tokens // block_size)


class PagedSequence(Record, frozen=True):
    """One sequence's KV on one worker: the blocks of `table`, in pages of `layout`."""

    layout: KVLayout
    table: BlockTable

    def check_covers(self, start: int, stop: int) -> None:
        """Refuse tokens `[start, stop)` where the table lacks a block of theirs.

        Raises:
            ProtocolError: a block is missing, or the range is none.
        """
        check_range(start, stop)
        first = self.table.first * self.layout.block_size
        end = first + len(self.table.blocks) * self.layout.block_size
        if start < stop and not first <= start <= stop <= end:
            raise ProtocolError(f"tokens [{start}, {stop}) where the blocks have [{first}, {end})")

    def blocks_of(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each token, int64 `[n]`. The table covers them all."""
        return self.table.blocks[tokens // self.layout.block_size - self.table.first]


def check_range(start: int, stop: int) -> None:
    """Refuse what is no token range.

    Raises:
        ProtocolError: negative, or it ends before it starts.
    """
    if not 0 <= start <= stop:
        raise ProtocolError(f"tokens [{start}, {stop}) are no range")
