"""Connections begin with authenticated peers only, and end without disturbing others."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.session import TAG_BYTES, Session
from baton.errors import TransferError
from baton.ids import TicketId, new_region_handle
from baton.net.channel import needs_sealing
from baton.net.endpoints import ATTACH_TIMEOUT_S, MAX_UNPROVED, PROOF_TIMEOUT_S
from baton.net.framing import PREFIX_BYTES, DialerHandshake, encode_frame
from baton.testing.clocks import ManualClock
from baton.testing.transport_contract.kit import NUM_PAGES, PAGE_BYTES, TransportKit, check_write
from baton.testing.transport_pair import Side, TransportPair, is_about, whole_pages
from baton.transfer.interface import (
    GrantQuiescent,
    PageArray,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from baton.transfer.interface import RegionDescriptor, RemoteId, TransferId

STEP_S = 0.005
NUM_STEPS = 200
ALL_PAGES = [whole_pages(range(NUM_PAGES), range(NUM_PAGES), PAGE_BYTES)]
LIES: list[Callable[[RegionDescriptor], RegionDescriptor]] = [
    lambda true: msgspec.structs.replace(true, handle=new_region_handle()),
    lambda true: msgspec.structs.replace(true, arrays=true.arrays[:1]),
    lambda true: msgspec.structs.replace(
        true, arrays=(PageArray(0, PAGE_BYTES, 1 << 20), *true.arrays[1:])
    ),
    lambda true: msgspec.structs.replace(
        true, arrays=(PageArray(0, PAGE_BYTES // 2, NUM_PAGES), *true.arrays[1:])
    ),
]
"""Another region, fewer arrays, more pages, other pages."""
NONSENSE: list[dict[str, object]] = [
    {"transport": "pigeon"},
    {"endpoint": ""},
    {"endpoint": "\0/etc/passwd"},
    {"endpoint": "example.invalid:80"},
    {"endpoint": "127.0.0.1:99999"},
    {"arrays": ()},
    {"arrays": (PageArray(0, 0, 1),)},
    {"arrays": (PageArray(0, 1 << 62, 1 << 62),)},
    {"arrays": (PageArray(-64, 64, 1),)},
]
OPENINGS = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff" * 64,
    encode_frame(b""),
    encode_frame(b"\0" * 22),
    (1 << 31).to_bytes(PREFIX_BYTES, "little"),
]
"""HTTP, something huge, nothing, zeros, 2 GiB announced."""
PROVED_NONSENSE = [
    (None, b""),
    (b"", b""),
    (b"\xc1", b""),
    (b"\x91" * 5000, b""),
    (msgspec.msgpack.encode({"type": "attach"}), b""),
    (None, ((1 << 20) + TAG_BYTES + 1).to_bytes(PREFIX_BYTES, "little")),
    (None, (1 << 20).to_bytes(PREFIX_BYTES, "little") + b"half of it"),
]
"""Frames, and what follows them: nothing, an empty one, no msgpack, a deep one, one without fields,
one too large, one that is cut short."""


class PeerContract(TransportKit):
    """Beginnings and ends of a connection."""

    def test_detaching_ends_the_remote_and_its_writes(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        transfers = [self.slot(pair, remote, grant) for _ in range(20)]
        pair.writer.transport.detach(remote)
        pair.writer.transport.detach(remote)
        with pytest.raises(TransferError):
            self.slot(pair, remote, grant)
        pair.pump(lambda: len(ended(pair)) == len(transfers))
        pair.poll_for()
        assert sorted(ended(pair)) == transfers
        assert not pair.seen(RemoteLost)
        again = pair.attach()
        check_write(pair, again, grant, ALL_PAGES)
        pair.reader.transport.close_grant(grant)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])

    def test_detaching_makes_the_writers_grants_quiescent(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, ALL_PAGES)
        pair.reader.transport.close_grant(grant)
        pair.writer.transport.detach(remote)
        pair.pump(lambda: pair.seen(GrantQuiescent) == [GrantQuiescent(grant)])

    def test_a_receiver_that_leaves_is_lost_once_and_writes_fail(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        check_write(pair, remote, grant, ALL_PAGES)
        before = [self.slot(pair, remote, grant) for _ in range(5)]
        pair.reader.transport.close()
        pair.pump(lambda: bool(pair.seen(RemoteLost)))
        after = [self.slot(pair, remote, grant) for _ in range(5)]
        pair.pump(lambda: len(ended(pair)) == 11)
        pair.poll_for()
        assert sorted(ended(pair))[1:] == before + after
        assert {failed.transfer for failed in pair.seen(WriteFailed)} >= set(after)
        assert [lost.remote for lost in pair.seen(RemoteLost)] == [remote]

    def test_a_writer_that_leaves_disturbs_no_peer(self, pair: TransportPair) -> None:
        other = TransportPair.of(self.make_side(), pair.reader)
        other.writer.fill(seed=9)
        remote, remote_of_other = pair.attach(), other.attach()
        grant = pair.open_grant(range(NUM_PAGES))
        self.slot(pair, remote, grant)
        other.writer.close()
        del remote_of_other
        pair.pump(lambda: bool(pair.seen(WriteCompleted)))
        check_write(pair, remote, grant, ALL_PAGES)

    def test_closing_twice_is_closing_once(self, pair: TransportPair) -> None:
        remote, grant = pair.attach(), pair.open_grant(range(NUM_PAGES))
        self.slot(pair, remote, grant)
        for side in (pair.writer, pair.reader):
            side.transport.close()
            side.transport.close()
            assert side.transport.poll() == []

    def test_another_cluster_key_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        other = self.make_side(credentials=Credentials.generate())
        pair = TransportPair.of(other, self.make_side())
        with caplog.at_level(logging.WARNING):
            self.check_lost(pair, pair.reader.descriptor)
        assert "cluster" in caplog.text
        assert other.epoch not in caplog.text
        pair.close()

    def test_a_description_that_does_not_fit_is_lost(self, pair: TransportPair) -> None:
        for lie in LIES:
            self.check_lost(pair, lie(pair.reader.descriptor))
        assert not any(pair.reader.snapshot())

    def test_a_description_that_makes_no_sense_is_not_attached(self, pair: TransportPair) -> None:
        for nonsense in NONSENSE:
            with pytest.raises(TransferError):
                pair.writer.transport.attach(
                    msgspec.structs.replace(pair.reader.descriptor, **nonsense)
                )

    def test_a_receiver_that_is_not_there_is_lost(self, pair: TransportPair) -> None:
        gone = self.make_side()
        gone.close()
        self.check_lost(pair, gone.descriptor)

    def test_an_attach_that_is_not_answered_is_lost(self) -> None:
        clock = ManualClock()
        pair = TransportPair.of(self.make_side(clock=clock), self.make_side())
        remote = pair.writer.transport.attach(pair.reader.descriptor)
        pair.writer_events += pair.writer.transport.poll()
        assert not pair.writer_events  # the reader has not been polled
        clock.advance(6.0)
        pair.pump(lambda: bool(pair.writer_events))
        assert [event.remote for event in pair.seen(RemoteLost)] == [remote]
        pair.close()

    def slot(self, pair: TransportPair, remote: RemoteId, grant: TicketId) -> TransferId:
        """Submit a write of all pages."""
        return pair.writer.transport.submit(pair.write(remote, grant, ALL_PAGES))

    def check_lost(self, pair: TransportPair, descriptor: RegionDescriptor) -> None:
        """Attaching fails, once, and nothing else is reported."""
        num_before = len(pair.writer_events)
        remote = pair.writer.transport.attach(descriptor)
        pair.pump(lambda: any(is_about(event, remote) for event in pair.writer_events))
        pair.poll_for()
        assert [type(event) for event in pair.writer_events[num_before:]] == [RemoteLost]
        assert not pair.reader_events


@dataclass(frozen=True)
class ProvedFrames:
    """Makes and reads the frames of a peer that is a socket of the test's."""

    session: Session | None

    def seal(self, body: bytes) -> bytes:
        """The next frame."""
        return encode_frame(body if self.session is None else self.session.seal(body))

    def open(self, body: bytes) -> bytes:
        """What the next frame's body was."""
        return body if self.session is None else self.session.open(body)


