"""Directories of authorities and identities: made, renewed and shown by `baton key`.

An authority's directory has its certificate and private key, the list of what it revoked, and a
line for each certificate that it issued. An identity's has what `baton.auth.credentials` reads.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from baton.auth.certificates import (
    MAX_NAME_CHARS,
    Authority,
    Identity,
    IdentityRole,
    derive_authority,
    from_pem,
    read_certificate,
    to_pem,
)
from baton.auth.credentials import (
    AUTHORITIES_FILE,
    CERTIFICATE_FILE,
    PRIVATE_KEY_FILE,
    REVOKED_FILE,
    read_identity,
)
from baton.clock import MachineClock
from baton.errors import ConfigError, mapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from baton.auth.key import ClusterKey

AUTHORITY_KEY_FILE: Final = "ca.key"
ISSUED_FILE: Final = "issued.jsonl"
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}", re.ASCII)
_HEX: Final = 16
_REFUSED: Final = {OSError: ConfigError, OverflowError: ConfigError}
"""A file that cannot be read or written; a date that does not exist."""


@dataclass(frozen=True, slots=True)
class Order:
    """What certificate is wanted."""

    role: str
    name: str
    expires_days: int | None = None


class Issued(msgspec.Struct, frozen=True):
    """One line of `ISSUED_FILE`. `serial_number` in hex; `until` is ISO 8601."""

    role: str
    name: str
    serial_number: str
    until: str


def create_authority(directory: Path) -> None:
    """Make an authority's directory.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    if (directory / AUTHORITY_KEY_FILE).exists():
        raise ConfigError(f"{directory} has an authority; choose another directory")
    authority = Authority.generate()
    _write(
        directory,
        {
            AUTHORITY_KEY_FILE: to_pem(authority.private_key),
            AUTHORITIES_FILE: authority.certificate,
            REVOKED_FILE: authority.revoke((), _now()),
            ISSUED_FILE: b"",
        },
    )


@mapped(_REFUSED)
def issue(order: Order, authority_directory: Path, directory: Path) -> None:
    """Make an identity's directory.

    Raises:
        ConfigError: the name is none, there is an identity, or a file cannot be read or written.
    """
    _require_empty(directory)
    certificate, private_key = _sign(order, authority_directory)
    files = {
        AUTHORITIES_FILE: (authority_directory / AUTHORITIES_FILE).read_bytes(),
        REVOKED_FILE: (authority_directory / REVOKED_FILE).read_bytes(),
    }
    _write(directory, _files_of(certificate, private_key) | files)


@mapped(_REFUSED)
def issue_derived(order: Order, keys: Sequence[ClusterKey], directory: Path) -> None:
    """As `issue`, by the authority that the cluster key's holders derive; it revokes nothing."""
    _require_empty(directory)
    authorities = [derive_authority(key) for key in keys]
    certificate, private_key = _issue_by(authorities[0], order)
    trusted = b"".join(authority.certificate for authority in authorities)
    _write(directory, _files_of(certificate, private_key) | {AUTHORITIES_FILE: trusted})


@mapped(_REFUSED)
def renew(
    directory: Path,
    authority_directory: Path,
    *,
    expires_days: int | None = None,
    keeps_certificate: bool = False,
    drops_others: bool = False,
) -> None:
    """Give an identity a fresh key and certificate for its role and name.

    The authority is trusted from now on, and the others too, unless `drops_others`.

    Raises:
        ConfigError: a file cannot be read or written.
    """
    old = read_identity(directory)
    trusted = (authority_directory / AUTHORITIES_FILE).read_bytes()
    revoked = (authority_directory / REVOKED_FILE).read_bytes()
    if not drops_others:
        others = Identity(b"", old.authorities, b"", old.revoked)
        trusted, revoked = _merge(trusted, revoked, others)
    files = {AUTHORITIES_FILE: trusted} | ({REVOKED_FILE: revoked} if revoked else {})
    if not keeps_certificate:
        _, own = read_certificate(old.certificate)
        if own.name is None or len(own.roles) != 1:
            raise ConfigError(f"{directory} is the identity of {own}: issue one anew")
        order = Order(min(own.roles), own.name, expires_days)
        certificate, private_key = _sign(order, authority_directory)
        files |= _files_of(certificate, private_key)
    _write(directory, files)


@mapped(_REFUSED)
def revoke(which: str, authority_directory: Path) -> list[Issued]:
    """Put certificates on the authority's list; those of a name, or the one of a serial number.

    Raises:
        ConfigError: it issued none such, or a file cannot be read or written.
    """
    issued = _read_issued(authority_directory)
    chosen = [each for each in issued if which in {each.name, each.serial_number}]
    if not chosen:
        raise ConfigError(
            f"{authority_directory} issued no certificate {which!r}; see: baton key show "
            f"{authority_directory}"
        )
    serial_numbers = {int(each.serial_number, _HEX) for each in chosen}
    serial_numbers |= _revoked_of((authority_directory / REVOKED_FILE).read_bytes())
    crl = _read_authority(authority_directory).revoke(serial_numbers, _now())
    _write(authority_directory, {REVOKED_FILE: crl})
    return chosen


