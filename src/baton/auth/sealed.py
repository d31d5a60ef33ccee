"""A message with the signature and the certificate of who made it: tickets and announcements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from baton.auth.certificates import MAX_CERTIFICATE_BYTES, IdentityRole, PeerIdentity

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials


class SealedMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What stands on the wire, in msgpack. `body` is not believed before `verify`.

    The signature is an Ed25519 signature of a purpose and `body`: it is good for no other purpose.
    """

    body: bytes
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]

    @classmethod
    def sign(cls, purpose: bytes, body: bytes, credentials: Credentials) -> SealedMessage:
        """Sign `body` as this process."""
        signer = credentials.signer
        return cls(body, signer.certificate, signer.sign(purpose + body))

    def verify(self, purpose: bytes, role: IdentityRole, credentials: Credentials) -> PeerIdentity:
        """Who signed it, someone of this role.

        Raises:
            AuthenticationError: the certificate is not to be trusted or is for another role, or the
                signature is not its holder's.
        """
        return credentials.verify(role, self.certificate, purpose + self.body, self.signature)


_decoder = msgspec.msgpack.Decoder(SealedMessage)
encode_sealed = msgspec.msgpack.Encoder().encode
decode_sealed = _decoder.decode
"""Raises `baton.errors.UNDECODABLE`."""
