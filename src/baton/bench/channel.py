"""A blocking, framed conversation between conductor and one process of a pair."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from baton.bench.orders import MAX_BODY_BYTES, Answer, Order
from baton.errors import PeerLostError, ProtocolError
from baton.net.framing import DialerHandshake, FrameDecoder, ListenerHandshake, encode_frame
from baton.transfer.messages import decode, encode

if TYPE_CHECKING:
    import socket

    from baton.auth.key import ClusterKey
    from baton.clock import Clock

PURPOSE = "bench"
PROOF_TIMEOUT_S = 5.0

Said = TypeVar("Said", bound=msgspec.Struct)
Heard = TypeVar("Heard")


class Frames:
    """Bodies on a blocking stream socket, each by a deadline. Owns the socket."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._socket, self._clock = sock, clock
        self._decoder = FrameDecoder(MAX_BODY_BYTES)

    @property
    def fd(self) -> int:
        """Readable when there is something to hear."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a whole frame.

        Raises:
            PeerLostError: the connection is broken, or the peer does not read.
        """
        try:
            self._socket.settimeout(PROOF_TIMEOUT_S)
            self._socket.sendall(frame)
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc

    def receive(self, timeout_s: float) -> bytes:
        """The next body, never a byte beyond it.

        Raises:
            PeerLostError: the connection is broken or at its end, or it took too long.
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
        return body

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Channel(Generic[Said, Heard]):
    """Says messages of one kind and hears those of another."""

    def __init__(self, frames: Frames, decoder: msgspec.msgpack.Decoder[Heard]) -> None:
        self._frames, self._decoder = frames, decoder

    @property
    def fd(self) -> int:
        """Readable when there is something to hear."""
        return self._frames.fd

    def say(self, message: Said) -> None:
        """Send one message; see `Frames.send`."""
        self._frames.send(encode_frame(encode(message)))

    def hear(self, timeout_s: float) -> Heard:
        """The next message; see `Frames.receive`."""
        return decode(self._decoder, self._frames.receive(timeout_s))

    def close(self) -> None:
        """Hang up."""
        self._frames.close()


def conductors_end(frames: Frames) -> Channel[Order, Answer]:
    """The end that gives orders."""
    return Channel(frames, msgspec.msgpack.Decoder(Answer))


def parts_end(frames: Frames) -> Channel[Answer, Order]:
    """The end that obeys them."""
    return Channel(frames, msgspec.msgpack.Decoder(Order))


def prove_as_dialer(frames: Frames, key: ClusterKey) -> None:
    """Prove the cluster key to a listening end, which proves it too.

    Raises:
        AuthenticationError: the listening end does not hold the key.
        PeerLostError: it went away, most likely because this side does not hold its key.
        ProtocolError: it is no listening end of `baton bench link`.
    """
    handshake = DialerHandshake(key, PURPOSE)
    frames.send(handshake.opening())
    frames.send(handshake.reply(frames.receive(PROOF_TIMEOUT_S)))


def prove_as_listener(frames: Frames, key: ClusterKey) -> None:
    """Prove the cluster key to who connected, who proves it too; see `prove_as_dialer`."""
    handshake = ListenerHandshake(key, PURPOSE)
    while not handshake.done:
        reply = handshake.reply(frames.receive(PROOF_TIMEOUT_S))
        if reply:
            frames.send(reply)
