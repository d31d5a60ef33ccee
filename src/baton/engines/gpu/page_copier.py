"""Gather and scatter pages on one device, named by index arrays."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from baton.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    PageIndex: TypeAlias = NDArray[np.int64] | torch.Tensor
    """Pages by number, on the host or uploaded."""


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


ROW_DIMS: Final = 2
"""Of `view_rows`. Pages with more are in whatever order their bytes lie."""


def check_rows(rows: torch.Tensor, index: PageIndex, other: torch.Tensor) -> None:
    """Refuse what would read or write outside `rows`, or between pages of two sizes.

    An index on the device was looked at before it got there.

    Raises:
        TransferError: names the difference.
    """
    if _page_bytes(rows) != _page_bytes(other):
        raise TransferError(f"pages of {_page_bytes(rows)} and {_page_bytes(other)} bytes")
    if isinstance(index, torch.Tensor) or not len(index):
        return
    if not 0 <= int(index.min()) <= int(index.max()) < len(rows):
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


_WIDTHS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


class PageCopier(Protocol):
    """Moves pages between two arrays of one device. Stateless; safe to share.

    Indices are int64 `[k]` on the host, or what `upload_index` returned; those of a target name no
    page twice. Source and target do not overlap.
    """

    def gather(self, pages: torch.Tensor, index: PageIndex, staging: torch.Tensor) -> None:
        """`staging[i] = pages[index[i]]`; `staging` has k rows or more.

        Raises:
            TransferError: a page is out of range, or pages of two sizes; nothing was queued.
        """
        ...

    def scatter(self, staging: torch.Tensor, index: PageIndex, pages: torch.Tensor) -> None:
        """`pages[index[i]] = staging[i]`.

        Raises:
            TransferError: see `gather`.
        """
        ...


class IndexedCopier:
    """See `PageCopier`: torch's own indexed copies, on any device.

    `gather` and `scatter` also take `pages` that are no rows, in the order of their dimensions.
    """

    def gather(self, pages: torch.Tensor, index: PageIndex, staging: torch.Tensor) -> None:
        _check_staging(pages, index, staging)
        source, target = _pair(pages, staging[: len(index)])
        torch.index_select(source, 0, upload_index(index, source.device), out=target)

    def scatter(self, staging: torch.Tensor, index: PageIndex, pages: torch.Tensor) -> None:
        _check_staging(pages, index, staging)
        target, source = _pair(pages, staging[: len(index)])
        target.index_copy_(0, upload_index(index, target.device), source)


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How much of a GPU the kernel takes; the defaults are chosen by benchmarks/bench_gpu.py.

    `max_programs`: multiprocessors at most. `block_words`: 8-byte words that a program loads before
    it stores them, a power of two; `num_warps`: 32 threads each, which share these.
    """

    max_programs: int = 8
    block_words: int = 8192
    num_warps: int = 32


class KernelCopier:
    """See `PageCopier`: one Triton kernel, on few of a GPU's multiprocessors."""

    def __init__(self, shape: LaunchShape = LaunchShape()) -> None:
        """Raises ImportError where Triton is not installed."""
        kernels = importlib.import_module("baton.engines.gpu.kernels")
        self._launch: Callable[..., None] = partial(kernels.launch_copy, shape=shape)

    def gather(self, pages: torch.Tensor, index: PageIndex, staging: torch.Tensor) -> None:
        _check_staging(pages, index, staging)
        self._launch(pages, upload_index(index, pages.device), staging, None)

    def scatter(self, staging: torch.Tensor, index: PageIndex, pages: torch.Tensor) -> None:
        _check_staging(pages, index, staging)
        self._launch(staging, None, pages, upload_index(index, pages.device))


def choose_copier(device: torch.device) -> PageCopier:
    """Kernels on a CUDA device where Triton is installed; else torch's own copies."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return KernelCopier()
    return IndexedCopier()


def _check_staging(pages: torch.Tensor, index: PageIndex, staging: torch.Tensor) -> None:
    check_rows(pages, index, staging)
    if len(staging) < len(index):
        raise TransferError(f"{len(index)} pages and room for {len(staging)}")


def upload_index(index: PageIndex, device: torch.device) -> torch.Tensor:
    """On the device, in the order of the current stream.

    From pinned memory: from other memory the host would wait for all that the stream was given.
    """
    if isinstance(index, torch.Tensor):
        return index
    owned = torch.tensor(index, dtype=torch.int64)  # numpy's memory may change once we return
    if device.type == "cuda":
        owned = owned.pin_memory()
    return owned.to(device, non_blocking=True)


def _page_bytes(pages: torch.Tensor) -> int:
    return pages.shape[1:].numel() * pages.element_size()


def _pair(pages: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as elements of one type and shape; see `_widen`."""
    if pages.dim() == ROW_DIMS:
        return _widen(pages, rows)
    return pages, rows.view(pages.dtype).view(-1, *pages.shape[1:])


def _widen(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as rows of the widest words that fit both: torch copies element by element."""
    for width, dtype in _WIDTHS:
        if all(_fits(rows, width) for rows in (source, target)):
            return source.view(dtype), target.view(dtype)
    return source, target


def _fits(rows: torch.Tensor, width: int) -> bool:
    places = (rows.shape[1], rows.stride(0), rows.storage_offset())
    return all(each % width == 0 for each in places)
