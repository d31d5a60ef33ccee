"""Mutual proof that both ends of a fresh connection hold the cluster key.

    dialer                             listener
      | -- Hello(nonce_d, purpose) ------> |
      | <- Proof(nonce_l, mac_l) --------- |   mac_l over (listener | purpose | nonce_d | nonce_l)
      | -- Answer(mac_d) ----------------> |   mac_d over (dialer   | purpose | nonce_d | nonce_l)

The role inside the MAC stops reflection, the two nonces stop replay, the purpose stops a proof
made for one kind of connection from opening another. Sans-I/O: bytes in, bytes out.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from baton.auth.session import Session
from baton.errors import AuthenticationError, ProtocolError

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey

NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
HELLO_BYTES: Final = NONCE_BYTES
PROOF_BYTES: Final = NONCE_BYTES + MAC_BYTES
ANSWER_BYTES: Final = MAC_BYTES


class DialerChallenge:
    """The side that connected: sends `hello`, checks the proof, sends the answer.

    `session` is there once the proof was checked.
    """

    session: Session | None = None

    def __init__(self, key: ClusterKey, purpose: str) -> None:
        self._key, self._purpose = key, purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        """The first `HELLO_BYTES` bytes to send."""
        return self._nonce

    def answer(self, proof: bytes) -> bytes:
        """Check the listener's proof; the `ANSWER_BYTES` bytes to send back.

        Raises:
            AuthenticationError: the listener does not hold the key.
            ProtocolError: the proof has another length.
        """
        nonces = _both_nonces(self._nonce, proof, PROOF_BYTES)
        _check(self._key, _message(b"listener", self._purpose, nonces), proof[NONCE_BYTES:])
        self.session = _open_session(self._key, self._purpose, nonces, is_dialer=True)
        return self._key.sign("challenge", _message(b"dialer", self._purpose, nonces))


class ListenerChallenge:
    """The side that accepted: reads the hello, proves itself, checks the answer.

    `session` is there once the answer was checked.
    """

    session: Session | None = None

    def __init__(self, key: ClusterKey, purpose: str) -> None:
        self._key, self._purpose = key, purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""

    @property
    def has_hello(self) -> bool:
        """Whether the hello was read: the answer comes next."""
        return bool(self._nonces)

    def proof(self, hello: bytes) -> bytes:
        """The `PROOF_BYTES` bytes to send after the hello.

        Raises:
            ProtocolError: the hello has another length.
        """
        if len(hello) != HELLO_BYTES:
            raise ProtocolError(f"hello of {len(hello)} bytes, expected {HELLO_BYTES}")
        self._nonces = hello + self._nonce
        return self._nonce + self._key.sign(
            "challenge", _message(b"listener", self._purpose, self._nonces)
        )

    def finish(self, answer: bytes) -> None:
        """Check the dialer's answer.

        Raises:
            AuthenticationError: the dialer does not hold the key.
        """
        _check(self._key, _message(b"dialer", self._purpose, self._nonces), answer)
        self.session = _open_session(self._key, self._purpose, self._nonces, is_dialer=False)


def _both_nonces(dialer_nonce: bytes, proof: bytes, expected: int) -> bytes:
    if len(proof) != expected:
        raise ProtocolError(f"proof of {len(proof)} bytes, expected {expected}")
    return dialer_nonce + proof[:NONCE_BYTES]


def _message(role: bytes, purpose: str, nonces: bytes) -> bytes:
    return role + b"|" + purpose.encode() + b"|" + nonces


def _open_session(key: ClusterKey, purpose: str, nonces: bytes, *, is_dialer: bool) -> Session:
    return Session.derive(key, purpose.encode() + b"|" + nonces, is_dialer=is_dialer)


def _check(key: ClusterKey, message: bytes, mac: bytes) -> None:
    if not key.verify("challenge", message, mac):
        raise AuthenticationError(
            "the peer does not hold this cluster's key; give both processes the same "
            "BATON_CLUSTER_KEY"
        )