class UnauthenticatedPeerContract(TransportKit):
    """What may come over a fresh connection costs that connection, and nothing else."""

    def test_an_unauthenticated_peer_that_sends_nonsense_is_hung_up_on(
        self, pair: TransportPair
    ) -> None:
        for opening in OPENINGS:
            with self.connect_unauthenticated(pair.reader.descriptor) as peer:
                peer.sendall(opening)
                self.check_hung_up(pair.reader, peer)
        self.check_unharmed(pair)

    def test_a_silent_unauthenticated_peer_is_hung_up_on(self) -> None:
        clock = ManualClock()
        pair = TransportPair.of(self.make_side(), self.make_side(clock=clock))
        with self.connect_unauthenticated(pair.reader.descriptor) as peer:
            peer.sendall(b"\x16")
            pair.poll_for(0.01)
            clock.advance(PROOF_TIMEOUT_S + 0.1)
            self.check_hung_up(pair.reader, peer)
        self.check_unharmed(pair)
        pair.close()

    def test_a_crowd_of_unauthenticated_peers_leaves_room(self, pair: TransportPair) -> None:
        peers = [self.connect_unauthenticated(pair.reader.descriptor) for _ in range(MAX_UNPROVED)]
        for _ in peers:
            pair.poll()
        try:
            with self.connect_unauthenticated(pair.reader.descriptor) as newest:
                self.check_hung_up(pair.reader, peers[0])  # the oldest gives its place
                self.prove(pair.reader, newest)
        finally:
            for peer in peers:
                peer.close()
        pair.poll_for()
        self.check_unharmed(pair)

    def test_a_peer_with_the_key_that_sends_nonsense_is_hung_up_on(self) -> None:
        clock = ManualClock()
        pair = TransportPair.of(self.make_side(), self.make_side(clock=clock))
        for body, rest in PROVED_NONSENSE:
            with self.connect_unauthenticated(pair.reader.descriptor) as peer:
                frames = self.prove(pair.reader, peer)
                peer.sendall((b"" if body is None else frames.seal(body)) + rest)
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

    def check_hung_up(self, side: Side, peer: socket.socket) -> None:
        """The transport ends the peer's connection."""
        peer.settimeout(STEP_S)
        for _ in range(NUM_STEPS):
            side.transport.poll()
            try:
                if not peer.recv(4096):
                    return
            except TimeoutError:
                continue
            except ConnectionResetError:
                return
        pytest.fail("the connection is still open")

    def prove(self, side: Side, peer: socket.socket) -> ProvedFrames:
        """Do a dialer's part of the handshake over a blocking socket; what its frames need then."""
        handshake = DialerHandshake(self.credentials, self.kind)
        peer.sendall(handshake.opening())
        peer.settimeout(STEP_S)
        received = b""
        while len(received) < PREFIX_BYTES or len(received) < PREFIX_BYTES + received[0]:
            side.transport.poll()
            with suppress(TimeoutError):
                received += peer.recv(1024)
        peer.sendall(handshake.reply(received[PREFIX_BYTES:]))
        side.transport.poll()
        return ProvedFrames(handshake.session if needs_sealing(peer) else None)


def ended(pair: TransportPair) -> list[TransferId]:
    """Transfers whose end was reported to the writer."""
    return [
        event.transfer
        for event in pair.writer_events
        if isinstance(event, WriteCompleted | WriteFailed)
    ]
