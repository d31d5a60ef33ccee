import socket
from baton.testing.transport_contract import NetworkTransportContract, TransportContract
from baton.testing.transport_contract.strangers import StrangerContract
class TestNixl(NetworkTransportContract):
    kind = "nixl"; peer_writes = True
    def connect_stranger(self, descriptor):
        s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(b"\0" + descriptor.endpoint.encode()); return s
class TestNixlNetwork(TransportContract, StrangerContract):
    kind = "nixl"; peer_writes = True; options = {"lanes": "network"}
    def connect_stranger(self, descriptor):
        host, port = descriptor.endpoint.split(":")
        return socket.create_connection((host, int(port)), timeout=5)
