"""vLLM's pages on a GPU, and their staged pages in memory of this host.

Copies run on streams of their own, one for each direction, behind what vLLM's stream has to have
done before (`after`); no thread and no other stream waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from baton.engines.gpu.copy_stream import DEVICE_ERRORS, CopyEvent, CopyStream, pin_memory
from baton.engines.gpu.page_copier import view_rows
from baton.errors import TransferError, mapped
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.handoff.interface import StreamPosition
    from baton.transfer.interface import PagedRegion

_WIDTHS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


class DevicePages:
    """`Staging` between a GPU and this host. Used by one thread at a time.

    A staged page has the order of the dimensions of `pages`, whatever that of the GPU's memory.
    Where the two are the same (layouts LBHNC and BLHNC, or one KV head, as vLLM shows them), copy
    engines move the pages; else a kernel reorders them on the GPU first.
    """

    def __init__(self, pages: Sequence[torch.Tensor], region: PagedRegion) -> None:
        """`pages` are views `[num_blocks, …]`, one for each array of `region`.

        Returns when all that copying pages needs is compiled and allocated: later that would hold
        up vLLM.

        Raises:
            TransferError: the GPU has no memory left, or fails.
        """
        device = pages[0].device
        self._pages = tuple(map(_view_for_copies, pages))
        self._host = tuple(
            torch.from_numpy(view_pages(region.memory, array)) for array in region.arrays
        )
        pin_memory(region.memory, device)
        with mapped(DEVICE_ERRORS):
            self._to_host, self._to_device = CopyStream(device), CopyStream(device)
            for copy_stream in (self._to_host, self._to_device):
                for layer_pages in self._pages:
                    copy_stream.warm_up(layer_pages)
                copy_stream.wait()

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        after: StreamPosition | None = None,
    ) -> CopyEvent:
        """See `Staging`."""
        with mapped(DEVICE_ERRORS):
            return self._to_host.to_host(
                self._pages[layer], blocks, self._host[layer], staged, after=_as_event(after)
            )

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        after: StreamPosition | None = None,
    ) -> CopyEvent:
        """See `Staging`."""
        with mapped(DEVICE_ERRORS):
            return self._to_device.to_device(
                self._host[layer], staged, self._pages[layer], blocks, after=_as_event(after)
            )

    def close(self) -> None:
        """Wait for copies that were begun: then the region can be given back."""
        with mapped(DEVICE_ERRORS):
            self._to_host.wait()
            self._to_device.wait()


def _view_for_copies(pages: torch.Tensor) -> torch.Tensor:
    """Rows of bytes where pages are that; else the same pages in the widest words that fit."""
    try:
        return view_rows(pages)
    except TransferError:
        pass
    for dtype in _WIDTHS:
        try:
            return pages.view(dtype)
        except RuntimeError:
            continue
    raise TransferError(f"KV pages of shape {tuple(pages.shape)} of {pages.dtype} cannot be copied")


def _as_event(after: StreamPosition | None) -> torch.Event:
    """What `make_recorder` recorded."""
    if not isinstance(after, CopyEvent):
        raise TransferError("a copy from or to a GPU needs an event that it comes after")
    return after.done
