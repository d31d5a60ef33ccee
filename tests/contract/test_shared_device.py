"""`shared` over regions that lie in a device; a file is used in place of one."""

import pytest

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.testing.transport_contract import NetworkReadingContract
from baton.testing.transport_contract.kit import SHAPES
from baton.testing.transport_pair import Side, TransportPair
from baton.transfer.interface import TRANSPORTS, RemoteLost, TransportContext
from baton.transfer.region import allocate_shared_region
from tests.contract.shared_devices import DeviceKit, SharedDeviceContract


class TestSharedDevice(SharedDeviceContract, NetworkReadingContract):
    pass


class TestSharedDeviceMsync(SharedDeviceContract, NetworkReadingContract):
    flush = "msync"
    folder = None  # on a disk


del SharedDeviceContract


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
