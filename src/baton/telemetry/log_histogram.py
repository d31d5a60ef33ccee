"""A histogram with logarithmic buckets: small, mergeable, quantiles within 1 % of the value.

Bucket `i` of 1 .. `NUM_BUCKETS` holds `[MIN_VALUE * BASE**(i-1), MIN_VALUE * BASE**i)`. Bucket 0
holds what is smaller, whose quantile is 0; the last one what is `MAX_VALUE` or more. All histograms
have the same buckets, so that merging is adding, and no quantile depends on the order of merging.

    LogHistogram   counts values in one process
    BucketCounts   its non-empty buckets: what is sent, subtracted and summarised
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import ceil, log
from typing import TYPE_CHECKING, Annotated, Final, Self

import msgspec
import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable

BASE: Final = 1.02
MIN_VALUE: Final = 1e-6
MAX_VALUE: Final = 1e3
_SCALE: Final = 1 / log(BASE)
NUM_BUCKETS: Final = ceil(log(MAX_VALUE / MIN_VALUE) * _SCALE)
_LAST: Final = NUM_BUCKETS + 1
_MIDDLE: Final = 2 / (1 + BASE)
"""Times a bucket's upper edge: the value with the same relative error, 0.99 %, at both edges."""

Bucket = Annotated[int, Meta(ge=0, le=_LAST)]
Count = Annotated[int, Meta(ge=1, le=2**45)]
"""Sums of 2**17 of them are still 64-bit integers."""


class BucketCounts(msgspec.Struct, frozen=True, array_like=True):
    """The non-empty buckets of a histogram, ascending, and how many values each has."""

    buckets: Annotated[tuple[Bucket, ...], Meta(max_length=_LAST + 1)] = ()
    counts: Annotated[tuple[Count, ...], Meta(max_length=_LAST + 1)] = ()

    def __post_init__(self) -> None:
        """Check what was decoded.

        Raises:
            ValueError: not one count for each bucket, or buckets out of order.
        """
        if len(self.buckets) != len(self.counts):
            raise ValueError(f"{len(self.buckets)} buckets and {len(self.counts)} counts")
        if tuple(sorted(set(self.buckets))) != self.buckets:
            raise ValueError("the buckets are not in ascending order")

    def quantile(self, share: float) -> float | None:
        """The value that a share of 0 to 1 of all values does not exceed; None of no value.

        It is within 1 % of the value with rank `floor(share * (sum(counts) - 1))`, if that lies
        between `MIN_VALUE` and `MAX_VALUE`.
        """
        if not self.buckets:
            return None
        sums = list(accumulate(self.counts))
        return value_of(self.buckets[bisect_right(sums, int(share * (sums[-1] - 1)))])

    def minus(self, earlier: BucketCounts) -> BucketCounts:
        """What was added since `earlier`, which was taken of the same histogram."""
        if earlier == self:
            return BucketCounts()
        before = dict(zip(earlier.buckets, earlier.counts, strict=True))
        pairs = zip(self.buckets, self.counts, strict=True)
        added = ((bucket, count - before.get(bucket, 0)) for bucket, count in pairs)
        grown = [pair for pair in added if pair[1] > 0]
        return BucketCounts(tuple(pair[0] for pair in grown), tuple(pair[1] for pair in grown))


class LogHistogram:
    """Counts values. Not thread-safe. 8.4 KB, whatever is added."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = np.zeros(_LAST + 1, dtype=np.int64)

    @classmethod
    def of(cls, parts: Iterable[BucketCounts]) -> Self:
        """The sum of several."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    def add(self, value: float) -> None:
        """Count one value. NaN counts as 0."""
        if value >= MAX_VALUE:
            index = _LAST
        elif value >= MIN_VALUE:
            index = 1 + int(log(value / MIN_VALUE) * _SCALE)
        else:
            index = 0
        self._counts[index] += 1

    def merge(self, other: BucketCounts) -> None:
        """Add all that another histogram has counted."""
        if other.buckets:
            self._counts[list(other.buckets)] += other.counts

    def counts(self) -> BucketCounts:
        """The non-empty buckets."""
        buckets = np.flatnonzero(self._counts)
        return BucketCounts(tuple(buckets.tolist()), tuple(self._counts[buckets].tolist()))


def value_of(bucket: int) -> float:
    """The value that stands for those in a bucket."""
    if bucket == 0:
        return 0.0
    if bucket == _LAST:
        return MAX_VALUE
    return MIN_VALUE * _MIDDLE * BASE**bucket
