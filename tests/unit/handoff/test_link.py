"""Two links over a socket pair: bytes move only when the test says so, nothing sleeps."""

from __future__ import annotations

import select
import socket
import struct
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.session import TAG_BYTES
from baton.clock import Instant
from baton.errors import AuthenticationError, BatonError, PeerLostError, ProtocolError
from baton.handoff.link import PURPOSE, Link, LinkPhase
from baton.handoff.messages import MAX_MESSAGE_BYTES, Failed, Message, Ping
from baton.ids import TicketId
from baton.net.framing import MAGIC, MAX_HANDSHAKE_BYTES, DialerHandshake, FrameDecoder
from tests.examples import examples

KEY = Credentials.of(ClusterKey(b"k" * 32))
NOW = Instant(1.0)


def pair(dialer_key: Credentials = KEY) -> tuple[Link, Link]:
    left, right = _tcp_pair()
    dialer = Link(left, NOW, DialerHandshake(dialer_key, PURPOSE))
    return dialer, Link.accept(right, KEY, NOW)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def pump(*links: Link) -> list[Message]:
    messages: list[Message] = []
    for _ in range(4):
        for link in links:
            link.flush()
        readable, _, _ = select.select([link.sock for link in links], [], [], 0.05)
        for link in links:
            if link.sock in readable:
                messages += link.receive(NOW)
    return messages


def receive(link: Link) -> list[Message]:
    """Wait until something is there (the loopback takes a moment), then read it."""
    select.select([link.sock], [], [], 2.0)
    return link.receive(NOW)


def close(*links: Link) -> None:
    for link in links:
        link.close()


def test_messages_wait_for_the_challenge_and_keep_their_order() -> None:
    dialer, listener = pair()
    said = [Ping(1.0), Failed(TicketId(b"t" * 16), "x"), Ping(2.0)]
    for message in said:
        dialer.send(message)
    assert dialer.phase is LinkPhase.CONNECTING
    assert pump(dialer, listener) == said
    assert dialer.phase is listener.phase is LinkPhase.UP
    listener.send(Ping(3.0))
    assert pump(dialer, listener) == [Ping(3.0)]
    close(dialer, listener)


def test_a_dialer_with_another_key_sees_that_the_listener_is_not_its_own() -> None:
    dialer, listener = pair(dialer_key=Credentials.of(ClusterKey(b"x" * 32)))
    with pytest.raises(AuthenticationError):
        pump(dialer, listener)
    close(dialer, listener)


@settings(deadline=None, max_examples=examples(25))
@given(st.binary(min_size=48, max_size=400))
def test_a_stranger_gets_nothing_but_an_error(garbage: bytes) -> None:
    stranger, right = _tcp_pair()
    listener = Link.accept(right, KEY, NOW)
    stranger.sendall(garbage)
    stranger.shutdown(socket.SHUT_WR)
    with closing(stranger), pytest.raises(BatonError):
        pump(listener)
    listener.close()


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    dialer, listener = pair()
    pump(dialer, listener)
    dialer.sock.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + TAG_BYTES + 1))
    with pytest.raises(ProtocolError, match="at most"):
        receive(listener)
    close(dialer, listener)


def test_a_closed_connection_is_a_lost_peer() -> None:
    dialer, listener = pair()
    pump(dialer, listener)
    dialer.close()
    with pytest.raises(PeerLostError):
        receive(listener)
    listener.close()


def test_an_answer_that_comes_in_two_parts_is_not_taken_for_a_hello() -> None:
    left, right = _tcp_pair()
    listener = Link.accept(right, KEY, NOW)
    handshake = DialerHandshake(KEY, PURPOSE)
    left.sendall(handshake.opening())
    receive(listener)
    decoder = FrameDecoder(MAX_HANDSHAKE_BYTES)
    while (num_missing := decoder.num_missing_bytes) > 0:
        decoder.feed(left.recv(num_missing))
    proof = decoder.take()
    assert proof is not None
    answer = handshake.reply(proof)
    left.sendall(answer[:16])
    receive(listener)
    assert listener.phase is LinkPhase.AUTHENTICATING
    left.sendall(answer[16:])
    receive(listener)
    assert listener.phase is LinkPhase.UP
    left.close()
    listener.close()


def test_the_first_frames_are_those_of_every_baton_connection() -> None:
    left, right = _tcp_pair()
    dialer = Link(left, NOW, DialerHandshake(KEY, PURPOSE))
    dialer.send(Ping(1.0))
    dialer.flush()
    first = right.recv(1024)
    assert first[:10] == struct.pack("<I", 38) + MAGIC
    assert len(first) == 4 + 38
    dialer.close()
    right.close()


@pytest.mark.parametrize("num_bytes", [0, 23, MAX_HANDSHAKE_BYTES])
def test_a_stranger_cannot_announce_more_than_a_handshake(num_bytes: int) -> None:
    left, right = _tcp_pair()
    listener = Link.accept(right, KEY, NOW)
    left.sendall(struct.pack("<I", num_bytes) + b"x" * num_bytes)
    with pytest.raises(ProtocolError):
        receive(listener)
    left.close()
    listener.close()
