"""Sealed frames: who is on the way can neither read, change nor repeat what follows the handshake.

Both ends derive the keys from the secret on which the handshake agreed. A frame's body is sealed
with AES-256-GCM (NIST SP 800-38D); its nonce is its number in its direction, and each direction has
a key of its own. A frame that is dropped, repeated or moved has another number.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import AuthenticationError

TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12


class _Direction:
    """Numbers the frames of one direction."""

    __slots__ = ("_number", "cipher", "key")

    def __init__(self, key: bytes) -> None:
        self.key, self.cipher, self._number = key, AESGCM(key), 0

    def next_nonce(self) -> bytes:
        nonce = self._number.to_bytes(_NONCE_BYTES, "little")
        self._number += 1
        return nonce


@dataclass(frozen=True, slots=True)
class Session:
    """Seals and opens the frames of one connection, at one end. Owner: the connection's thread."""

    _sending: _Direction
    _receiving: _Direction
    digest_secret: bytes = b""
    """32 bytes that only the two ends know: for digests of what travels beside the connection."""

    @classmethod
    def derive(cls, secret: bytes, transcript: bytes, *, is_dialer: bool) -> Session:
        """From the handshake's shared secret. `transcript`: its purpose and ephemeral keys."""
        from_dialer, from_listener = (
            _Direction(hmac.digest(secret, b"session|" + role + b"|" + transcript, "sha256"))
            for role in (b"dialer", b"listener")
        )
        digest_secret = hmac.digest(secret, b"digests|" + transcript, "sha256")
        if is_dialer:
            return cls(from_dialer, from_listener, digest_secret)
        return cls(from_listener, from_dialer, digest_secret)

    @classmethod
    def from_keys(cls, sending: bytes, receiving: bytes) -> Session:
        """In another process that goes on with a connection before its first sealed frame."""
        return cls(_Direction(sending), _Direction(receiving))

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Of what is sent and of what is received: see `from_keys`."""
        return self._sending.key, self._receiving.key

    def seal(self, body: bytes) -> bytes:
        """The next frame's body, sealed: call it in the order in which frames are sent."""
        return self._sending.cipher.encrypt(self._sending.next_nonce(), body, None)

    def open(self, sealed: bytes) -> bytes:
        """The body of the next frame that came.

        Raises:
            AuthenticationError: this is not the frame that the peer sent next.
        """
        try:
            return self._receiving.cipher.decrypt(self._receiving.next_nonce(), sealed, None)
        except InvalidTag:
            raise AuthenticationError(
                "a frame was changed, repeated or left out between this process and its peer"
            ) from None
