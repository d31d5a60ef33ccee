"""`shared` over regions that lie in a device; a file stands in for one."""

import os
import socket
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from baton.testing.transport_contract import NetworkTransportContract

DEVICE_BYTES = 256 << 20
GARBAGE_BYTES = 8 << 20
TMPFS = "/dev/shm"


class SharedDeviceContract(NetworkTransportContract):
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
