"""The entries that a worker has reported of its store, in columns: about 100 bytes for each.

For each entry: the block hash by which it is looked for, the name by which gateways know it, and a
bit for each place where it was found. Pure.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from baton.kv.digest_table import NO_ROW, DigestTable
from baton.kv.identity import BlockHash
from baton.kv.row_order import RowOrder

if TYPE_CHECKING:
    from collections.abc import Sequence


class ReportedEntries:
    """By rows, as in `DigestTable`. One thread at a time: the holder of the journal's lock."""

    def __init__(self) -> None:
        self._hashes, self._order = DigestTable(), RowOrder()
        self._names, self._places = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def oldest(self) -> int:
        """The row of the entry that was added longest ago, or `NO_ROW`."""
        return self._order.first

    def rows(self) -> array[int]:
        """Of all entries, the oldest first."""
        return array("i", self._order)

    def find(self, block_hash: BlockHash) -> int:
        """Its row, or `NO_ROW`."""
        return self._hashes.find(block_hash)

    def add(self, block_hash: BlockHash, name: int) -> int:
        """Its row: of an entry that is there already, which is the newest now, or of a new one."""
        row = self._hashes.find(block_hash)
        if row != NO_ROW:
            self._order.move_to_end(row)
            return row
        row = self._hashes.add(block_hash)
        if row == len(self._names):
            self._names.append(name)
            self._places.append(0)
        else:
            self._names[row], self._places[row] = name, 0
        self._order.append(row)
        return row

    def remove(self, row: int) -> None:
        """Forget an entry."""
        self._hashes.remove(self._hashes.digest(row))
        self._order.remove(row)
        self._places[row] = 0

    def block_hash(self, row: int) -> BlockHash:
        """By which it is looked for."""
        return BlockHash(self._hashes.digest(row))

    def places(self, row: int) -> int:
        """A bit for each place where it is; 0 of a row that is not in use."""
        return self._places[row]

    def set_places(self, row: int, places: int) -> None:
        """It is there, and nowhere else."""
        self._places[row] = places

    def pack_names(self, rows: Sequence[int]) -> bytes:
        """The names of some entries, as events have them."""
        return np.array([self._names[row] for row in rows], "<u8").tobytes()

    def pack_names_at(self, place: int) -> bytes:
        """The names of all entries at the place of this bit."""
        is_there = np.array(self._places) & np.uint64(place) != 0
        packed: bytes = np.array(self._names)[is_there].astype("<u8").tobytes()
        return packed

    def check_invariants(self) -> None:
        """Raise AssertionError where columns disagree.

        Raises:
            AssertionError: an entry is not in the order, or a row that is free is somewhere.
        """
        self._hashes.check_invariants()
        rows = [*self._order]
        if len(rows) != len(set(rows)) or len(rows) != len(self):
            raise AssertionError("not every entry has one place in the order")
        if any(places for row, places in enumerate(self._places) if row not in set(rows)):
            raise AssertionError("a row that is not in use is at some place")
