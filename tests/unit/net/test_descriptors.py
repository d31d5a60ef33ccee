"""A descriptor comes with a frame; a peer cannot make this process hold many."""

import os
import socket
from pathlib import Path

import pytest

from baton.errors import ProtocolError
from baton.net.channel import Channel
from baton.net.framing import encode_frame

NULL = Path(os.devnull)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield Channel(ours, 1024), theirs


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_frame_that_comes_in_pieces_has_its_descriptor(ends):
    channel, theirs = ends
    message = encode_frame(b"body")
    with NULL.open("rb") as file:
        socket.send_fds(theirs, [message[:3]], [file.fileno()])
    assert channel.receive_body_and_fd() is None
    theirs.sendall(message[3:])
    body, fd = channel.receive_body_and_fd()
    assert (body, os.path.samestat(os.fstat(fd), NULL.stat())) == (b"body", True)
    os.close(fd)


def test_descriptors_with_each_byte_end_the_connection_and_are_closed(ends):
    channel, theirs = ends
    before = open_descriptors()
    with NULL.open("rb") as file:
        for at in range(3):
            socket.send_fds(theirs, [encode_frame(b"body")[at : at + 1]], [file.fileno()])
    with pytest.raises(ProtocolError, match="several descriptors"):
        channel.receive_body_and_fd()
    channel.close()
    assert open_descriptors() == before - 1
