"""Frames on a byte stream, and the handshake in the first three of them. Sans-I/O.

A frame is a 4-byte little-endian length and so many bytes of body. Both ends of a new connection
prove that they are workers of the cluster (`baton.auth.challenge` defines the bytes):

    dialer                                    listener
      | -- MAGIC + hello -----------------------> |
      | <-------------------- MAGIC + proof ----- |
      | -- answer ------------------------------> |

Each body after that is sealed (`baton.auth.session`), except on Unix sockets and within TLS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton.auth.challenge import PROOF_BYTES, DialerChallenge, ListenerChallenge
from baton.errors import UNDECODABLE, ProtocolError

if TYPE_CHECKING:
    from baton.auth.certificates import PeerIdentity
    from baton.auth.credentials import Credentials
    from baton.auth.session import Session

PREFIX_BYTES: Final = 4
MAGIC: Final = b"BATON\x04"
"""Protocol and version: distinguishes a foreign program from an older peer."""
MAX_HANDSHAKE_BYTES: Final = len(MAGIC) + PROOF_BYTES
"""The largest body of an unauthenticated peer."""


def encode_frame(body: bytes) -> bytes:
    """A body with its length in front."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


class FrameDecoder:
    """Cuts a byte stream into bodies of at most `max_body_bytes`.

    It never holds more than was fed: an announced length is checked and reserves no memory.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    @property
    def num_missing_bytes(self) -> int:
        """Bytes to the next boundary (a prefix's end or a body's), to read no payload.

        0 when `take` has a body to give.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        held = len(self._buffer)
        if held < PREFIX_BYTES:
            return PREFIX_BYTES - held
        return max(0, PREFIX_BYTES + self._body_bytes() - held)

    def feed(self, data: bytes) -> None:
        """Append bytes from the stream."""
        self._buffer += data

    def cut(self, data: memoryview) -> bytes | None:
        """The body of a whole frame at the beginning of `data`, which is not fed then; else None.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        if self._buffer or len(data) < PREFIX_BYTES:
            return None
        end = PREFIX_BYTES + self._check(int.from_bytes(data[:PREFIX_BYTES], "little"))
        return bytes(data[PREFIX_BYTES:end]) if end <= len(data) else None

    def take(self) -> bytes | None:
        """The next whole body, or None until more is fed.

        Raises:
            ProtocolError: the announced body is larger than the bound.
        """
        buffer = self._buffer
        if len(buffer) < PREFIX_BYTES:
            return None
        end = PREFIX_BYTES + int.from_bytes(buffer[:PREFIX_BYTES], "little")
        if end > PREFIX_BYTES + self.max_body_bytes:
            self._check(end - PREFIX_BYTES)
        if len(buffer) < end:
            return None
        body = bytes(buffer[PREFIX_BYTES:end])
        del buffer[:end]
        return body

    def _body_bytes(self) -> int:
        return self._check(int.from_bytes(self._buffer[:PREFIX_BYTES], "little"))

    def _check(self, announced: int) -> int:
        if announced > self.max_body_bytes:
            raise ProtocolError(
                f"a frame of {announced} bytes was announced, at most {self.max_body_bytes} "
                "are possible here"
            )
        return announced


class DialerHandshake:
    """The side that connected. Frames after the last one are sealed by the session."""

    def __init__(self, credentials: Credentials, purpose: str) -> None:
        self._challenge = DialerChallenge(credentials, purpose)

    @property
    def session(self) -> Session:
        """Of the connection, once `reply` has returned."""
        return _session_of(self._challenge)

    @property
    def peer(self) -> PeerIdentity:
        """Who the other end is, once `reply` has returned."""
        return _peer_of(self._challenge)

    def opening(self) -> bytes:
        """The first frame to send."""
        return encode_frame(MAGIC + self._challenge.hello())

    def reply(self, body: bytes) -> bytes:
        """Check the listener's proof; the last frame to send.

        Raises:
            AuthenticationError: the listener is not to be trusted.
            ProtocolError: the listener does not speak this protocol.
        """
        return encode_frame(self._challenge.answer(_strip_magic(body)))


class ListenerHandshake:
    """The side that accepted. `done`: the peer has proved that it is a worker."""

    def __init__(self, credentials: Credentials, purpose: str) -> None:
        self._challenge = ListenerChallenge(credentials, purpose)
        self.done = False

    @property
    def session(self) -> Session:
        """Of the connection, once it is `done`."""
        return _session_of(self._challenge)

    @property
    def peer(self) -> PeerIdentity:
        """Who the other end is, once it is `done`."""
        return _peer_of(self._challenge)

    def reply(self, body: bytes) -> bytes:
        """Take one frame's body; the bytes to send back (none after the last one).

        Raises:
            AuthenticationError: the dialer is not to be trusted.
            ProtocolError: the dialer does not speak this protocol.
        """
        if not self._challenge.has_hello:
            return encode_frame(MAGIC + self._challenge.proof(_strip_magic(body)))
        self._challenge.finish(body)
        self.done = True
        return b""


def _session_of(challenge: DialerChallenge | ListenerChallenge) -> Session:
    if challenge.session is None:
        raise AssertionError("the peer has not proved who it is")
    return challenge.session


def _peer_of(challenge: DialerChallenge | ListenerChallenge) -> PeerIdentity:
    if challenge.peer is None:
        raise AssertionError("the peer has not proved who it is")
    return challenge.peer


def _strip_magic(body: bytes) -> bytes:
    if not body.startswith(MAGIC):
        raise ProtocolError("the peer speaks another protocol, or another version of this one")
    return body[len(MAGIC) :]


M = TypeVar("M")


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message as a frame's body."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """Read one body with the decoder of its protocol and direction.

    Raises:
        ProtocolError: it is none of that direction's messages.
    """
    try:
        return decoder.decode(body)
    except UNDECODABLE as exc:
        raise ProtocolError(f"the peer sent a message that does not decode: {exc}") from exc