def describe(directory: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows for people: role, name, serial number, end, and a remark.

    Raises:
        ConfigError: it is neither an authority's nor an identity's directory.
    """
    if (directory / AUTHORITY_KEY_FILE).exists():
        with mapped(_REFUSED):
            revoked = _revoked_of((directory / REVOKED_FILE).read_bytes())
        for each in _read_issued(directory):
            is_revoked = int(each.serial_number, _HEX) in revoked
            remark = "revoked" if is_revoked else ""
            yield each.role, each.name, each.serial_number, each.until[:16], remark
        return
    identity = read_identity(directory)
    certificate, own = read_certificate(identity.certificate)
    until = certificate.not_valid_after_utc
    remarks = {
        "expired": until < _now(),
        "revoked": own.serial_number in _revoked_of(identity.revoked),
    }
    yield (
        "/".join(sorted(own.roles)),
        own.name or "any",
        f"{own.serial_number:x}",
        until.isoformat()[:16],
        ", ".join(remark for remark, applies in remarks.items() if applies),
    )


def _sign(order: Order, authority_directory: Path) -> tuple[x509.Certificate, Ed25519PrivateKey]:
    certificate, private_key = _issue_by(_read_authority(authority_directory), order)
    line = Issued(
        order.role,
        order.name,
        f"{certificate.serial_number:x}",
        certificate.not_valid_after_utc.isoformat(),
    )
    with (authority_directory / ISSUED_FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
    return certificate, private_key


def _issue_by(authority: Authority, order: Order) -> tuple[x509.Certificate, Ed25519PrivateKey]:
    if not _NAME.fullmatch(order.name):
        raise ConfigError(
            f"{order.name!r} is no name of an identity: at most {MAX_NAME_CHARS} letters, digits, "
            "'.', '_' and '-'"
        )
    lifetime = None
    if order.expires_days is not None:
        if order.expires_days < 1:
            raise ConfigError("an identity is good for at least one day")
        lifetime = dt.timedelta(days=order.expires_days)
    return authority.issue([IdentityRole(order.role)], order.name, now=_now(), lifetime=lifetime)


def _read_authority(directory: Path) -> Authority:
    try:
        return Authority(from_pem((directory / AUTHORITY_KEY_FILE).read_bytes()))
    except OSError as exc:
        raise ConfigError(
            f"{directory} is no authority's directory: {exc}; make one with: baton key authority"
        ) from exc


def _read_issued(directory: Path) -> list[Issued]:
    try:
        lines = (directory / ISSUED_FILE).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Issued) for line in lines]
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(f"cannot read {directory / ISSUED_FILE}: {exc}") from exc


def _revoked_of(pem: bytes) -> set[int]:
    return {revoked.serial_number for crl in _split(pem, _CRL) for revoked in _load_crl(crl)}


def _merge(trusted: bytes, revoked: bytes, others: Identity) -> tuple[bytes, bytes]:
    """Those of an authority, and those of others that it does not replace.

    No list where others have none.
    """
    # Each once; with a line break after each, which a file may lack at its end.
    authorities = dict.fromkeys(_split(trusted + others.authorities, _CERTIFICATE))
    if not others.revoked:
        return b"".join(authorities), b"" if len(authorities) > 1 else revoked
    issuer = _load_crl(revoked).issuer
    kept = [crl for crl in _split(others.revoked, _CRL) if _load_crl(crl).issuer != issuer]
    return b"".join(authorities), b"".join([*_split(revoked, _CRL), *kept])


_CERTIFICATE: Final = b"-----END CERTIFICATE-----\n"
_CRL: Final = b"-----END X509 CRL-----\n"


def _split(pem: bytes, end: bytes) -> list[bytes]:
    return [part.lstrip() + end for part in pem.split(end.rstrip())[:-1]]


def _load_crl(pem: bytes) -> x509.CertificateRevocationList:
    try:
        return x509.load_pem_x509_crl(pem)
    except ValueError as exc:
        raise ConfigError(f"a list of revoked certificates does not decode: {exc}") from exc


def _require_empty(directory: Path) -> None:
    if (directory / PRIVATE_KEY_FILE).exists():
        raise ConfigError(
            f"{directory} has an identity; choose another directory, or renew it with: baton key "
            f"rotate {directory}"
        )


def _files_of(certificate: x509.Certificate, private_key: Ed25519PrivateKey) -> dict[str, bytes]:
    return {
        PRIVATE_KEY_FILE: to_pem(private_key),
        CERTIFICATE_FILE: certificate.public_bytes(Encoding.PEM),
    }


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Replace files, each at once: who reads them between two keeps what was read before."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            draft = directory / f".{name}.{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                file.write(content)
            draft.rename(directory / name)
    except OSError as exc:
        raise ConfigError(f"cannot write to {directory}: {exc.strerror}") from exc


def _now() -> dt.datetime:
    return dt.datetime.fromtimestamp(MachineClock().unix_now(), dt.UTC)
