"""Where some tokens are in pages of two sequences, as few slices: what numpy copies in one call.

For planes whose dimensions may lie in any order. Bytes of pages in the orders that Baton knows are
moved by `copies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TokenSlices: TypeAlias = tuple[slice, slice]
"""Of the pages, and of the tokens in each."""


@dataclass(frozen=True, slots=True)
class TokenPages:
    """A sequence whose token `first + i` is in page `pages[i // page_size]`, at `i % page_size`."""

    first: int
    page_size: int
    pages: Sequence[int]


def find_token_slices(
    src: TokenPages, dst: TokenPages, start: int, stop: int
) -> list[tuple[TokenSlices, TokenSlices]]:
    """Where tokens `[start, stop)` are, in `src` and in `dst`, which both have all of them.

    Pages that are evenly spaced on both sides, upwards or downwards, are one slice.
    """
    alike: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    at = start
    while at < stop:
        src_page, src_at = divmod(at - src.first, src.page_size)
        dst_page, dst_at = divmod(at - dst.first, dst.page_size)
        length = min(src.page_size - src_at, dst.page_size - dst_at, stop - at)
        pair = src.pages[src_page], dst.pages[dst_page]
        alike.setdefault((src_at, dst_at, length), []).append(pair)
        at += length
    return [
        ((sources, slice(src_at, src_at + length)), (targets, slice(dst_at, dst_at + length)))
        for (src_at, dst_at, length), pairs in alike.items()
        for sources, targets in _slice_pairs(pairs)
    ]


def _slice_pairs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Page pairs as slices of both sides."""
    begin = 0
    while begin < len(pairs):
        end, step = begin + 1, (1, 1)
        if end < len(pairs):
            step = _subtract(pairs[end], pairs[begin])
        while end < len(pairs) and _subtract(pairs[end], pairs[end - 1]) == step:
            end += 1
        if end == begin + 1:
            step = (1, 1)
        (src, dst), (last_src, last_dst) = pairs[begin], pairs[end - 1]
        yield _slice(src, last_src, step[0]), _slice(dst, last_dst, step[1])
        begin = end


def _subtract(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] - other[0], one[1] - other[1]


def _slice(first: int, last: int, step: int) -> slice:
    stop = last + step
    return slice(first, stop if stop >= 0 else None, step)
