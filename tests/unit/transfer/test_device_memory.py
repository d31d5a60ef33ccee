"""Tensors of a GPU as a region, without one: what is asked of a tensor is little."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from baton.errors import TransferError
from baton.transfer.device_memory import make_device_region
from baton.transfer.interface import PageArray


@dataclass(frozen=True)
class Device:
    type: str
    index: int | None


@dataclass(frozen=True)
class Tensor:
    address: int
    nbytes: int
    device: Device = Device("cuda", 1)
    is_whole: bool = True

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return self.is_whole


BASE = 0x7F00_0000_0000
LAYERS = (Tensor(BASE + 4096, 640), Tensor(BASE, 1280))


def test_arrays_begin_where_the_tensors_do() -> None:
    region = make_device_region(LAYERS, 10)
    assert region.kind == "cuda"
    assert region.arrays == (PageArray(4096, 64, 10), PageArray(0, 128, 10))
    assert region.device is not None
    assert (region.device.device, region.device.address) == (1, BASE)
    assert region.device.holds == LAYERS
    assert not len(region.memory)


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (replace(LAYERS[0], device=Device("cpu", None)),),
        (replace(LAYERS[0], device=Device("cuda", None)),),
        (LAYERS[0], replace(LAYERS[1], device=Device("cuda", 0))),
        (replace(LAYERS[0], is_whole=False),),
        (replace(LAYERS[0], nbytes=641),),
        (LAYERS[0], replace(LAYERS[1], address=BASE + 1)),
    ],
    ids=["none", "host", "no number", "two GPUs", "gaps", "not divisible", "not aligned"],
)
def test_tensors_that_make_no_region(layers: tuple[Tensor, ...]) -> None:
    with pytest.raises(TransferError):
        make_device_region(layers, 10)


def test_a_region_without_pages() -> None:
    with pytest.raises(TransferError):
        make_device_region(LAYERS, 0)
