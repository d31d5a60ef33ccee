"""Datagrams of any number and length, from any sender, are read as they were sent."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from baton.errors import ConfigError
from baton.gateway.members.heartbeat_socket import BATCH, HeartbeatSocket
from baton.protocol.heartbeats import HEARTBEAT_BYTES, MAX_RENEWAL_BYTES
from tests.free_ports import find_free_port

LENGTHS = (0, 1, HEARTBEAT_BYTES - 1, HEARTBEAT_BYTES, HEARTBEAT_BYTES + 1, MAX_RENEWAL_BYTES)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_all_that_was_sent_is_read_with_its_sender(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        contextlib.closing(HeartbeatSocket(host, port := find_free_port())) as receiver,
        socket.socket(family, socket.SOCK_DGRAM) as one,
        socket.socket(family, socket.SOCK_DGRAM) as two,
    ):
        sent = []
        for number in range(3 * BATCH + 5):
            sender = (one, two)[number % 2]
            datagram = os.urandom(LENGTHS[number % len(LENGTHS)])
            sender.sendto(datagram, (host, port))
            sent.append((datagram, sender.getsockname()[1]))
        arrived = receiver.read()
        assert arrived.short == [each for each, _ in sent if len(each) <= HEARTBEAT_BYTES]
        long = [(datagram, address[1]) for datagram, address in arrived.long]
        assert long == [each for each in sent if len(each[0]) > HEARTBEAT_BYTES]
        assert {address[0] for _, address in arrived.long} == {host}
        assert receiver.read() == ([], []), "each is read once"
        receiver.send(b"answer", arrived.long[0][1])
        first = one if long[0][1] == one.getsockname()[1] else two
        first.settimeout(20)
        assert first.recv(100) == b"answer"


def test_one_that_is_too_long_is_not_taken_for_a_shorter_one() -> None:
    with (
        contextlib.closing(HeartbeatSocket("127.0.0.1", port := find_free_port())) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.sendto(bytes(4 * MAX_RENEWAL_BYTES), ("127.0.0.1", port))
        sender.sendto(b"next", ("127.0.0.1", port))
        ((datagram, _),) = receiver.read().long
        assert len(datagram) > MAX_RENEWAL_BYTES


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        contextlib.closing(HeartbeatSocket("127.0.0.1", port := find_free_port())),
        pytest.raises(ConfigError, match=f"UDP port {port} of 127.0.0.1.*announce_port"),
    ):
        HeartbeatSocket("127.0.0.1", port)
