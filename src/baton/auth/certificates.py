"""Certificates by which the processes of a cluster know each other: X.509, Ed25519 (RFC 8410).

A certificate names the roles of its holder: a URI `spiffe://baton/ROLE/NAME` for each, and a DNS
name by which TLS itself checks the role of a server. They come from an authority that the operator
keeps (`baton key authority`, `baton key issue`), or each process makes its own: the authority's
private key is then derived from the cluster key, and every holder of that key may have any role
under any name (`*`).
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import AuthenticationError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.auth.key import ClusterKey

AUTHORITY_NAME: Final = "Baton cluster"
ANY_NAME: Final = "*"
MAX_NAME_CHARS: Final = 64
"""Of an X.509 common name (RFC 5280, ub-common-name)."""
MAX_CERTIFICATE_BYTES: Final = 1536
"""Of one in DER, as a peer may send it: one of ours has 400 to 600."""
_URI_PREFIX: Final = "spiffe://baton/"
_NOT_BEFORE: Final = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER: Final = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
"""Of authorities and of what is derived from a cluster key: clocks of hosts may differ."""
CLOCK_TOLERANCE: Final = dt.timedelta(days=1)
"""By which a certificate is good before it was made: hosts' clocks may be behind."""
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What reading a certificate, a key or a CRL may raise."""
_SERIAL_BITS: Final = 159
"""The largest that RFC 5280 allows; the highest bit is set, so that all have one length."""


class IdentityRole(StrEnum):
    """What a process may do.

    A gateway signs tickets and sends requests to workers; a worker serves gateways and exchanges KV
    with workers; a monitor reads health and metrics.
    """

    GATEWAY = "gateway"
    WORKER = "worker"
    MONITOR = "monitor"

    @property
    def dns_name(self) -> str:
        """By which TLS checks that a server has this role."""
        return f"{self}.baton.internal"


@dataclass(frozen=True, slots=True)
class Identity:
    """What one process shows: its certificate and its private key, and whom it trusts; all PEM.

    `authorities` are one certificate or more; `revoked` is empty, or one CRL for each of them.
    """

    certificate: bytes
    authorities: bytes
    private_key: bytes = field(repr=False)
    revoked: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a certificate proves of its holder, from `since` to `until` (Unix time).

    `name` is None where it may have any name.
    """

    roles: frozenset[IdentityRole]
    name: str | None
    public_key: Ed25519PublicKey
    serial_number: int
    since: float
    until: float

    def __str__(self) -> str:
        """For logs."""
        return f"{'/'.join(sorted(self.roles))} {self.name or 'with the cluster key'}"

    def may_be(self, worker: str) -> bool:
        """Whether it may call itself so; one rank of a worker is called NAME/RANK."""
        return self.name in {None, worker, worker.rpartition("/")[0]}


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs certificates and lists of the revoked ones."""

    private_key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> Authority:
        """A fresh one."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def certificate(self) -> bytes:
        """PEM. The same bytes each time: an Ed25519 signature is determined by what it signs."""
        public_key = self.private_key.public_key()
        certificate = (
            _builder(_authority_name(public_key), public_key, self.private_key)
            .serial_number(1)
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(is_authority=True), critical=True)
            .sign(self.private_key, None)
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        roles: Iterable[IdentityRole],
        name: str,
        *,
        now: dt.datetime | None = None,
        lifetime: dt.timedelta | None = None,
    ) -> tuple[x509.Certificate, Ed25519PrivateKey]:
        """A fresh private key and a certificate for it; without `lifetime` it does not expire."""
        private_key = Ed25519PrivateKey.generate()
        names: list[x509.GeneralName] = []
        for role in roles:
            names.append(x509.DNSName(role.dns_name))
            names.append(
                x509.UniformResourceIdentifier(f"{_URI_PREFIX}{role}/{quote(name, safe='*')}")
            )
        since = now - CLOCK_TOLERANCE if now else _NOT_BEFORE
        until = now + lifetime if now and lifetime else _NOT_AFTER
        certificate = (
            _builder(_common_name(name), private_key.public_key(), self.private_key)
            .serial_number(1 << _SERIAL_BITS - 1 | x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([
                    ExtendedKeyUsageOID.SERVER_AUTH,
                    ExtendedKeyUsageOID.CLIENT_AUTH,
                ]),
                critical=False,
            )
            .sign(self.private_key, None)
        )
        return certificate, private_key

    def revoke(self, serial_numbers: Iterable[int], now: dt.datetime) -> bytes:
        """The list of these revoked certificates (a CRL, RFC 5280), PEM; it does not expire."""
        builder = (
            x509
            .CertificateRevocationListBuilder()
            .issuer_name(_authority_name(self.private_key.public_key()))
            .last_update(_NOT_BEFORE)
            .next_update(_NOT_AFTER)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.private_key.public_key()),
                critical=False,
            )
            .add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
        )
        for serial_number in sorted(serial_numbers):
            revoked = x509.RevokedCertificateBuilder().serial_number(serial_number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(now).build())
        return builder.sign(self.private_key, None).public_bytes(serialization.Encoding.PEM)


def derive_identity(keys: Sequence[ClusterKey]) -> Identity:
    """A fresh identity of a holder of cluster keys: any role, any name, signed for the first key.

    Those of all the keys are trusted.
    """
    authorities = [derive_authority(key) for key in keys]
    certificate, private_key = authorities[0].issue(IdentityRole, ANY_NAME)
    return Identity(
        certificate.public_bytes(serialization.Encoding.PEM),
        b"".join(authority.certificate for authority in authorities),
        to_pem(private_key),
    )


