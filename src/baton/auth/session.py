"""Tags for what follows the handshake: who is on the way can neither change nor repeat a frame.

Both ends derive the keys from the secret on which the handshake agreed. A tag is
HMAC-SHA256 (RFC 2104), cut to 16 bytes, over the number of the frame in its direction and its body;
each direction has a key of its own. A frame that is dropped, repeated or moved has another number.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from baton.errors import AuthenticationError

TAG_BYTES: Final = 16
_NUMBER_BYTES: Final = 8


class _Direction:
    """Numbers the frames of one direction."""

    __slots__ = ("_number", "key")

    def __init__(self, key: bytes) -> None:
        self.key, self._number = key, 0

    def next_tag(self, body: bytes) -> bytes:
        message = self._number.to_bytes(_NUMBER_BYTES, "little") + body
        self._number += 1
        return hmac.digest(self.key, message, "sha256")[:TAG_BYTES]


@dataclass(frozen=True, slots=True)
class Session:
    """One connection's tags, at one end. Owner: the connection's thread."""

    _sending: _Direction
    _receiving: _Direction

    @classmethod
    def derive(cls, secret: bytes, transcript: bytes, *, is_dialer: bool) -> Session:
        """From the handshake's shared secret. `transcript`: its purpose and ephemeral keys."""
        from_dialer, from_listener = (
            _Direction(hmac.digest(secret, b"session|" + role + b"|" + transcript, "sha256"))
            for role in (b"dialer", b"listener")
        )
        if is_dialer:
            return cls(from_dialer, from_listener)
        return cls(from_listener, from_dialer)

    @classmethod
    def from_keys(cls, sending: bytes, receiving: bytes) -> Session:
        """In another process that goes on with a connection before its first tagged frame."""
        return cls(_Direction(sending), _Direction(receiving))

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Of what is sent and of what is received: see `from_keys`."""
        return self._sending.key, self._receiving.key

    def seal(self, body: bytes) -> bytes:
        """The next frame's body with its tag: call it in the order in which frames are sent."""
        return body + self._sending.next_tag(body)

    def open(self, sealed: bytes) -> bytes:
        """The body of the next frame that came.

        Raises:
            AuthenticationError: this is not the frame that the peer sent next.
        """
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(self._receiving.next_tag(body), tag):
            raise AuthenticationError(
                "a frame was changed, repeated or left out between this process and its peer"
            )
        return body
