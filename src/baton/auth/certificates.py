"""Certificates by which the holders of a cluster key know each other: X.509, Ed25519 (RFC 8410).

The authority's private key is derived from the cluster key, so every holder can sign a certificate
for itself when it starts, and nothing need be handed out. Nothing here is kept on disk.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from baton.auth.key import ClusterKey

AUTHORITY_NAME: Final = "Baton cluster"
_NOT_BEFORE: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER: Final = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
"""The cluster key decides how long they are good: no clock is compared with another host's."""
MAX_NAME_CHARS: Final = 64
"""Of an X.509 common name (RFC 5280, ub-common-name)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What one process shows: its certificate, the authority's, and its private key, all PEM."""

    certificate: bytes
    authority: bytes
    private_key: bytes = field(repr=False)


def make_identity(key: ClusterKey, name: str) -> Identity:
    """A fresh private key, with a certificate for `name` that all holders of the key accept."""
    authority = _authority(key)
    private_key = Ed25519PrivateKey.generate()
    certificate = (
        _builder(name, private_key.public_key(), authority)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([
                ExtendedKeyUsageOID.SERVER_AUTH,
                ExtendedKeyUsageOID.CLIENT_AUTH,
            ]),
            critical=False,
        )
        .sign(authority, None)
    )
    return Identity(
        certificate.public_bytes(serialization.Encoding.PEM),
        _authority_certificate(authority),
        private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


@lru_cache(maxsize=8)
def _authority(key: ClusterKey) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key.sign("certificates", b"authority"))


def _authority_certificate(authority: Ed25519PrivateKey) -> bytes:
    """The same bytes in every process: an Ed25519 signature is determined by what it signs."""
    certificate = (
        _builder(AUTHORITY_NAME, authority.public_key(), authority)
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    name: str, public_key: Ed25519PublicKey, authority: Ed25519PrivateKey
) -> x509.CertificateBuilder:
    return (
        x509
        .CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(_common_name(AUTHORITY_NAME))
        .public_key(public_key)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:MAX_NAME_CHARS] or "baton")])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
