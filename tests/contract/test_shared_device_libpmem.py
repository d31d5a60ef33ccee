"""`shared` over a device that libpmem flushes: the contract, and what is flushed, and when.

What was written is flushed before its notification. Skipped where libpmem is not installed.
"""

import os

import numpy as np
import pytest

from baton.errors import ConfigError, TransferError
from baton.kv.copies import CopyGroup
from baton.testing.transport_contract.kit import PAGE_BYTES, check_write
from baton.testing.transport_pair import whole_pages
from baton.transfer.devices import flushing
from baton.transfer.devices.extents import find_extent
from baton.transfer.interface import Arrived, PageRead
from tests.contract.shared_devices import SharedDeviceContract, SmallDeviceKit

if os.uname().machine != "x86_64":
    pytest.skip("libpmem evicts cache lines on x86 only", allow_module_level=True)
try:
    flushing.load_libpmem()
except ConfigError as exc:
    pytest.skip(str(exc), allow_module_level=True)


class TestSharedDeviceLibpmem(SharedDeviceContract):
    """It does not read: no owner knows when to flush what a peer is going to read."""

    flush = "libpmem"


del SharedDeviceContract


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


class TestWhatIsFlushed(SmallDeviceKit):
    flush = "libpmem"

    def watch(self, pair, remote):
        """The two mappings' accounts, and the order in which they were asked."""
        flushed_by = []
        (mapped,) = pair.writer.transport._remotes.values()
        theirs, own = mapped._pages._device, find_extent(pair.reader.region)
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
