"""What a dialer does when its peer goes in the middle of the handshake."""

import os
import socket

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.errors import TransferError
from baton.net.connection import EventReactor
from baton.net.endpoints import Dialer
from baton.net.framing import MAX_HANDSHAKE_BYTES, PREFIX_BYTES, ListenerHandshake

KEY = Credentials.of(ClusterKey(bytes(range(32))))
PURPOSE = "test"


def test_a_peer_that_is_gone_before_the_last_frame_is_a_failure_and_no_success():
    name = b"\0baton-test-" + os.urandom(8).hex().encode()
    reactor, proved, failed = EventReactor(MachineClock()), [], []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        dialed = socket.socket(socket.AF_UNIX)
        dialer = Dialer(reactor, KEY, PURPOSE, timeout_s=5.0)
        dialer.dial(dialed, name, proved.append, failed.append)
        peer, _ = listener.accept()
        reactor.poll()
        opening = peer.recv(PREFIX_BYTES + MAX_HANDSHAKE_BYTES)
        peer.sendall(ListenerHandshake(KEY, PURPOSE).reply(opening[PREFIX_BYTES:]))
        peer.close()
        for _ in range(3):
            reactor.poll()
    reactor.close()
    assert not proved
    assert [isinstance(error, TransferError) for error in failed] == [True]
