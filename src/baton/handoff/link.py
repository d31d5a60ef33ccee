"""One authenticated control connection between two handoff agents: bytes to messages.

The dialer is the decode worker. After the challenge (`baton.auth.challenge`, purpose
`handoff`) each side sends frames: a big-endian u32 length, then one message
(docs/wire/handoff.md). Owned by the agent's thread; sockets never block.
"""

from __future__ import annotations

import os
import socket
import struct
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from baton.auth.challenge import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    DialerChallenge,
    ListenerChallenge,
)
from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError
from baton.handoff.io_backend import OS_BACKEND
from baton.handoff.messages import MAX_MESSAGE_BYTES, Message, decode, encode

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.clock import Instant
    from baton.handoff.io_backend import IoBackend, NonBlockingSocket

PURPOSE: Final = "handoff"
MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
_LENGTH: Final = struct.Struct(">I")
_READ_BYTES: Final = 256 * 1024


class LinkPhase(StrEnum):
    """How far a link has come."""

    CONNECTING = "connecting"
    AUTHENTICATING = "authenticating"
    UP = "up"
    CLOSED = "closed"


class Link:
    """A connection to one peer. `heard_at` is when bytes last came from it."""

    def __init__(
        self, sock: NonBlockingSocket, now: Instant, challenge: DialerChallenge | ListenerChallenge
    ) -> None:
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.received_at = self.opened_at = now
        self.phase = LinkPhase.AUTHENTICATING
        self._challenge = challenge
        self._received = bytearray()
        self._unsent = bytearray()
        self._held_back = bytearray()  # frames said before the challenge is over
        if isinstance(challenge, DialerChallenge):
            self.phase = LinkPhase.CONNECTING
            self._unsent += challenge.hello()

    @classmethod
    def dial(
        cls, address: str, key: ClusterKey, now: Instant, io_backend: IoBackend = OS_BACKEND
    ) -> Link:
        """Start to connect to `host:port`.

        Raises:
            PeerUnreachableError: the address makes no sense, or refuses at once.
        """
        host, _, port = address.rpartition(":")
        try:
            sock = io_backend.connect(host.strip("[]"), int(port))
        except (OSError, ValueError) as exc:
            raise PeerUnreachableError(f"cannot reach {address!r}: {exc}") from exc
        return cls(sock, now, DialerChallenge(key, PURPOSE))

    @classmethod
    def accept(cls, sock: NonBlockingSocket, key: ClusterKey, now: Instant) -> Link:
        """Take over a connection that was just accepted."""
        return cls(sock, now, ListenerChallenge(key, PURPOSE))

    @property
    def wants_write(self) -> bool:
        """Whether the socket's readiness to write is waited for."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Queue a message; what is said before the link is up follows the challenge.

        Raises:
            PeerLostError: the connection broke, or the peer has not read for too long.
        """
        frame = encode(message)
        queue = self._unsent if self.phase is LinkPhase.UP else self._held_back
        queue += _LENGTH.pack(len(frame))
        queue += frame
        if len(queue) > MAX_UNSENT_BYTES:
            raise PeerLostError(f"the peer does not read: {len(queue)} bytes are queued")
        if self.phase is LinkPhase.UP:
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            PeerUnreachableError: connecting failed.
            PeerLostError: the connection broke.
        """
        if self.phase is LinkPhase.CONNECTING:
            self._check_connected()
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc

    def receive(self, now: Instant) -> list[Message]:
        """Read what is there; whole messages in order.

        Raises:
            PeerLostError: the connection ended.
            ProtocolError: the peer broke the wire format.
            AuthenticationError: the peer does not hold the cluster key.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc
        if not data:
            raise PeerLostError("the peer closed the connection")
        self.received_at = now
        self._received += data
        if self.phase is not LinkPhase.UP:
            self._authenticate()
        return self._take_messages() if self.phase is LinkPhase.UP else []

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.phase = LinkPhase.CLOSED
        self.sock.close()

    def _check_connected(self) -> None:
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerUnreachableError(f"cannot connect: {os.strerror(error)}")
        self.phase = LinkPhase.AUTHENTICATING

    def _authenticate(self) -> None:
        """Take the challenge as far as the bytes received allow."""
        match self._challenge:
            case DialerChallenge() as dialer:
                if len(self._received) < PROOF_BYTES:
                    return
                self._unsent += dialer.answer(self._take(PROOF_BYTES))
            case ListenerChallenge() as listener:
                if not listener.has_hello and len(self._received) >= HELLO_BYTES:
                    self._unsent += listener.proof(self._take(HELLO_BYTES))
                    self.flush()
                if not listener.has_hello or len(self._received) < ANSWER_BYTES:
                    return
                listener.finish(self._take(ANSWER_BYTES))
        self._unsent += self._held_back
        self._held_back.clear()
        self.phase = LinkPhase.UP
        self.flush()

    def _take_messages(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES}")
            if len(self._received) < _LENGTH.size + length:
                break
            messages.append(decode(self._take(_LENGTH.size + length)[_LENGTH.size :]))
        return messages

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken
