"""Files in place of devices that regions of `shared` lie in."""

import socket
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from baton.testing.transport_contract import (
    LateNotificationContract,
    MultiArrayContract,
    NetworkTransportContract,
    ReaderTrackingContract,
)
from baton.testing.transport_contract.kit import TransportKit

GARBAGE_BYTES = 8 << 20
TMPFS = "/dev/shm"


class DeviceKit(TransportKit):
    """Every region is an extent of one file."""

    kind = "shared"
    peer_writes = True
    flush = "none"
    folder: ClassVar[str | None] = TMPFS
    device_bytes = 256 << 20
    garbage_bytes = GARBAGE_BYTES

    @pytest.fixture(autouse=True)
    def device(self):
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            file.write(b"\xee" * self.garbage_bytes)  # an earlier life's
            file.truncate(self.device_bytes)
            self.options = {"device": {"path": file.name, "flush": self.flush}}
            yield Path(file.name)


class SmallDeviceKit(DeviceKit):
    """A file without any content yet, of 16 MiB."""

    device_bytes = 16 << 20
    garbage_bytes = 0


class SharedDeviceContract(
    DeviceKit,
    NetworkTransportContract,
    MultiArrayContract,
    LateNotificationContract,
    ReaderTrackingContract,
):
    """What is the same however the device is flushed; it shows no pages in place."""

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
