"""`cuda_ipc` against the public contract, over memory of this host in place of a GPU's.

What a GPU does itself is tested where there is one: tests/gpu.
"""

import socket
from typing import ClassVar

from baton.testing.host_device import allocate_region, build_transport
from baton.testing.transport_contract import NetworkTransportContract


class TestCudaIpc(NetworkTransportContract):
    kind = "cuda_ipc"
    peer_writes = True
    peer_module: ClassVar[str] = "baton.testing.host_device"

    def make_transport(self, context):
        return build_transport(self.kind, self.options)(context)

    def allocate(self, shapes):
        return allocate_region(shapes)

    def connect_stranger(self, descriptor):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.settimeout(5)
        stranger.connect(b"\0" + descriptor.endpoint.encode())
        return stranger
