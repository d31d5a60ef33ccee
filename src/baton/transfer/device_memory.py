"""An engine's tensors on a GPU as a region: their pages stay where they are.

The tensors need not come from one allocation: array i begins at tensor i, counted from the lowest
of them. What lies between two arrays belongs to somebody else and is never touched. torch is not
imported: anything that has a device, an address and a size will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton.errors import TransferError
from baton.ids import new_region_handle
from baton.transfer.interface import DeviceMemory, PageArray, PagedRegion
from baton.transfer.region import check_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorDevice(Protocol):
    """What is asked of a `torch.device`."""

    @property
    def type(self) -> str:
        """`cuda`, `cpu` or another."""
        ...

    @property
    def index(self) -> int | None:
        """Its number among those of its type; None: the current one."""
        ...


class DeviceTensor(Protocol):
    """What is asked of a `torch.Tensor`."""

    @property
    def device(self) -> TensorDevice:
        """Where it is."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        ...

    def data_ptr(self) -> int:
        """The address of its first element."""
        ...

    def is_contiguous(self) -> bool:
        """Whether its elements are adjacent, in order."""
        ...


def make_device_region(layers: Sequence[DeviceTensor], num_pages: int) -> PagedRegion:
    """A `cuda` region over tensors of one GPU: array i is `layers[i]`, cut into `num_pages` pages.

    The region keeps the tensors. Pages have any size; 16-byte multiples copy fastest.

    Raises:
        TransferError: no tensor, one that is not on a GPU with a number, or on another one than the
            first, not contiguous, not divisible into that many pages, or at no 64-byte multiple
            from the others.
    """
    if not layers or num_pages < 1:
        raise TransferError(f"a region of {len(layers)} layers with {num_pages} pages each")
    devices = {(layer.device.type, layer.device.index) for layer in layers}
    kind, device = next(iter(devices))
    if len(devices) != 1 or kind != "cuda" or device is None:
        raise TransferError(
            f"a device region needs tensors of one GPU, not of {sorted(map(str, devices))}"
        )
    base = min(layer.data_ptr() for layer in layers)
    arrays = tuple(_locate(layer, base, num_pages) for layer in layers)
    check_arrays(arrays)
    memory = DeviceMemory(device, base, tuple(layers))
    return PagedRegion(new_region_handle(), "cuda", memoryview(b""), arrays, device=memory)


def _locate(layer: DeviceTensor, base: int, num_pages: int) -> PageArray:
    if not layer.is_contiguous() or layer.nbytes % num_pages:
        raise TransferError(f"{layer.nbytes} bytes of a layer are no {num_pages} adjacent pages")
    return PageArray(layer.data_ptr() - base, layer.nbytes // num_pages, num_pages)