@lru_cache(maxsize=8)
def derive_authority(key: ClusterKey) -> Authority:
    """That of a cluster key's holders."""
    return Authority(Ed25519PrivateKey.from_private_bytes(key.sign("certificates", b"authority")))


def to_pem(private_key: Ed25519PrivateKey) -> bytes:
    """PKCS #8, not encrypted."""
    return private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def from_pem(text: bytes) -> Ed25519PrivateKey:
    """A private key.

    Raises:
        ConfigError: it is none, or of another kind.
    """
    try:
        private_key = serialization.load_pem_private_key(text, None)
    except _UNREADABLE as exc:
        raise ConfigError(f"no private key in PEM without a password: {exc}") from exc
    if not isinstance(private_key, Ed25519PrivateKey):
        raise ConfigError("the private key is not an Ed25519 key")
    return private_key


class Trust:
    """Whose certificates are good: those that an authority signed and has not revoked."""

    def __init__(self, identity: Identity) -> None:
        """Raises ConfigError: the authorities, or what they revoked, cannot be used."""
        try:
            self._authorities = x509.load_pem_x509_certificates(identity.authorities)
            self._revoked = [x509.load_pem_x509_crl(crl) for crl in _split_crls(identity.revoked)]
            are_of_our_kind = all(
                isinstance(authority.public_key(), Ed25519PublicKey)
                for authority in self._authorities
            )
            # Read now: what does not decode raises here.
            self.revoked_serial_numbers = frozenset(
                each.serial_number for crl in self._revoked for each in crl
            )
        except _UNREADABLE as exc:
            raise ConfigError(f"authorities, or what they revoked, do not decode: {exc}") from exc
        if not are_of_our_kind:
            raise ConfigError("an authority's key is not an Ed25519 key")
        if identity.revoked and not all(
            any(_is_by(crl, authority) for crl in self._revoked) for authority in self._authorities
        ):
            raise ConfigError(
                "some of the authorities have a list of revoked certificates and others do not; "
                "give the list of each, or of none"
            )

    def find_peer(self, der: bytes) -> PeerIdentity:
        """Who the holder of a certificate in DER is; whether it has expired is not looked at.

        Raises:
            AuthenticationError: it is not to be trusted.
        """
        if len(der) > MAX_CERTIFICATE_BYTES:
            raise AuthenticationError(f"the peer's certificate has {len(der)} bytes")
        try:
            certificate = x509.load_der_x509_certificate(der)
        except _UNREADABLE as exc:
            raise AuthenticationError(f"the peer's certificate does not decode: {exc}") from exc
        authority = next((a for a in self._authorities if _has_issued(a, certificate)), None)
        if authority is None:
            raise AuthenticationError(
                "the peer's certificate is by no authority of this cluster; give both "
                "processes the same BATON_CLUSTER_KEY, or identities of one authority"
            )
        try:
            peer = _read(certificate)
        except _UNREADABLE as exc:
            raise AuthenticationError(f"the peer's certificate is not Baton's: {exc}") from exc
        for crl in self._revoked:
            is_listed = crl.get_revoked_certificate_by_serial_number(peer.serial_number)
            if is_listed is not None and _is_by(crl, authority):
                raise AuthenticationError(f"the certificate of {peer} was revoked")
        return peer


def read_certificate(pem: bytes) -> tuple[x509.Certificate, PeerIdentity]:
    """One's own certificate, and what it proves to others.

    Raises:
        ConfigError: it is none of Baton's.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        return certificate, _read(certificate)
    except _UNREADABLE as exc:
        raise ConfigError(f"no certificate of a Baton cluster: {exc}") from exc


def _read(certificate: x509.Certificate) -> PeerIdentity:
    """Raises ValueError or TypeError for one that is none of ours."""
    public_key = certificate.public_key()
    if not isinstance(public_key, Ed25519PublicKey):
        raise TypeError("its key is not an Ed25519 key")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("it names no role") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    pairs = [uri.removeprefix(_URI_PREFIX).partition("/") for uri in uris]
    roles = frozenset(IdentityRole(role) for role, _, _ in pairs)
    found = {unquote(name) for _, _, name in pairs}
    if len(found) != 1 or not (name := found.pop()):
        raise ValueError(f"its URIs name no role, or several names: {uris}"[:300])
    is_any = name == ANY_NAME
    return PeerIdentity(
        roles,
        None if is_any else name,
        public_key,
        certificate.serial_number,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


def _has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *_UNREADABLE):
        return False
    return True


def _is_by(crl: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    public_key = authority.public_key()
    return isinstance(public_key, Ed25519PublicKey) and crl.is_signature_valid(public_key)


def _split_crls(text: bytes) -> list[bytes]:
    end = b"-----END X509 CRL-----"
    return [part + end for part in text.split(end)[:-1]]


def _builder(
    name: x509.Name, public_key: Ed25519PublicKey, authority: Ed25519PrivateKey
) -> x509.CertificateBuilder:
    return (
        x509
        .CertificateBuilder()
        .subject_name(name)
        .issuer_name(_authority_name(authority.public_key()))
        .public_key(public_key)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
    )


def _authority_name(public_key: Ed25519PublicKey) -> x509.Name:
    """Its own for each key, so that two authorities differ in their names too."""
    digest = hashlib.sha256(public_key.public_bytes_raw()).hexdigest()
    return _common_name(f"{AUTHORITY_NAME} {digest[:16]}")


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:MAX_NAME_CHARS])])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
