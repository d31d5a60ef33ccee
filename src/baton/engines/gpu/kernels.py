"""The kernel that copies pages: whole pages, from and to rows that index arrays name.

Few programs walk over all pages, so that few multiprocessors are taken from the model; each moves
a page in 16-byte loads and stores where addresses and strides are multiples of 16, and in the
widest words that fit elsewhere. What is left at the end of a page goes byte by byte.

With TRITON_INTERPRET=1 it runs on tensors of the host: that is how it is tested without a GPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from baton.engines.gpu.page_copier import LaunchShape

MAX_UNIT_BYTES: Final = 16
MAX_WORD_BYTES: Final = 8
_WORDS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["num_pages"])  # type: ignore[untyped-decorator]
def copy_pages(  # type: ignore[no-untyped-def]  # noqa: ANN201, PLR0913, PLR0917 - a kernel's launch is flat
    source,  # noqa: ANN001
    source_pages,  # noqa: ANN001
    source_stride,  # noqa: ANN001
    target,  # noqa: ANN001
    target_pages,  # noqa: ANN001
    target_stride,  # noqa: ANN001
    num_pages,  # noqa: ANN001
    page_units,  # noqa: ANN001
    tail_bytes,  # noqa: ANN001
    PICKS_SOURCE: tl.constexpr,  # noqa: N803
    PICKS_TARGET: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    UNIT_WORDS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Page `source_pages[i]` → page `target_pages[i]`, for i below `num_pages`.

    Strides count units of `UNIT_WORDS` words of `WORD_BYTES` bytes, so that the compiler sees that
    addresses are multiples of a unit. Where a side is not picked from, its page number i is row i.
    """
    unit_bytes: tl.constexpr = UNIT_WORDS * WORD_BYTES
    source_words = source.to(tl.pointer_type(WORD), bitcast=True)
    target_words = target.to(tl.pointer_type(WORD), bitcast=True)
    for number in range(tl.program_id(0), num_pages, tl.num_programs(0)):
        source_page = number
        if PICKS_SOURCE:
            source_page = tl.load(source_pages + number)
        target_page = number
        if PICKS_TARGET:
            target_page = tl.load(target_pages + number)
        source_unit = tl.cast(source_page, tl.int64) * source_stride
        target_unit = tl.cast(target_page, tl.int64) * target_stride
        for first in range(0, page_units * UNIT_WORDS, BLOCK):
            word = first + tl.arange(0, BLOCK)
            is_inside = word < page_units * UNIT_WORDS
            taken = tl.load(source_words + source_unit * UNIT_WORDS + word, mask=is_inside)
            tl.store(target_words + target_unit * UNIT_WORDS + word, taken, mask=is_inside)
        if tail_bytes > 0:
            byte = tl.arange(0, 16)
            at = page_units * unit_bytes + byte
            is_tail = byte < tail_bytes
            taken = tl.load(source + source_unit * unit_bytes + at, mask=is_tail)
            tl.store(target + target_unit * unit_bytes + at, taken, mask=is_tail)


def launch_copy(
    source: torch.Tensor,
    source_pages: torch.Tensor | None,
    target: torch.Tensor,
    target_pages: torch.Tensor | None,
    *,
    shape: LaunchShape,
) -> None:
    """Queue the copy of as many pages as there are indices, on the current stream.

    Rows are uint8 `[n, page_bytes]`, indices int64 `[k]` on the same device, in range; None: row i.
    """
    index = source_pages if source_pages is not None else target_pages
    if index is None or not len(index) or not source.shape[1]:
        return
    unit = compute_unit_bytes(source, target)
    word = min(unit, MAX_WORD_BYTES)
    page_bytes = source.shape[1]
    copy_pages[min(len(index), shape.max_programs),](
        source,
        index if source_pages is None else source_pages,
        source.stride(0) // unit,
        target,
        index if target_pages is None else target_pages,
        target.stride(0) // unit,
        len(index),
        page_bytes // unit,
        page_bytes % unit,
        PICKS_SOURCE=source_pages is not None,
        PICKS_TARGET=target_pages is not None,
        WORD=_WORDS[word],
        WORD_BYTES=word,
        UNIT_WORDS=unit // word,
        BLOCK=shape.block_words,
        num_warps=shape.num_warps,
    )


def compute_unit_bytes(source: torch.Tensor, target: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides both sides' addresses and strides."""
    places = (each for rows in (source, target) for each in (rows.data_ptr(), rows.stride(0)))
    return math.gcd(MAX_UNIT_BYTES, *places)
