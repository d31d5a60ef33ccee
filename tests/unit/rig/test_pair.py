"""Two processes of a pair, of which one ends."""

import socket

import pytest

from baton.clock import MachineClock
from baton.errors import PeerLostError
from baton.rig.backend import BackendSpec
from baton.rig.channel import Frames, runner_channel
from baton.rig.pair import NodePair


class StandIn:
    pid = None

    def __init__(self, error):
        ours, self.theirs = socket.socketpair()
        self.channel, self._error = runner_channel(Frames(ours, MachineClock())), error

    def last_error(self):
        return self._error

    def close(self):
        self.channel.close()
        self.theirs.close()


@pytest.mark.parametrize("ended", ["driver", "owner"])
def test_the_error_is_that_of_the_process_that_has_ended(ended):
    nodes = {role: StandIn(f"the {role} failed") for role in ("driver", "owner")}
    pair = NodePair(BackendSpec("transport", "tcp", {}), 1, None, reply_timeout_s=5)
    pair._open_nodes = dict(nodes)
    nodes[ended].theirs.close()
    with pytest.raises(PeerLostError, match=rf"\(the {ended} failed\)"):
        pair.call("driver", "anything")
    for node in nodes.values():
        node.close()
