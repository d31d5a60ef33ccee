"""The cluster key: the one secret that gateway and workers share."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from functools import lru_cache

from baton.errors import ConfigError

MIN_KEY_BYTES = 32
MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A shared secret. Each purpose signs with a sub-key of its own.

    Two purposes can therefore never be confused: a challenge's answer is not a ticket's MAC.

    Raises:
        ConfigError: the secret has fewer than 32 bytes.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_KEY_BYTES:
            raise ConfigError(
                f"the cluster key has {len(self.secret)} bytes, at least {MIN_KEY_BYTES} are "
                "needed; make one with: openssl rand -hex 32"
            )

    @classmethod
    def generate(cls) -> ClusterKey:
        """A fresh random key, for a cluster that lives on one machine."""
        return cls(secrets.token_bytes(MIN_KEY_BYTES))

    @classmethod
    def from_hex(cls, text: str) -> ClusterKey:
        """Read a key written in hexadecimal.

        Raises:
            ConfigError: not hexadecimal, or too short.
        """
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError as exc:
            raise ConfigError(
                "the cluster key is not hexadecimal; make one with: openssl rand -hex 32"
            ) from exc

    @property
    def fingerprint(self) -> str:
        """What two people may compare: 16 hexadecimal digits, which do not reveal the secret."""
        return self.sign("fingerprint", b"")[:8].hex()

    def sign(self, purpose: str, message: bytes) -> bytes:
        """HMAC-SHA256 (RFC 2104) of `message` under the sub-key for `purpose`: 32 bytes."""
        return hmac.digest(_derive(self.secret, purpose), message, "sha256")


@lru_cache(maxsize=64)
def _derive(secret: bytes, purpose: str) -> bytes:
    """The sub-key for a purpose; kept, as every request needs the same few."""
    return hmac.digest(secret, b"baton/1/" + purpose.encode(), "sha256")
