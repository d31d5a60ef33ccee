"""Strangers that stay silent or talk nonsense cost their own connection, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.net.endpoints import ATTACH_TIMEOUT_S, MAX_UNPROVED, PROOF_TIMEOUT_S
from baton.net.framing import PREFIX_BYTES, DialerHandshake, encode_frame
from baton.testing.clocks import ManualClock
from baton.testing.transport_contract.kit import (
    NUM_PAGES,
    PAGE_BYTES,
    TransportKit,
    check_write,
)
from baton.testing.transport_pair import TransportPair, whole_pages

if TYPE_CHECKING:
    import socket

    from baton.testing.transport_pair import Side

STEP_S = 0.005
NUM_STEPS = 200
ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]


class StrangerContract(TransportKit):
    """What may come over a fresh connection."""

    @pytest.mark.parametrize(
        "opening",
        [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"\xff" * 64,
            encode_frame(b""),
            encode_frame(b"\0" * 22),
            (1 << 31).to_bytes(PREFIX_BYTES, "little"),
        ],
        ids=["http", "huge", "empty", "zeros", "2 GiB"],
    )
    def test_a_stranger_that_talks_nonsense_is_hung_up_on(
        self, pair: TransportPair, opening: bytes
    ) -> None:
        with self.connect_stranger(pair.reader.descriptor) as stranger:
            stranger.sendall(opening)
            self.check_hung_up(pair.reader, stranger)
        self.check_unharmed(pair)

    def test_a_silent_stranger_is_hung_up_on(self) -> None:
        clock = ManualClock()
        pair = TransportPair.of(self.make_side(), self.make_side(clock=clock))
        with self.connect_stranger(pair.reader.descriptor) as stranger:
            stranger.sendall(b"\x16")
            pair.poll_for(0.01)
            clock.advance(PROOF_TIMEOUT_S + 0.1)
            self.check_hung_up(pair.reader, stranger)
        self.check_unharmed(pair)
        pair.close()

    def test_a_crowd_of_strangers_leaves_room(self, pair: TransportPair) -> None:
        strangers = [self.connect_stranger(pair.reader.descriptor) for _ in range(MAX_UNPROVED)]
        for _ in strangers:
            pair.poll()
        with self.connect_stranger(pair.reader.descriptor) as one_too_many:
            self.check_hung_up(pair.reader, one_too_many)
        for stranger in strangers:
            stranger.close()
        pair.poll_for()
        self.check_unharmed(pair)

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            encode_frame(b""),
            encode_frame(b"\xc1"),
            encode_frame(b"\x91" * 5000),
            encode_frame(msgspec.msgpack.encode({"type": "attach"})),
            ((1 << 20) + 1).to_bytes(PREFIX_BYTES, "little"),
            (1 << 20).to_bytes(PREFIX_BYTES, "little") + b"half of it",
        ],
        ids=["nothing", "empty", "no msgpack", "deep", "no fields", "too large", "truncated"],
    )
    def test_a_peer_with_the_key_that_talks_nonsense_is_hung_up_on(self, message: bytes) -> None:
        clock = ManualClock()
        pair = TransportPair.of(self.make_side(), self.make_side(clock=clock))
        with self.connect_stranger(pair.reader.descriptor) as peer:
            self.prove(pair.reader, peer)
            peer.sendall(message)
            pair.poll_for(0.01)
            clock.advance(ATTACH_TIMEOUT_S + 0.1)
            self.check_hung_up(pair.reader, peer)
        self.check_unharmed(pair)
        pair.close()

    def check_unharmed(self, pair: TransportPair) -> None:
        """The transports still do their work."""
        pair.writer.fill(seed=5)
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, ALL_PAGES)

    def check_hung_up(self, side: Side, stranger: socket.socket) -> None:
        """The transport ends the stranger's connection."""
        stranger.settimeout(STEP_S)
        for _ in range(NUM_STEPS):
            side.transport.poll()
            try:
                if not stranger.recv(4096):
                    return
            except TimeoutError:
                continue
            except ConnectionResetError:
                return
        pytest.fail("the connection is still open")

    def prove(self, side: Side, peer: socket.socket) -> None:
        """Do a dialer's part of the handshake over a blocking socket."""
        handshake = DialerHandshake(self.key, self.kind)
        peer.sendall(handshake.opening())
        peer.settimeout(STEP_S)
        received = b""
        while len(received) < PREFIX_BYTES or len(received) < PREFIX_BYTES + received[0]:
            side.transport.poll()
            with suppress(TimeoutError):
                received += peer.recv(1024)
        peer.sendall(handshake.reply(received[PREFIX_BYTES:]))
        side.transport.poll()
