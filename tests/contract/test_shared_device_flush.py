"""What is flushed of a region in a file on a disk, and what happens when the file is cut short.

What libpmem flushes: test_shared_device_libpmem.py.
"""

import gc
import re
from pathlib import Path

import msgspec
import numpy as np

from baton.testing.transport_contract.kit import PAGE_BYTES, SHAPES, check_write
from baton.testing.transport_pair import whole_pages
from baton.transfer.devices.extents import find_extent
from baton.transfer.interface import PageRead, ReadFailed, WriteFailed
from baton.transfer.region import allocate_shared_region, release_region
from tests.contract.shared_devices import SmallDeviceKit


class TestMsync(SmallDeviceKit):
    folder, flush = None, "msync"  # on a disk: the kernel says which pages are not there yet

    def test_what_was_written_is_on_the_disk_and_nothing_else(self, pair):
        remote, grant = pair.attach(), pair.open_grant(range(64))
        extent = find_extent(pair.reader.region)
        extent.flush()
        assert count_dirty_bytes(extent) == 0
        pair.reader.pages()[40:50] = 1  # not part of any write: stays as it is
        assert count_dirty_bytes(extent) == 10 * PAGE_BYTES
        check_write(pair, remote, grant, [whole_pages([0, 1, 2], [7, 8, 20], PAGE_BYTES)])
        assert count_dirty_bytes(extent) == 10 * PAGE_BYTES
        pair.reader.pages()[7] = 1  # it does see one page
        assert count_dirty_bytes(extent) == 11 * PAGE_BYTES


class TestFileCutShort(SmallDeviceKit):
    def test_writes_fail_and_the_process_lives(self, pair, device):
        remote, grant = pair.attach(), pair.open_grant([1])
        check_write(pair, remote, grant, [whole_pages([0], [1], PAGE_BYTES)])
        with device.open("r+b") as file:
            file.truncate(3 << 20)
        # Its own extent is cut too: what is written comes from memory that is still there.
        source = allocate_shared_region(SHAPES)
        pair.writer.transport.expose(source)
        write = pair.write(remote, grant, [whole_pages([0], [1], PAGE_BYTES)])
        transfer = pair.writer.transport.submit(
            msgspec.structs.replace(write, region=source.handle)
        )
        copies = pair.write(remote, grant, [whole_pages([1], [0], PAGE_BYTES)]).copies
        read = pair.writer.transport.read(PageRead(remote, source.handle, copies))
        pair.pump(lambda: bool(pair.seen(ReadFailed)))
        for failed, id_ in ((pair.seen(WriteFailed), transfer), (pair.seen(ReadFailed), read)):
            assert [event.transfer for event in failed] == [id_]
            assert "cut short" in str(failed[0].error)
        del failed
        pair.writer_events.clear()  # their tracebacks see the source's pages
        gc.collect()
        release_region(source)


def count_dirty_bytes(mapping):
    """Bytes of this process' mapping whose pages are dirty, in the page table or the page cache."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    for block in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        if int(block.split("-")[0], 16) == address:
            return 1024 * sum(map(int, re.findall(r"(?:Shared|Private)_Dirty: +(\d+) kB", block)))
    raise AssertionError("not mapped")
