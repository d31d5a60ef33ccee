"""Regions in huge pages where the kernel gives them, and the same regions where it does not."""

import os
import subprocess
import sys

import numpy as np
import pytest

from baton.ops.doctor.finding import Level
from baton.ops.doctor.host import this_host
from baton.ops.doctor.kernel_checks import check_huge_regions
from baton.transfer import huge_pages
from baton.transfer.huge_pages import huge_page_bytes
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    map_peer_memory,
    release_region,
)

MIB = 1 << 20
SHAPES = [(3, 32 * 1024), (130, 32 * 1024), (5, 100)]
"""More than two huge pages, and no whole number of them."""


def write_setting(folder, name, text):
    (folder / name).write_text(text + "\n")


@pytest.fixture(params=["as it is", "no huge pages", "never", "deny", "refused"])
def kernel(request, tmp_path, monkeypatch):
    """What the kernel allows: as here, or less."""
    for name in ("enabled", "shmem_enabled"):
        write_setting(tmp_path, name, "always [madvise] never")
    write_setting(tmp_path, "hpage_pmd_size", str(2 * MIB))
    match request.param:
        case "as it is":
            yield
            return
        case "no huge pages":
            (tmp_path / "hpage_pmd_size").unlink()
        case "never":
            write_setting(tmp_path, "enabled", "always madvise [never]")
        case "deny":
            write_setting(tmp_path, "shmem_enabled", "always never [deny] force")
        case "refused":
            monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 9999)
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    huge_page_bytes.cache_clear()
    yield
    huge_page_bytes.cache_clear()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("allocate", [allocate_host_region, allocate_shared_region])
def test_a_region_is_zeroed_writable_and_of_its_size_whatever_the_kernel_allows(allocate):
    region = allocate(SHAPES)
    pages = np.frombuffer(region.memory, np.uint8)
    assert not pages.any()
    pages[:] = 7
    if region.fd is not None:
        status = os.fstat(region.fd)
        assert status.st_size == len(pages)
        assert status.st_blocks * 512 >= len(pages)  # committed
        peer = map_peer_memory(region.fd, region.arrays)
        assert peer[len(peer) - 1] == 7
        peer.close()
    del pages
    release_region(region)


MAP_FIVE = """
import os, mmap
import numpy as np
from baton.transfer.huge_pages import huge_page_bytes, map_shared
size = huge_page_bytes()
fd = os.memfd_create("test")
num_bytes = size * 3 + mmap.PAGESIZE
os.ftruncate(fd, num_bytes)
mappings = [map_shared(fd, num_bytes) for _ in range(5)]
print(sum(np.frombuffer(mapping, np.uint8).ctypes.data % size == 0 for mapping in mappings))
"""


def test_shared_memory_is_mapped_where_huge_pages_can_be():
    """In a process of its own: another thread's mappings would take the places that are found."""
    if not huge_page_bytes():
        pytest.skip("this kernel has no huge pages")
    ran = subprocess.run(
        [sys.executable, "-c", MAP_FIVE], capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("5", "")


def test_the_doctor_counts_what_regions_got():
    (finding,) = check_huge_regions(this_host())
    if finding.level is Level.OK:
        assert "shared 16 MiB" in finding.found
    else:
        assert finding.fix is not None
