"""`shared` over regions that lie in a device; a file is used in place of one."""

import gc
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.testing.transport_contract import (
    LateNotificationContract,
    MultiArrayContract,
    NetworkReadingContract,
    NetworkTransportContract,
    ReaderTrackingContract,
)
from baton.testing.transport_contract.kit import PAGE_BYTES, SHAPES, TransportKit, check_write
from baton.testing.transport_pair import Side, TransportPair, whole_pages
from baton.transfer.interface import (
    TRANSPORTS,
    PageRead,
    ReadFailed,
    RemoteLost,
    TransportContext,
    WriteFailed,
)
from baton.transfer.region import allocate_shared_region, release_region

GARBAGE_BYTES = 8 << 20
TMPFS = "/dev/shm"


class DeviceKit(TransportKit):
    """Every region is an extent of one file."""

    kind = "shared"
    peer_writes = True
    device_bytes = 256 << 20
    garbage_bytes = GARBAGE_BYTES

    @pytest.fixture(autouse=True)
    def device(self):
        with tempfile.NamedTemporaryFile(dir=TMPFS) as file:
            file.write(b"\xee" * self.garbage_bytes)  # an earlier life's
            file.truncate(self.device_bytes)
            self.options = {"device": {"path": file.name}}
            yield Path(file.name)


class TestSharedDevice(
    DeviceKit,
    NetworkTransportContract,
    MultiArrayContract,
    LateNotificationContract,
    ReaderTrackingContract,
    NetworkReadingContract,
):
    """It shows no pages in place."""

    def connect_unauthenticated(self, descriptor):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(b"\0" + descriptor.endpoint.encode())
        return sock

    def test_regions_lie_in_the_device(self, pair, device):
        pair.reader.fill(seed=7)
        whole = device.read_bytes()
        assert pair.reader.snapshot()[:GARBAGE_BYTES] in whole
        assert pair.writer.snapshot()[:GARBAGE_BYTES] in whole


class TestOneSideWithoutTheDevice(DeviceKit):
    """The writer learns why it cannot attach, and lives."""

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, "this worker has none"),
            ({"device": {"path": "/dev/null"}}, "no DAX device"),
            ({"device": {"path": "/nowhere/at/all"}}, "No such file"),
            ({"device": {"path": "other"}}, "is no extent of"),
        ],
    )
    def test_the_peer_is_lost(self, options, why, tmp_path):
        reader = self.make_side()
        if options.get("device") == {"path": "other"}:
            other = tmp_path / "other"
            other.write_bytes(bytes(8 << 20))
            options = {"device": {"path": str(other)}}
        context = TransportContext(self.credentials, new_epoch(), "127.0.0.1", MachineClock())
        transport = TRANSPORTS.build("shared", options)(context)
        writer = Side.start(transport, context.epoch, allocate_shared_region(SHAPES))
        pair = TransportPair.of(writer, reader)
        pair.writer.transport.attach(reader.descriptor)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        (lost,) = pair.seen(RemoteLost)
        assert why in str(lost.error)
        pair.close()


class TestFileCutShort(DeviceKit):
    device_bytes = 16 << 20
    garbage_bytes = 0

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
