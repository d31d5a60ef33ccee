"""Whose end of a process is watched, and what a process without descriptors does about it."""

import os
import select
import socket

import pytest

from baton.errors import TransferError
from baton.net.endpoints import open_peer_process
from tests.descriptors import no_descriptors


def test_a_peers_process_is_watched_or_the_peer_is_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        with no_descriptors(), pytest.raises(TransferError, match="Too many open files"):
            open_peer_process(ours)
        process = open_peer_process(ours)
        assert not select.select([process], [], [], 0)[0]  # it is this one
        os.close(process)
