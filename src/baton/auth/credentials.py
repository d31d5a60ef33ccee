"""What a process proves itself with, and how it checks others; files are read again as they change.

Either an identity that an authority issued (a directory), or one that is derived from the cluster
key, under which every holder of the key may have any role.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from baton.auth.certificates import (
    Identity,
    IdentityRole,
    PeerIdentity,
    Trust,
    derive_identity,
    from_pem,
    read_certificate,
)
from baton.auth.key import ClusterKey
from baton.auth.verified_tickets import VerifiedTickets
from baton.clock import Clock, MachineClock
from baton.errors import AuthenticationError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger(__name__)

RELOAD_INTERVAL_S: Final = 1.0
MAX_FILE_BYTES: Final = 1 << 20
MAX_VERIFIED: Final = 1024

CERTIFICATE_FILE: Final = "tls.crt"
PRIVATE_KEY_FILE: Final = "tls.key"
AUTHORITIES_FILE: Final = "ca.crt"
REVOKED_FILE: Final = "ca.crl"
IDENTITY_FILES: Final = (CERTIFICATE_FILE, PRIVATE_KEY_FILE, AUTHORITIES_FILE, REVOKED_FILE)
"""Of an identity's directory; the first three are those of a Kubernetes secret of type TLS."""


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key, and the certificate (DER) that goes with what it signs."""

    certificate: bytes
    private_key: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """An Ed25519 signature: 64 bytes."""
        return self.private_key.sign(message)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One reading of the files. `number` counts readings."""

    number: int
    identity: Identity
    own: PeerIdentity
    signer: Signer
    find_peer: Callable[[bytes], PeerIdentity] = field(repr=False)
    revoked: frozenset[int] = field(repr=False)
    verified_tickets: VerifiedTickets = field(default_factory=VerifiedTickets, repr=False)


