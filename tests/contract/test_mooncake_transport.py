"""`mooncake` against the public contract; skipped where Mooncake does not load.

(It needs libibverbs, also for TCP.)
"""

import socket
import subprocess
import sys

import pytest

from baton.testing.transport_contract import NetworkReadingContract, NetworkTransportContract

LOADS = subprocess.run(
    [sys.executable, "-c", "import mooncake.engine"], capture_output=True, check=False
)
if LOADS.returncode != 0:
    reason = LOADS.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    pytest.skip(f"Mooncake does not load: {reason}", allow_module_level=True)


class TestMooncake(NetworkTransportContract, NetworkReadingContract):
    kind = "mooncake"
    peer_writes = True

    def connect_unauthenticated(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)
