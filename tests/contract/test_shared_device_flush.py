"""What is flushed of a region in a device, and when: what was written, before its notification."""

import gc
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.errors import TransferError
from baton.kv.copies import CopyGroup
from baton.testing.transport_contract.kit import PAGE_BYTES, SHAPES, TransportKit, check_write
from baton.testing.transport_pair import whole_pages
from baton.transfer.devices import flushing
from baton.transfer.devices.extents import find_extent
from baton.transfer.interface import Arrived, PageRead, ReadFailed, WriteFailed
from baton.transfer.region import allocate_shared_region, release_region

DEVICE_BYTES = 16 << 20


class Accounts:
    """Goes between a region and its real flusher, and writes down what is asked of it."""

    def __init__(self, flusher, count_arrived, flushed_by):
        self.unit_bytes, self.evicts = flusher.unit_bytes, flusher.evicts
        self._flusher, self._count_arrived, self._flushed_by = flusher, count_arrived, flushed_by
        self.calls = []

    def flush(self, mapping, starts, lengths):
        self.calls.append((
            list(zip(starts.tolist(), lengths.tolist(), strict=True)),
            self._count_arrived(),
        ))
        self._flushed_by.append(self)
        self._flusher.flush(mapping, starts, lengths)


class DeviceKit(TransportKit):
    kind = "shared"
    peer_writes = True

    @pytest.fixture(autouse=True)
    def device(self):
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            file.truncate(DEVICE_BYTES)
            self.options = {"device": {"path": file.name, "flush": self.flush}}
            yield Path(file.name)


class TestLibpmem(DeviceKit):
    folder, flush = "/dev/shm", "libpmem"

    @pytest.fixture(autouse=True)
    def libpmem(self):
        try:
            flushing.load_libpmem()
        except flushing.ConfigError as exc:
            pytest.skip(str(exc))

    def watch(self, pair, remote):
        """The two mappings' accounts, and the order in which they were asked."""
        flushed_by = []
        (mapped,) = pair.writer.transport._remotes.values()
        theirs, own = mapped._pages._mapping, find_extent(pair.reader.region)
        writer = Accounts(theirs.flusher, lambda: len(pair.seen(Arrived)), flushed_by)
        reader = Accounts(own.flusher, lambda: len(pair.seen(Arrived)), flushed_by)
        theirs.flusher, own.flusher = writer, reader
        return writer, reader, flushed_by

    def test_a_write_flushes_what_it_wrote_and_its_receiver_what_it_will_read(self, pair):
        remote = pair.attach()
        writer, reader, flushed_by = self.watch(pair, remote)
        grant = pair.open_grant([3, 4, 5, 9])
        # Before anybody is told of the grant: all of its pages, in both arrays, neighbours joined.
        second = pair.reader.region.arrays[1].offset_bytes
        assert reader.calls.pop()[0] == [
            (3 * PAGE_BYTES, 3 * PAGE_BYTES),
            (9 * PAGE_BYTES, PAGE_BYTES),
            (second + 3 * 1536, 3 * 1536),
            (second + 9 * 1536, 1536),
        ]
        flushed_by.clear()
        groups = [
            whole_pages([0, 1], [5, 4], PAGE_BYTES),
            CopyGroup(np.array([2]), np.array([9]), np.array([[0, 70, 10], [200, 1000, 24]])),
        ]
        check_write(pair, remote, grant, groups)
        assert writer.calls == [
            (
                [
                    (4 * PAGE_BYTES, 2 * PAGE_BYTES),
                    (9 * PAGE_BYTES + 64, 64),
                    (9 * PAGE_BYTES + 960, 64),
                ],
                0,
            )
        ]
        assert reader.calls == [
            ([(3 * PAGE_BYTES, 3 * PAGE_BYTES), (9 * PAGE_BYTES, PAGE_BYTES)], 0)
        ]
        assert flushed_by == [writer, reader]

    def test_the_other_array_is_named_by_the_notification(self, pair):
        remote = pair.attach()
        writer, reader, _ = self.watch(pair, remote)
        grant = pair.open_grant([2])
        reader.calls.clear()
        check_write(pair, remote, grant, [whole_pages([0], [2], 1536)], array=1)
        second = pair.reader.region.arrays[1].offset_bytes
        assert [call[0] for call in reader.calls] == [[(second + 2 * 1536, 1536)]]
        assert writer.calls[0] == reader.calls[0]

    def test_it_does_not_read(self, pair):
        remote = pair.attach()
        assert not pair.writer.transport.capabilities.reads
        copies = pair.write(remote, b"w" * 16, [whole_pages([0], [0], PAGE_BYTES)]).copies
        with pytest.raises(TransferError, match="flush"):
            pair.writer.transport.read(PageRead(remote, pair.writer.region.handle, copies))

    def test_a_new_region_is_flushed_whole(self, monkeypatch):
        asked = []

        class Asking(flushing.LibpmemFlusher):
            def flush(self, mapping, starts, lengths):
                asked.append((starts.tolist(), lengths.tolist(), not any(mapping[:4096])))
                super().flush(mapping, starts, lengths)

        monkeypatch.setattr(flushing, "LibpmemFlusher", Asking)
        side = self.make_side()
        assert asked == [([0], [len(side.region.memory)], True)]
        side.close()


class TestMsync(DeviceKit):
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


class TestFileCutShort(DeviceKit):
    folder, flush = "/dev/shm", "none"

    def test_writes_fail_and_the_process_lives(self, pair, device):
        remote, grant = pair.attach(), pair.open_grant([1])
        check_write(pair, remote, grant, [whole_pages([0], [1], PAGE_BYTES)])
        with device.open("r+b") as file:
            file.truncate(3 << 20)
        # Its own extent is cut too: what is written comes from memory that is still there.
        source = allocate_shared_region(SHAPES)
        pair.writer.transport.expose(source)
        write = pair.write(remote, grant, [whole_pages([0], [1], PAGE_BYTES)])
        transfer = pair.writer.transport.submit(replace(write, region=source.handle))
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
