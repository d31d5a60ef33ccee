"""Two workers prove on a fresh connection who they are, and agree on keys for what follows.

    dialer                                  listener
      | -- X_d --------------------------------> |
      | <------------ X_l, S_l, M_l, C_l ------- |
      | -- S_d, M_d, C_d ----------------------> |

X are ephemeral X25519 keys (RFC 7748), C the certificates (`baton.auth.certificates`), S signatures
by their holders over (role | purpose | X_d | X_l | C), M a MAC over the same with a key from the
shared secret. It is SIGMA (H. Krawczyk, "SIGMA: the SIGn-and-MAc approach to authenticated
Diffie-Hellman", CRYPTO 2003): the signatures prove who holds the X, the MACs that who signed also
knows the secret. The role stops reflection, the purpose stops a proof made for one kind of
connection from opening another; what was recorded cannot be read with keys that are stolen later.
Sans-I/O: bytes in, bytes out.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from baton.auth.certificates import MAX_CERTIFICATE_BYTES, IdentityRole, PeerIdentity
from baton.auth.session import Session
from baton.errors import AuthenticationError, ProtocolError

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials

EPHEMERAL_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAC_BYTES: Final = 32
ANSWER_BYTES: Final = SIGNATURE_BYTES + MAC_BYTES + MAX_CERTIFICATE_BYTES
"""At most, as `PROOF_BYTES`: certificates have different lengths."""
PROOF_BYTES: Final = EPHEMERAL_BYTES + ANSWER_BYTES
_DIALER: Final = b"dialer"
_LISTENER: Final = b"listener"


class _Challenge:
    """What both sides do. `session` and `peer` are there once the other side's proof was checked.

    The other side must be a worker.
    """

    session: Session | None = None
    peer: PeerIdentity | None = None

    def __init__(self, credentials: Credentials, purpose: str) -> None:
        self._credentials, self._purpose = credentials, purpose
        self._private_key = X25519PrivateKey.generate()
        self._ephemeral = self._private_key.public_key().public_bytes_raw()
        self._transcript = self._secret = b""

    def _agree(self, theirs: bytes, *, is_dialer: bool) -> None:
        """Derive the secret from both ephemeral keys."""
        try:
            shared = self._private_key.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as exc:
            raise ProtocolError(f"the peer's ephemeral key is none: {exc}") from exc
        both = (self._ephemeral, theirs) if is_dialer else (theirs, self._ephemeral)
        self._transcript = b"|".join((b"baton/handshake/4", self._purpose.encode(), *both))
        self._secret = hmac.digest(self._transcript, shared, "sha256")

    def _prove(self, role: bytes) -> bytes:
        signer = self._credentials.signer
        message = self._message(role, signer.certificate)
        return signer.sign(message) + self._mac(message) + signer.certificate

    def _check(self, role: bytes, proof: bytes) -> None:
        if len(proof) > ANSWER_BYTES:
            raise ProtocolError(f"a proof of {len(proof)} bytes, at most {ANSWER_BYTES} expected")
        end = SIGNATURE_BYTES + MAC_BYTES
        signature, mac, certificate = (
            proof[:SIGNATURE_BYTES],
            proof[SIGNATURE_BYTES:end],
            proof[end:],
        )
        message = self._message(role, certificate)
        peer = self._credentials.verify(IdentityRole.WORKER, certificate, message, signature)
        if not hmac.compare_digest(self._mac(message), mac):
            raise AuthenticationError(f"{peer} signed, but does not know the connection's secret")
        self.peer = peer
        self.session = Session.derive(self._secret, self._transcript, is_dialer=role == _LISTENER)

    def _message(self, role: bytes, certificate: bytes) -> bytes:
        return role + b"|" + self._transcript + b"|" + certificate

    def _mac(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, b"identity|" + message, "sha256")


class DialerChallenge(_Challenge):
    """The side that connected: sends `hello`, checks the proof, sends the answer."""

    def hello(self) -> bytes:
        """The first `EPHEMERAL_BYTES` bytes to send."""
        return self._ephemeral

    def answer(self, proof: bytes) -> bytes:
        """Check the listener's proof; the bytes to send back.

        Raises:
            AuthenticationError: the listener is not to be trusted.
            ProtocolError: the proof is no such message.
        """
        self._agree(proof[:EPHEMERAL_BYTES], is_dialer=True)
        self._check(_LISTENER, proof[EPHEMERAL_BYTES:])
        return self._prove(_DIALER)


class ListenerChallenge(_Challenge):
    """The side that accepted: reads the hello, proves itself, checks the answer."""

    @property
    def has_hello(self) -> bool:
        """Whether the hello was read: the answer comes next."""
        return bool(self._transcript)

    def proof(self, hello: bytes) -> bytes:
        """The bytes to send after the hello.

        Raises:
            ProtocolError: the hello is no such message.
        """
        self._agree(hello, is_dialer=False)
        return self._ephemeral + self._prove(_LISTENER)

    def finish(self, answer: bytes) -> None:
        """Check the dialer's answer.

        Raises:
            AuthenticationError: the dialer is not to be trusted.
            ProtocolError: the answer is no such message.
        """
        self._check(_DIALER, answer)
