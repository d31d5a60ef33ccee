"""Rows of a table in the order of their last use: a list that is linked by two columns."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from baton.kv.digest_table import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator


class RowOrder:
    """`first` was used least recently; `NO_ROW` where there is none. One thread at a time."""

    def __init__(self) -> None:
        self._before, self._after = array("i"), array("i")
        self.first = self._last = NO_ROW

    def append(self, row: int) -> None:
        """A row that is not in it was used now. Rows are added without a gap between them."""
        if row == len(self._before):
            self._before.append(NO_ROW)
            self._after.append(NO_ROW)
        self._before[row], self._after[row] = self._last, NO_ROW
        if self._last == NO_ROW:
            self.first = row
        else:
            self._after[self._last] = row
        self._last = row

    def remove(self, row: int) -> None:
        """Take out a row that is in it."""
        before, after = self._before[row], self._after[row]
        if before == NO_ROW:
            self.first = after
        else:
            self._after[before] = after
        if after == NO_ROW:
            self._last = before
        else:
            self._before[after] = before

    def move_to_end(self, row: int) -> None:
        """A row that is in it was used now."""
        if row != self._last:
            self.remove(row)
            self.append(row)

    def __iter__(self) -> Iterator[int]:
        """Those that were used least recently first. Nothing may change meanwhile."""
        row = self.first
        while row != NO_ROW:
            yield row
            row = self._after[row]
