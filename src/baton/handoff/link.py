"""One TCP connection between two handoff agents: the handshake, then frames of one message each.

The frames and the handshake are `baton.net`'s (docs/wire/handoff.md). Owned by the agent's thread;
sockets never block.
"""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from baton.auth.session import TAG_BYTES, Session
from baton.errors import PeerLostError, PeerUnreachableError
from baton.handoff.io_backend import OS_BACKEND, IoBackend, NonBlockingSocket
from baton.handoff.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from baton.net.framing import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    FrameDecoder,
    ListenerHandshake,
    encode_frame,
)

if TYPE_CHECKING:
    from baton.auth.certificates import PeerIdentity
    from baton.auth.credentials import Credentials
    from baton.clock import Instant

PURPOSE: Final = "handoff"
MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 256 * 1024


class LinkPhase(StrEnum):
    """Of a link's life."""

    CONNECTING = "connecting"
    AUTHENTICATING = "authenticating"
    UP = "up"
    CLOSED = "closed"


class Link:
    """A connection to one peer. `received_at` is when bytes last came from it."""

    def __init__(
        self, sock: NonBlockingSocket, now: Instant, handshake: DialerHandshake | ListenerHandshake
    ) -> None:
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.received_at = self.opened_at = now
        self.phase = LinkPhase.AUTHENTICATING
        self._handshake = handshake
        self._decoder = FrameDecoder(MAX_HANDSHAKE_BYTES)
        self.unsent = bytearray()
        """What the socket has not taken yet."""
        self._held_back: list[bytes] = []  # messages sent before the handshake is over
        self._session: Session | None = None
        self.peer: PeerIdentity | None = None
        """Set once the peer has proved who it is."""
        if isinstance(handshake, DialerHandshake):
            self.phase = LinkPhase.CONNECTING
            self.unsent += handshake.opening()

    @classmethod
    def dial(
        cls,
        address: str,
        credentials: Credentials,
        now: Instant,
        io_backend: IoBackend = OS_BACKEND,
    ) -> Link:
        """Start to connect to `host:port`.

        Raises:
            PeerUnreachableError: the address is invalid, or refuses at once.
        """
        host, _, port = address.rpartition(":")
        try:
            sock = io_backend.connect(host.strip("[]"), int(port))
        except (OSError, ValueError) as exc:
            raise PeerUnreachableError(f"cannot reach {address!r}: {exc}") from exc
        return cls(sock, now, DialerHandshake(credentials, PURPOSE))

    @classmethod
    def accept(cls, sock: NonBlockingSocket, credentials: Credentials, now: Instant) -> Link:
        """Take over a connection that was just accepted."""
        return cls(sock, now, ListenerHandshake(credentials, PURPOSE))

    @property
    def digest_secret(self) -> bytes:
        """Of this link: from it both ends have the keys of digests (`baton.kv.digest`)."""
        if self._session is None:
            raise AssertionError("the handshake is not over")
        return self._session.digest_secret

    def send(self, message: Message) -> None:
        """Queue a message until `flush`; before the link is up, it waits for the handshake.

        Raises:
            PeerLostError: the peer has not read for too long.
        """
        body = encode(message)
        if self._session is None:
            self._held_back.append(body)
            return
        self.unsent += encode_frame(self._session.seal(body))
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise PeerLostError(f"the peer does not read: {len(self.unsent)} bytes are queued")

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            PeerUnreachableError: connecting failed.
            PeerLostError: the connection broke.
        """
        if self.phase is LinkPhase.CONNECTING:
            self._check_connected()
        try:
            while self.unsent:
                sent = self.sock.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            return
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc

    def receive(self, now: Instant) -> list[Message]:
        """Read what is there; whole messages in order.

        Raises:
            PeerLostError: the connection ended.
            ProtocolError: the peer broke the wire format.
            AuthenticationError: the peer is not to be trusted.
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
        self._decoder.feed(data)
        messages: list[Message] = []
        while (body := self._decoder.take()) is not None:
            if self._session is not None:
                messages.append(decode(self._session.open(body)))
            else:
                self._authenticate(body)
        return messages

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.phase = LinkPhase.CLOSED
        self.sock.close()

    def _check_connected(self) -> None:
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerUnreachableError(f"cannot connect: {os.strerror(error)}")
        self.phase = LinkPhase.AUTHENTICATING

    def _authenticate(self, body: bytes) -> None:
        """Take one frame of the handshake."""
        self.unsent += self._handshake.reply(body)
        if isinstance(self._handshake, DialerHandshake) or self._handshake.done:
            self._decoder.max_body_bytes = MAX_MESSAGE_BYTES + TAG_BYTES
            self._session, self.peer = self._handshake.session, self._handshake.peer
            for held_back in self._held_back:
                self.unsent += encode_frame(self._session.seal(held_back))
            self._held_back.clear()
            self.phase = LinkPhase.UP
        self.flush()
