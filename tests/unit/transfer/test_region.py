import fcntl
import mmap
import os

import numpy as np
import pytest

from baton.errors import TransferError
from baton.transfer.interface import PageArray
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    check_arrays,
    compute_region_bytes,
    map_peer_memory,
    place_arrays,
    release_region,
    view_pages,
)

SHAPES = [(4, 100), (8, 4096), (2, 64)]


def test_arrays_are_aligned_and_apart():
    arrays = place_arrays(SHAPES)
    assert [array.offset_bytes for array in arrays] == [0, 4096, 4096 * 9]
    assert compute_region_bytes(arrays) == 4096 * 9 + 128


@pytest.mark.parametrize("allocate", [allocate_host_region, allocate_shared_region])
def test_views_of_arrays_are_zeroed_writable_and_disjoint(allocate):
    region = allocate(SHAPES)
    views = [view_pages(region.memory, array) for array in region.arrays]
    assert [view.shape for view in views] == [tuple(shape) for shape in SHAPES]
    for number, view in enumerate(views, start=1):
        assert not view.any()
        view[:] = number
    assert [set(view.ravel().tolist()) for view in views] == [{1}, {2}, {3}]
    assert view_pages(region.memory, region.arrays[1])[3, 5] == 2
    del view, views
    release_region(region)
    with pytest.raises(ValueError, match="released"):
        region.memory[0]


def test_memory_that_is_still_viewed_survives_its_release():
    region = allocate_host_region(SHAPES)
    view = view_pages(region.memory, region.arrays[0])
    release_region(region)
    view[:] = 7
    assert view.sum() == 7 * 400


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (PageArray(0, 64, 1),) * 4097,
        (PageArray(0, 0, 1),),
        (PageArray(0, 64, 0),),
        (PageArray(-64, 64, 1),),
        (PageArray(8, 64, 1),),
        (PageArray(0, 1 << 31, 1),),
        (PageArray(0, 64, 1 << 32),),
        (PageArray(1 << 47, 64, 1),),
        (PageArray(0, 1 << 30, 1 << 31),),
    ],
)
def test_arrays_that_no_region_has_are_refused(arrays):
    with pytest.raises(TransferError):
        check_arrays(arrays)


def test_a_peer_sees_the_same_memory_through_the_descriptor():
    region = allocate_shared_region(SHAPES)
    mapping = map_peer_memory(region.fd, region.arrays)
    mapping[5] = 9
    assert region.memory[5] == 9
    mapping.close()
    release_region(region)


def test_a_sealed_region_cannot_be_cut_short():
    region = allocate_shared_region(SHAPES)
    for num_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, num_bytes)
    release_region(region)


def test_memory_that_could_be_cut_short_is_not_mapped():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    with pytest.raises(TransferError, match="sealed"):
        map_peer_memory(fd, place_arrays(SHAPES))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    map_peer_memory(fd, place_arrays(SHAPES)).close()
    with pytest.raises(TransferError, match="needs"):
        map_peer_memory(fd, place_arrays([(1 << 10, 4096)]))
    os.close(fd)


def test_memory_that_cannot_be_written_is_not_mapped():
    fd = os.memfd_create("read-only", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 16)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    with pytest.raises(TransferError, match="map"):
        map_peer_memory(fd, place_arrays(SHAPES))
    os.close(fd)


def test_something_that_is_no_memfd_is_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 16))
    for target in (path, "/dev/zero"):
        fd = os.open(target, os.O_RDWR)
        with pytest.raises(TransferError):
            map_peer_memory(fd, place_arrays(SHAPES))
        os.close(fd)


def test_host_memory_is_private():
    region = allocate_host_region([(1, 4096)])
    assert region.fd is None
    assert isinstance(region.memory.obj, mmap.mmap)
    assert np.frombuffer(region.memory, np.uint8).sum() == 0
