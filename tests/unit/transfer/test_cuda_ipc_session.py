"""What an owner tells of its GPU memory, what a peer believes of it, and what is copied."""

from __future__ import annotations

import numpy as np
import pytest

from baton.errors import BatonError, TransferError
from baton.ids import Epoch, new_region_handle
from baton.kv.copies import CopyGroup, PageCopies
from baton.net.framing import encode
from baton.transfer.interface import DeviceMemory, PageArray, PagedRegion, RegionDescriptor
from baton.transfer.transports.cuda_ipc.session import (
    MAX_ALLOCATIONS,
    Allocation,
    ArrayLocation,
    CudaIpcMetadata,
    CudaIpcSession,
    decode_metadata,
    encode_metadata,
)

ARRAYS = (PageArray(4096, 64, 10), PageArray(0, 128, 10))
OURS, THEIRS = 0x7F00_0000_0000, 0x7E00_0000_0000


class BookDevice:
    """Allocations of 8 KiB at multiples of that; keeps what it was told."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.num_closed = 0
        self.mapped_bytes = 8192

    def export(self, address: int) -> tuple[Allocation, bytes]:
        base = address // 8192 * 8192
        return Allocation(base, 8192), base.to_bytes(8, "little") * 8

    def map(self, handle: bytes) -> Allocation:
        base = int.from_bytes(handle[:8], "little") - OURS + THEIRS
        return Allocation(base, self.mapped_bytes)

    def enqueue(self, runs: np.ndarray) -> object:
        assert runs.dtype == np.uint64
        self.runs += runs.tolist()
        return len(self.runs)

    def is_done(self, ticket: object) -> bool:
        return ticket == len(self.runs)

    def close(self) -> None:
        self.num_closed += 1


def make_region(arrays: tuple[PageArray, ...] = ARRAYS) -> PagedRegion:
    memory = DeviceMemory(0, OURS)
    return PagedRegion(new_region_handle(), "cuda", memoryview(b""), arrays, device=memory)


def describe(region: PagedRegion) -> RegionDescriptor:
    return RegionDescriptor("cuda_ipc", region.handle, Epoch("e"), region.arrays, "")


def copies_of(array: int, pages: list[int], to: list[int], spans: list[list[int]]) -> PageCopies:
    group = CopyGroup(np.array(pages), np.array(to), np.array(spans))
    return PageCopies(array, (group,))


def load_metadata(device: BookDevice) -> tuple[CudaIpcSession, PagedRegion]:
    session, region = CudaIpcSession(lambda _: device), make_region()
    session.load_metadata(
        CudaIpcSession(lambda _: BookDevice()).get_metadata(region), describe(region)
    )
    return session, region


def test_a_write_goes_from_our_pages_to_theirs_and_a_read_back() -> None:
    device = BookDevice()
    session, region = load_metadata(device)
    copies = copies_of(0, [1, 2, 7], [4, 5, 0], [[0, 0, 64]])
    ours, theirs = OURS + 4096, THEIRS + 4096
    handle = session.post("write", region, copies)
    assert device.runs == [[ours + 64, theirs + 256, 128], [ours + 448, theirs, 64]]
    assert session.is_done(handle)
    device.runs.clear()
    session.post("read", region, copies_of(1, [3], [2], [[16, 0, 32]]))
    assert device.runs == [[THEIRS + 400, OURS + 256, 32]]
    session.close()
    session.close()
    assert device.num_closed == 1


def test_arrays_in_allocations_of_their_own() -> None:
    arrays = (PageArray(0, 64, 10), PageArray(40_960, 128, 10), PageArray(1024, 64, 10))
    decoded = decode_metadata(
        CudaIpcSession(lambda _: BookDevice()).get_metadata(make_region(arrays)), arrays
    )
    assert len(decoded.handles) == 2
    assert decoded.locations == (ArrayLocation(0, 0), ArrayLocation(1, 0), ArrayLocation(0, 1024))


def test_an_array_that_leaves_its_allocation_is_not_shared() -> None:
    with pytest.raises(TransferError):
        CudaIpcSession(lambda _: BookDevice()).get_metadata(make_region((PageArray(4096, 64, 65),)))


def test_an_owner_whose_memory_is_shorter_than_it_says_is_not_touched() -> None:
    device = BookDevice()
    device.mapped_bytes = 4096 + 639
    session, region = load_metadata(device)
    with pytest.raises(TransferError):
        session.post("write", region, copies_of(1, [0], [0], [[0, 0, 64]]))
    assert not device.runs
    assert device.num_closed == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 100,
        encode({"handles": [], "places": []}),
        encode({"handles": [bytes(64)], "places": [[0, 0]]}),
        encode({"handles": [bytes(64)], "places": [[0, 0], [1, 0]]}),
        encode({"handles": [bytes(64)], "places": [[0, 0], [-1, 0]]}),
        encode({"handles": [bytes(64)], "places": [[0, 0], [0, -64]]}),
        encode({"handles": [bytes(64)], "places": [[0, 0], [0, 1 << 60]]}),
        encode({"handles": [bytes(63)], "places": [[0, 0], [0, 0]]}),
        encode({"handles": [bytes(64)] * (MAX_ALLOCATIONS + 1), "places": [[0, 0], [0, 0]]}),
    ],
)
def test_an_introduction_that_makes_no_sense(body: bytes) -> None:
    with pytest.raises(BatonError):
        decode_metadata(body, ARRAYS)


def test_too_many_allocations_are_not_told() -> None:
    handles = tuple(number.to_bytes(64, "little") for number in range(MAX_ALLOCATIONS + 1))
    with pytest.raises(TransferError):
        encode_metadata(CudaIpcMetadata(handles, ()))


def test_memory_of_the_host_is_not_moved() -> None:
    region = PagedRegion(new_region_handle(), "host", memoryview(b""), ARRAYS)
    with pytest.raises(TransferError):
        CudaIpcSession(lambda _: BookDevice()).get_metadata(region)
