"""A blocking channel of framed messages between the runner and one process of a pair."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from baton.auth.session import TAG_BYTES, Session
from baton.errors import PeerLostError, ProtocolError
from baton.net.framing import (
    DialerHandshake,
    FrameDecoder,
    ListenerHandshake,
    decode,
    encode,
    encode_frame,
)
from baton.rig.backend import MAX_BODY_BYTES, Command, Reply

if TYPE_CHECKING:
    import socket

    from baton.auth.credentials import Credentials
    from baton.clock import Clock

PURPOSE = "bench"
SEND_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 5.0

Sent = TypeVar("Sent", bound=msgspec.Struct)
Received = TypeVar("Received")


class Frames:
    """Length-prefixed bodies on a blocking stream socket, which it owns."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._socket, self._clock = sock, clock
        self._decoder = FrameDecoder(MAX_BODY_BYTES + TAG_BYTES)
        self.session: Session | None = None
        """Set once the peer has proved the key; a pipe between parent and child needs none."""

    @property
    def fd(self) -> int:
        """Readable when bytes have arrived."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a whole frame.

        Raises:
            PeerLostError: the connection is broken, or the peer does not read.
        """
        try:
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.sendall(frame)
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc

    def send_body(self, body: bytes) -> None:
        """Send one frame; see `send`."""
        self.send(encode_frame(body if self.session is None else self.session.seal(body)))

    def receive(self, timeout_s: float) -> bytes:
        """Receive one body, and no byte after it.

        Raises:
            AuthenticationError: the frame is not the one that the peer sent next.
            PeerLostError: the connection is broken or closed, or it took too long.
            ProtocolError: the frame is too large.
        """
        deadline = self._clock.now() + timeout_s
        while (num_missing := self._decoder.num_missing_bytes) > 0:
            left = deadline - self._clock.now()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise PeerLostError(f"no answer within {timeout_s:g} s")
            try:
                data = self._socket.recv(num_missing)
            except OSError as exc:
                raise PeerLostError(f"the connection broke: {exc}") from exc
            if not data:
                raise PeerLostError("the other process has ended")
            self._decoder.feed(data)
        body = self._decoder.take()
        if body is None:
            raise ProtocolError("a frame without an end")
        return body if self.session is None else self.session.open(body)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Channel(Generic[Sent, Received]):
    """Sends messages of one union and receives those of another."""

    def __init__(self, frames: Frames, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        self._frames, self._decoder = frames, decoder
        self.close = frames.close

    @property
    def fd(self) -> int:
        """Readable when a message has begun to arrive."""
        return self._frames.fd

    def send(self, message: Sent) -> None:
        """Send one message; see `Frames.send`."""
        self._frames.send_body(encode(message))

    def receive(self, timeout_s: float) -> Received:
        """Receive one message; see `Frames.receive`."""
        return decode(self._decoder, self._frames.receive(timeout_s))


def runner_channel(frames: Frames) -> Channel[Command, Reply]:
    """The end that sends commands."""
    return Channel(frames, msgspec.msgpack.Decoder(Reply))


def node_channel(frames: Frames) -> Channel[Reply, Command]:
    """The end that receives commands."""
    return Channel(frames, msgspec.msgpack.Decoder(Command))


def authenticate_as_dialer(frames: Frames, credentials: Credentials) -> None:
    """Prove the cluster key to a listening host, which proves it too.

    Raises:
        AuthenticationError: the listener does not hold the key.
        PeerLostError: it closed the connection, most likely because this side has another key.
        ProtocolError: it does not speak this protocol.
    """
    handshake = DialerHandshake(credentials, PURPOSE)
    frames.send(handshake.opening())
    frames.send(handshake.reply(frames.receive(HANDSHAKE_TIMEOUT_S)))
    frames.session = handshake.session


def authenticate_as_listener(frames: Frames, credentials: Credentials) -> None:
    """Prove the cluster key to the dialer, which proves it too; see `authenticate_as_dialer`."""
    handshake = ListenerHandshake(credentials, PURPOSE)
    while not handshake.done:
        reply = handshake.reply(frames.receive(HANDSHAKE_TIMEOUT_S))
        if reply:
            frames.send(reply)
    frames.session = handshake.session
