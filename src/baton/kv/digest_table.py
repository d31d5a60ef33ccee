"""A set of 32-byte digests in a few arrays: each has a row, by which its owner keeps columns.

A `bytes` object of 32 bytes takes 80, a place in a dict 40 to 120 more, and each value an object of
its own. Here a digest takes its 32 bytes, and a place in a table of row numbers (open addressing,
linear probing) 16 to 32 more. Many digests are looked for at once in numpy.
"""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DIGEST_BYTES: Final = 32
NO_ROW: Final = -1
_MIN_ROWS: Final = 64
_PLACES_PER_ROW: Final = 4
"""At least: most digests are at the place where they are looked for first."""
_FEW: Final = 24
"""So many digests are looked for sooner one by one than in numpy."""
_WORD: Final = 0xFFFF_FFFF_FFFF_FFFF


class DigestTable:
    """Rows are small numbers, used again once they are free. One thread at a time.

    Places follow from a digest and a random factor of this table: clients who choose digests cannot
    choose them to be at one place.
    """

    def __init__(self) -> None:
        self._factor = secrets.randbits(64) | 1
        self._free = array("i")
        self._num_rows = 0
        self._digests = memoryview(b"")
        self._allocate(_MIN_ROWS)
        self._rehash()

    def __len__(self) -> int:
        return self._num_rows - len(self._free)

    def find(self, digest: bytes) -> int:
        """The digest's row, or `NO_ROW`."""
        return self._rows[self._find_place(digest)]

    def find_each(self, digests: Sequence[bytes]) -> NDArray[np.int32]:
        """The row of each, or `NO_ROW`: `[len(digests)]`."""
        if len(digests) <= _FEW:
            return np.array([self.find(each) for each in digests], np.int32)
        raw = b"".join(digests)
        heads = np.frombuffer(raw, np.uint64)[:: DIGEST_BYTES // 8]
        places = self._places_of(heads)
        rows = self._by_place[places]
        pending = np.flatnonzero((self._words[rows, 0] != heads) & (rows != NO_ROW))
        while len(pending):
            places[pending] = at = (places[pending] + 1) & self._mask
            rows[pending] = found = self._by_place[at]
            is_other = (self._words[found, 0] != heads[pending]) & (found != NO_ROW)
            pending = pending[is_other]
        is_there = rows != NO_ROW
        if is_there.all():
            is_right = self._words[rows].tobytes() == raw
        else:
            wanted = np.frombuffer(raw, np.uint64).reshape(len(digests), -1)
            is_right = np.array_equal(self._words[rows[is_there]], wanted[is_there])
        if not is_right:  # two digests that begin with the same eight bytes
            return np.array([self.find(each) for each in digests], np.int32)
        return rows

    def count_leading(self, digests: Sequence[bytes]) -> int:
        """How many leading ones are there."""
        if len(digests) <= _FEW or self.find(digests[0]) == NO_ROW:
            misses = (at for at, each in enumerate(digests) if self.find(each) == NO_ROW)
            return next(misses, len(digests))
        is_missing = self.find_each(digests) == NO_ROW
        at = int(is_missing.argmax())
        return at if is_missing[at] else len(digests)

    def digest(self, row: int) -> bytes:
        """The digest of a row that is in use."""
        return bytes(self._digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])

    def add(self, digest: bytes) -> int:
        """Give a digest that is not there a row."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            if row == self._max_rows:
                self._allocate(2 * row)  # what is not used yet takes no memory
            self._num_rows += 1
        self._digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] = digest
        if len(self) * _PLACES_PER_ROW > self._mask:
            self._rehash()
        else:
            self._rows[self._find_place(digest)] = row
        return row

    def remove(self, digest: bytes) -> int:
        """Free a digest's row, which is returned; `NO_ROW` where it is not there."""
        hole = self._find_place(digest)
        row = self._rows[hole]
        if row == NO_ROW:
            return NO_ROW
        at = hole
        while (other := self._rows[at := (at + 1) & self._mask]) != NO_ROW:
            # Whoever was moved on by what is gone moves back: nothing is found behind a gap.
            home = self._place_of(self.digest(other))
            if (at - home) & self._mask >= (at - hole) & self._mask:
                self._rows[hole] = other
                hole = at
        self._rows[hole] = NO_ROW
        self._free.append(row)
        return row

    def check_invariants(self) -> None:
        """Raise AssertionError where a row is not found by its digest.

        Raises:
            AssertionError: rows and places disagree.
        """
        free = set(self._free)
        if len(free) != len(self._free) or not free <= set(range(self._num_rows)):
            raise AssertionError("a row is free twice, or was never used")
        used = [row for row in range(self._num_rows) if row not in free]
        if any(self.find(self.digest(row)) != row for row in used):
            raise AssertionError("a digest is not at the place where it is looked for")
        if int(np.count_nonzero(self._by_place != NO_ROW)) != len(used):
            raise AssertionError("a place names a row that is not in use")

    def _allocate(self, max_rows: int) -> None:
        before = self._digests
        self._max_rows = max_rows
        self._words = np.empty((max_rows, DIGEST_BYTES // 8), np.uint64)
        self._digests = self._words.data.cast("B")
        self._digests[: len(before)] = before

    def _rehash(self) -> None:
        """Find every digest a place, in a table for twice as many."""
        num_places = 1 << (2 * _PLACES_PER_ROW * max(_MIN_ROWS, len(self)) - 1).bit_length()
        self._mask, self._shift = num_places - 1, 64 - num_places.bit_length() + 1
        self._by_place = np.full(num_places, NO_ROW, np.int32)
        self._rows = self._by_place.data
        is_used = np.ones(self._num_rows, dtype=bool)
        is_used[np.array(self._free, np.int64)] = False
        used = np.flatnonzero(is_used)
        homes = self._places_of(self._words[used, 0])
        order = np.argsort(homes, kind="stable")
        # In order of their homes each takes its own, or the next after the one before.
        ranks = np.arange(len(used))
        places = np.maximum.accumulate(homes[order] - ranks) + ranks
        is_inside = places <= self._mask
        self._by_place[places[is_inside]] = used[order][is_inside]
        for row in used[order][~is_inside].tolist():  # beyond the end: on from the first place
            self._rows[self._find_place(self.digest(row))] = row

    def _find_place(self, digest: bytes) -> int:
        """Where a digest is, or where it would be put."""
        rows, digests = self._rows, self._digests
        at = self._place_of(digest)
        while (row := rows[at]) != NO_ROW:
            if digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] == digest:
                break
            at = (at + 1) & self._mask
        return at

    def _place_of(self, digest: bytes) -> int:
        word = int.from_bytes(digest[:8], "little")
        return (word * self._factor & _WORD) >> self._shift

    def _places_of(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        return ((words * np.uint64(self._factor)) >> np.uint64(self._shift)).astype(np.int64)