class Credentials:
    """See the module. Thread-safe.

    `key` is the cluster key of this start: for what workers share, as the store's entries.
    """

    def __init__(
        self,
        key: ClusterKey,
        read: Callable[[], Identity],
        files: Sequence[Path] = (),
        clock: Clock | None = None,
        *,
        check: Callable[[Identity], object] | None = None,
    ) -> None:
        """`read` gives the identity at once, and again after one of `files` changed.

        `check` raises OSError or ValueError for one that other users of it could not use.

        Raises:
            ConfigError: the identity cannot be used.
        """
        self.key = key
        self._read, self._files, self._clock = read, tuple(files), clock or MachineClock()
        self._check = check
        self._lock = threading.Lock()
        self._looked_at = self._clock.now()
        self._version = self._stat()
        self._problem = ""
        self._loaded = self._load(read(), 0)

    @classmethod
    def of(cls, *keys: ClusterKey) -> Credentials:
        """Derived from cluster keys: the first is one's own, all are accepted of others."""
        return cls(keys[0], lambda: derive_identity(keys))

    @classmethod
    def generate(cls) -> Credentials:
        """Of a fresh cluster key."""
        return cls.of(ClusterKey.generate())

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        key: ClusterKey,
        clock: Clock | None = None,
        *,
        check: Callable[[Identity], object] | None = None,
    ) -> Credentials:
        """Read `IDENTITY_FILES`, of which the list of what was revoked may be absent at the start.

        Raises:
            ConfigError: a file is missing, cannot be used, or others can read the private key.
        """
        files = [directory / name for name in IDENTITY_FILES]
        made = cls(key, lambda: read_identity(directory), files, clock, check=check)
        revoked = directory / REVOKED_FILE
        # A list that revokes nothing has a signature: perhaps a copy has failed half-way.
        if not made.identity.revoked and revoked.exists():
            log.warning(
                "%s is empty, so that nothing counts as revoked: copy the one of the authority's "
                "directory, or remove the file",
                revoked,
            )
        return made

    @property
    def number(self) -> int:
        """Counts readings: others may have been revoked since the last one."""
        return self._current().number

    def is_revoked(self, peer: PeerIdentity) -> bool:
        """Whether one that was verified before is not to be trusted any more."""
        return peer.serial_number in self._current().revoked

    @property
    def identity(self) -> Identity:
        """As it is now."""
        return self._current().identity

    @property
    def own(self) -> PeerIdentity:
        """What others find in one's own certificate."""
        return self._current().own

    @property
    def verified_tickets(self) -> VerifiedTickets:
        """What was verified since the files were last read: whoever signed it may be revoked."""
        return self._current().verified_tickets

    @property
    def signer(self) -> Signer:
        """One's own: `verify` at a peer checks what it signs."""
        return self._current().signer

    def require(self, role: IdentityRole, name: str | None = None) -> None:
        """Check that this process may be what it was started as.

        Raises:
            ConfigError: its certificate is for another role or name.
        """
        own = self.own
        if role not in own.roles or (name is not None and not own.may_be(name)):
            wanted = f"{role} {name}" if name else str(role)
            raise ConfigError(
                f"security.identity is that of {own}, and this is {wanted}; issue one with: "
                f"baton key issue --role {role} --name {name or 'NAME'}"
            )

    def find_peer(self, certificate: bytes) -> PeerIdentity:
        """Who the holder of a certificate in DER is: to be trusted, now.

        Raises:
            AuthenticationError: not to be trusted.
        """
        peer = self._current().find_peer(certificate)
        if not peer.since <= self._clock.unix_now() <= peer.until:
            raise AuthenticationError(f"the certificate of {peer} has expired, or is not yet good")
        return peer

    def verify(
        self, role: IdentityRole, certificate: bytes, message: bytes, signature: bytes
    ) -> PeerIdentity:
        """Check a signature by someone of a role; who it was.

        Raises:
            AuthenticationError: the certificate is not to be trusted, is for another role, or the
                signature is not its holder's.
        """
        peer = self.find_peer(certificate)
        if role not in peer.roles:
            raise AuthenticationError(f"the peer is {peer}, and this takes a {role}")
        try:
            peer.public_key.verify(signature, message)
        except InvalidSignature:
            raise AuthenticationError(f"the signature is not that of {peer}") from None
        return peer

    def _current(self) -> _Loaded:
        if self._files and self._clock.now() - self._looked_at >= RELOAD_INTERVAL_S:
            self._reload()
        return self._loaded

    def _reload(self) -> None:
        with self._lock:
            now = self._clock.now()
            if now - self._looked_at < RELOAD_INTERVAL_S:
                return
            self._looked_at = now
            version = self._stat()
            if version == self._version:
                return
            try:
                self._loaded = self._load_again(self._loaded)
            except ConfigError as exc:
                # Perhaps half of the files were replaced: they are looked at again.
                if str(exc) != self._problem:
                    log.error("%s; what was read before stays in use", exc)  # noqa: TRY400
                self._problem = str(exc)
                return
            self._version, self._problem = version, ""
            log.info("read the identity %s again", self._loaded.own)

    def _stat(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(file_version(path) for path in self._files)

    def _load_again(self, before: _Loaded) -> _Loaded:
        identity = self._read()
        if before.identity.revoked and not identity.revoked:
            raise ConfigError(
                f"{REVOKED_FILE} of {before.own} is gone or empty: what it revoked would be "
                "trusted again; start the process anew to do without a list"
            )
        return self._load(identity, before.number + 1)

    def _load(self, identity: Identity, number: int) -> _Loaded:
        private_key = from_pem(identity.private_key)
        certificate, own = read_certificate(identity.certificate)
        if own.public_key.public_bytes_raw() != private_key.public_key().public_bytes_raw():
            raise ConfigError(f"the private key is not that of the certificate of {own}")
        der = certificate.public_bytes(Encoding.DER)
        trust = Trust(identity)
        find_peer = lru_cache(maxsize=MAX_VERIFIED)(trust.find_peer)
        try:
            find_peer(der)
        except AuthenticationError as exc:
            raise ConfigError(f"one's own certificate is not good: {exc}") from exc
        if not own.since <= self._clock.unix_now() <= own.until:
            until = dt.datetime.fromtimestamp(own.until, dt.UTC)
            raise ConfigError(
                f"the certificate of {own} was good until {until:%Y-%m-%d %H:%M} UTC; renew it "
                "with: baton key rotate DIRECTORY"
            )
        if self._check is not None:
            try:
                self._check(identity)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"the identity {own} cannot be used: {exc}") from exc
        return _Loaded(
            number, identity, own, Signer(der, private_key), find_peer, trust.revoked_serial_numbers
        )


def read_identity(directory: Path) -> Identity:
    """Read an identity's directory.

    Raises:
        ConfigError: a file is missing or too large, the list of what was revoked is empty, or
            others can read the private key.
    """
    private_key = directory / PRIVATE_KEY_FILE
    try:
        if private_key.stat().st_mode & 0o007:
            raise ConfigError(f"every user can read {private_key}: run `chmod 600 {private_key}`")
        revoked = directory / REVOKED_FILE
        return Identity(
            certificate=_read_file(directory / CERTIFICATE_FILE),
            authorities=_read_file(directory / AUTHORITIES_FILE),
            private_key=_read_file(private_key),
            revoked=_read_file(revoked) if revoked.exists() else b"",
        )
    except OSError as exc:
        raise ConfigError(
            f"cannot read the identity in {directory}: {exc}; make one with: baton key issue"
        ) from exc


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content


def file_version(path: Path) -> tuple[int, int, int] | None:
    """What differs once a file was changed or replaced; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
