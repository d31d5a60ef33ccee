"""A tensor's pages as rows of bytes, and which rows may be touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.errors import TransferError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def view_rows(pages: torch.Tensor) -> torch.Tensor:
    """`[n, …]`, any dtype, as uint8 `[n, page_bytes]` of the same memory; `stride(0)` in bytes.

    Pages may be apart from each other; the bytes of each are adjacent.

    Raises:
        TransferError: they are not, or pages overlap.
    """
    size = pages.element_size()
    page_bytes = pages[:1].numel() * size
    stride_bytes = pages.stride(0) * size
    if not pages[:1].is_contiguous() or (len(pages) > 1 and stride_bytes < page_bytes):
        raise TransferError(f"pages of shape {tuple(pages.shape)} are no rows of adjacent bytes")
    rows = torch.empty(0, dtype=torch.uint8, device=pages.device)
    return rows.set_(
        pages.untyped_storage(),
        pages.storage_offset() * size,
        (len(pages), page_bytes),
        (max(stride_bytes, page_bytes), 1),
    )


def check_rows(rows: torch.Tensor, index: NDArray[np.int64], other: torch.Tensor) -> None:
    """Refuse what would read or write outside `rows`, or between pages of two sizes.

    Raises:
        TransferError: says which.
    """
    if rows.shape[1] != other.shape[1]:
        raise TransferError(f"pages of {rows.shape[1]} and {other.shape[1]} bytes")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(rows):
        raise TransferError(f"a page is outside the {len(rows)} that there are")


def check_pairs(
    source: torch.Tensor,
    source_index: NDArray[np.int64],
    target: torch.Tensor,
    target_index: NDArray[np.int64],
) -> None:
    """Refuse what is no copy from page to page.

    Raises:
        TransferError: see `check_rows`, or more pages of one than of the other.
    """
    check_rows(source, source_index, target)
    check_rows(target, target_index, source)
    if len(source_index) != len(target_index):
        raise TransferError(f"{len(source_index)} pages from, {len(target_index)} to")
