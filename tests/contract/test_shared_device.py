"""`shared` over regions that lie in a device; a file stands in for one."""

import os
import socket
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.testing.transport_contract import NetworkTransportContract
from baton.testing.transport_contract.kit import SHAPES, TransportKit
from baton.testing.transport_pair import Side, TransportPair
from baton.transfer.interface import TRANSPORTS, RemoteLost, TransportContext
from baton.transfer.region import allocate_shared_region

DEVICE_BYTES = 256 << 20
GARBAGE_BYTES = 8 << 20
TMPFS = "/dev/shm"


class DeviceKit(TransportKit):
    kind = "shared"
    peer_writes = True
    flush = "none"
    folder: ClassVar[str | None] = TMPFS

    @pytest.fixture(autouse=True)
    def device(self):
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            file.write(b"\xee" * GARBAGE_BYTES)  # an earlier life's
            file.truncate(DEVICE_BYTES)
            self.options = {"device": {"path": file.name, "flush": self.flush}}
            yield Path(file.name)


class SharedDeviceContract(DeviceKit, NetworkTransportContract):
    def connect_stranger(self, descriptor):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(5)
        stranger.connect(b"\0" + descriptor.endpoint.encode())
        return stranger

    def test_regions_lie_in_the_device(self, pair, device):
        pair.reader.fill(seed=7)
        whole = device.read_bytes()
        assert pair.reader.snapshot()[:GARBAGE_BYTES] in whole
        assert pair.writer.snapshot()[:GARBAGE_BYTES] in whole


class TestSharedDevice(SharedDeviceContract):
    pass


class TestSharedDeviceMsync(SharedDeviceContract):
    flush = "msync"
    folder = None  # on a disk


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="evicts on x86 only")
class TestSharedDeviceLibpmem(SharedDeviceContract):
    flush = "libpmem"

    @pytest.fixture(autouse=True)
    def libpmem(self):
        flushing = pytest.importorskip("baton.transfer.devices.flushing")
        try:
            flushing.load_libpmem()
        except flushing.ConfigError as exc:
            pytest.skip(str(exc))


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
        context = TransportContext(self.key, new_epoch(), "127.0.0.1", MachineClock())
        transport = TRANSPORTS.build("shared", options)(context)
        writer = Side.start(transport, context.epoch, allocate_shared_region(SHAPES))
        pair = TransportPair.of(writer, reader)
        pair.writer.transport.attach(reader.descriptor)
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        (lost,) = pair.seen(RemoteLost)
        assert why in str(lost.error)
        pair.close()
