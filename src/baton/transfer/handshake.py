"""Both ends of a fresh connection prove that they hold the cluster key, in three frames.

    dialer                                    listener
      | -- MAGIC + hello -----------------------> |
      | <-------------------- MAGIC + proof ----- |
      | -- answer ------------------------------> |

Sans-I/O: bodies of frames in, frames out (`baton.auth.challenge` says what the bytes mean).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.auth.challenge import PROOF_BYTES, DialerChallenge, ListenerChallenge
from baton.errors import ProtocolError
from baton.transfer.framing import encode_frame

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey

MAGIC: Final = b"BATON\x02"
"""Names the protocol and its version, so that a stranger is told from an old peer."""
MAX_BODY_BYTES: Final = len(MAGIC) + PROOF_BYTES
"""All that an unauthenticated peer can make the other side hold."""


class DialerHandshake:
    """The side that connected."""

    def __init__(self, key: ClusterKey, purpose: str) -> None:
        self._challenge = DialerChallenge(key, purpose)

    def opening(self) -> bytes:
        """The first frame to send."""
        return encode_frame(MAGIC + self._challenge.hello())

    def reply(self, body: bytes) -> bytes:
        """Check the listener's proof; the last frame to send.

        Raises:
            AuthenticationError: the listener does not hold the key.
            ProtocolError: the listener does not speak this protocol.
        """
        return encode_frame(self._challenge.answer(_strip_magic(body)))


class ListenerHandshake:
    """The side that accepted."""

    def __init__(self, key: ClusterKey, purpose: str) -> None:
        self._challenge = ListenerChallenge(key, purpose)
        self._greeted = False
        self.done = False
        """The peer has proved that it holds the key."""

    def reply(self, body: bytes) -> bytes:
        """Take one frame's body; the bytes to send back (none after the last one).

        Raises:
            AuthenticationError: the dialer does not hold the key.
            ProtocolError: the dialer does not speak this protocol.
        """
        if not self._greeted:
            self._greeted = True
            return encode_frame(MAGIC + self._challenge.proof(_strip_magic(body)))
        self._challenge.finish(body)
        self.done = True
        return b""


def _strip_magic(body: bytes) -> bytes:
    if not body.startswith(MAGIC):
        raise ProtocolError("the peer speaks another protocol, or another version of this one")
    return body[len(MAGIC) :]
