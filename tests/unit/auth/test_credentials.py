from __future__ import annotations

import datetime as dt
import shutil
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from baton.auth.certificates import Authority, IdentityRole
from baton.auth.credentials import Credentials, read_identity
from baton.auth.issuing import Order, create_authority, describe, issue, renew, revoke
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, TicketIssue, WorkerRef, seal, unseal
from baton.config.sections import ClusterSection, SecuritySection
from baton.errors import AuthenticationError, ConfigError, TicketError
from baton.ids import Epoch, TicketId, WorkerId
from baton.net.credentials import find_credentials, parse_keys
from baton.net.tls import contexts_of
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

KEY = ClusterKey(b"k" * 32)
TICKET = Ticket(
    id=TicketId(b"i" * 16),
    request_id="req-1",
    prefill=WorkerRef(WorkerId("p"), Epoch("a" * 32), "127.0.0.1:1"),
    decode=WorkerRef(WorkerId("d"), Epoch("b" * 32), "127.0.0.1:2"),
    mode="push",
    issue=TicketIssue(Epoch("c" * 32), 7, 1.5, 60.0),
)


class Directories:
    """Of an authority, `ca`, and of identities by their names."""

    def __init__(self, path: Path) -> None:
        self.path, self.ca = path, path / "ca"
        create_authority(self.ca)

    def issue(self, name: str, role: str = "worker", days: int | None = None) -> Path:
        issue(Order(role, name, days), self.ca, self.path / name)
        return self.path / name


@pytest.fixture
def directories(tmp_path: Path) -> Directories:
    return Directories(tmp_path)


def clock_at(moment: dt.datetime) -> ManualClock:
    return ManualClock(unix_s=moment.timestamp())


def test_files_are_private_and_have_the_names_of_a_kubernetes_secret(
    directories: Directories,
) -> None:
    files = {path.name: path.stat().st_mode & 0o777 for path in directories.issue("w").iterdir()}
    assert files == dict.fromkeys(("tls.crt", "tls.key", "ca.crt", "ca.crl"), 0o600)


def test_a_key_that_every_user_can_read_is_refused(directories: Directories) -> None:
    directory = directories.issue("w")
    (directory / "tls.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Credentials.from_directory(directory, KEY)


def test_another_certificates_key_is_refused(directories: Directories) -> None:
    one, other = directories.issue("one"), directories.issue("other")
    shutil.copy(other / "tls.key", one / "tls.key")
    with pytest.raises(ConfigError, match="not that of the certificate of worker one"):
        Credentials.from_directory(one, KEY)


def test_what_a_process_was_started_as_is_what_its_certificate_is_for(
    directories: Directories,
) -> None:
    credentials = Credentials.from_directory(directories.issue("w"), KEY)
    credentials.require(IdentityRole.WORKER, "w")
    credentials.require(IdentityRole.WORKER, "w/3")  # a rank
    for role, name in ((IdentityRole.WORKER, "v"), (IdentityRole.GATEWAY, None)):
        with pytest.raises(ConfigError, match="baton key issue --role"):
            credentials.require(role, name)


def test_what_expired_is_refused_by_its_owner_and_by_others(directories: Directories) -> None:
    now = dt.datetime.now(dt.UTC)
    directory, later = directories.issue("w", days=2), now + dt.timedelta(days=3)
    credentials = Credentials.from_directory(directory, KEY, clock_at(now))
    der = credentials.signer.certificate
    other = Credentials.from_directory(directories.issue("v"), KEY, clock_at(later))
    with pytest.raises(AuthenticationError, match="worker w has expired"):
        other.find_peer(der)
    with pytest.raises(ConfigError, match="baton key rotate"):
        Credentials.from_directory(directory, KEY, clock_at(later))


def test_clocks_may_be_an_hour_apart(directories: Directories) -> None:
    der = Credentials.from_directory(directories.issue("w", days=2), KEY).signer.certificate
    for hours in (-1, 1):
        moment = dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours)
        other = Credentials.from_directory(directories.ca.parent / "w", KEY, clock_at(moment))
        assert other.find_peer(der).name == "w"


def test_files_are_followed_and_half_of_them_change_nothing(
    directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    directory, clock = directories.issue("w"), clock_at(dt.datetime.now(dt.UTC))
    credentials = Credentials.from_directory(directory, KEY, clock)
    before = credentials.own.serial_number
    kept = (directory / "tls.key").read_bytes()
    renew(directory, directories.ca)
    renewed = (directory / "tls.key").read_bytes()
    (directory / "tls.key").write_bytes(kept)
    assert credentials.own.serial_number == before, "looked at once a second"
    clock.advance(1.5)
    assert credentials.own.serial_number == before
    clock.advance(1.5)
    assert credentials.own.serial_number == before
    assert caplog.text.count("what was read before stays in use") == 1
    (directory / "tls.key").write_bytes(renewed)
    clock.advance(1.5)
    assert credentials.own.serial_number != before
    assert credentials.number == 1


def test_revoking_names_what_it_revoked(directories: Directories) -> None:
    stolen, other = directories.issue("stolen"), directories.issue("other")
    (revoked,) = revoke("stolen", directories.ca)
    der = Credentials.from_directory(stolen, KEY).signer.certificate
    shutil.copy(directories.ca / "ca.crl", other / "ca.crl")
    credentials = Credentials.from_directory(other, KEY)
    with pytest.raises(AuthenticationError, match="worker stolen was revoked"):
        credentials.find_peer(der)
    with pytest.raises(ConfigError, match="issued no certificate 'nobody'"):
        revoke("nobody", directories.ca)
    rows = {row[1]: row for row in describe(directories.ca)}
    assert rows["stolen"][2:] == (revoked.serial_number, rows["stolen"][3], "revoked")
    assert rows["other"][4] == ""
    shutil.copy(directories.ca / "ca.crl", stolen / "ca.crl")
    assert [row[4] for row in describe(stolen)] == ["revoked"]


def test_a_ticket_of_a_gateway_that_was_revoked_is_not_trusted_any_more(
    directories: Directories,
) -> None:
    gateway, worker = directories.issue("g", role="gateway"), directories.issue("w")
    clock = clock_at(dt.datetime.now(dt.UTC))
    credentials = Credentials.from_directory(worker, KEY, clock)
    text = seal(TICKET, Credentials.from_directory(gateway, KEY))
    assert unseal(text, credentials) == unseal(text, credentials) == TICKET
    revoke("g", directories.ca)
    shutil.copy(directories.ca / "ca.crl", worker / "ca.crl")
    clock.advance(1.5)
    with pytest.raises(TicketError, match="gateway g was revoked"):
        unseal(text, credentials)


def test_an_authority_is_replaced_in_three_steps(directories: Directories) -> None:
    directory, second = directories.issue("w"), directories.path / "ca2"
    create_authority(second)
    old = Credentials.from_directory(directory, KEY).signer.certificate

    def trusts(der: bytes) -> bool:
        try:
            Credentials.from_directory(directory, KEY).find_peer(der)
        except AuthenticationError:
            return False
        return True

    renew(directory, second, keeps_certificate=True)
    assert Credentials.from_directory(directory, KEY).signer.certificate == old
    renew(directory, second)
    new = Credentials.from_directory(directory, KEY).signer.certificate
    assert new != old
    assert trusts(old)
    assert trusts(new)
    renew(directory, second, drops_others=True)
    assert not trusts(old)


def test_a_list_of_one_authority_alone_is_refused(directories: Directories) -> None:
    """TLS would refuse every certificate of the other one."""
    directory = directories.issue("w")
    with (directory / "ca.crt").open("ab") as file:
        file.write(Authority.generate().certificate)
    with pytest.raises(ConfigError, match="the list of each, or of none"):
        Credentials.from_directory(directory, KEY)


def test_names_and_directories_are_checked(directories: Directories) -> None:
    for name in ("", "a/b", "*", "x" * 65, "é"):
        with pytest.raises(ConfigError, match="is no name of an identity"):
            directories.issue(name) if name else issue(
                Order("worker", name), directories.ca, directories.path / "empty"
            )
    directories.issue("w")
    with pytest.raises(ConfigError, match="has an identity"):
        directories.issue("w")
    with pytest.raises(ConfigError, match="has an authority"):
        create_authority(directories.ca)
    with pytest.raises(ConfigError, match="baton key authority"):
        issue(Order("worker", "v"), directories.path / "absent", directories.path / "v")
    with pytest.raises(ConfigError, match="baton key issue"):
        read_identity(directories.path / "absent")


def test_the_authoritys_certificate_is_a_common_one(directories: Directories) -> None:
    """cert-manager and openssl read and make the like."""
    text = (directories.ca / "ca.key").read_bytes()
    assert serialization.load_pem_private_key(text, None)


def test_several_cluster_keys_are_accepted_and_the_file_is_followed(tmp_path: Path) -> None:
    """How the key of a fleet that has one for all is replaced while it serves."""
    old, new = "aa" * 32, "bb" * 32
    files = [tmp_path / name for name in ("a", "b")]

    def write(path: Path, *keys: str) -> None:
        path.write_text("\n".join(keys))
        path.chmod(0o600)

    for path in files:
        write(path, old)
    a, b = (
        find_credentials(ClusterSection(key_file=str(path)), SecuritySection(), {}, ())
        for path in files
    )

    def meet() -> None:
        for one in (a.credentials, b.credentials):
            one._looked_at -= 2.0  # type: ignore[operator]  # as if a second had passed
            one.find_peer(one.signer.certificate)
        a.credentials.find_peer(b.credentials.signer.certificate)
        b.credentials.find_peer(a.credentials.signer.certificate)

    meet()
    for step in ((old, new), (new, old), (new,)):
        for path in files:
            write(path, *step)
            meet()
    retired = Credentials.of(*parse_keys(old)).signer.certificate
    with pytest.raises(AuthenticationError):
        a.credentials.find_peer(retired)
    for text in ("", "\n".join([old] * 5), "short"):
        with pytest.raises(ConfigError):
            parse_keys(text)


def test_a_signature_that_was_good_is_good_for_nothing_else(directories: Directories) -> None:
    clock = clock_at(dt.datetime.now(dt.UTC))
    signer = Credentials.from_directory(directories.issue("g", "gateway"), KEY, clock).signer
    own = directories.issue("w")
    worker = Credentials.from_directory(own, KEY, clock)
    signature = signer.sign(b"message")
    for _ in range(2):  # remembered, the second time
        peer = worker.verify(IdentityRole.GATEWAY, signer.certificate, b"message", signature)
        assert peer.name == "g"
    with pytest.raises(AuthenticationError, match="signature"):
        worker.verify(IdentityRole.GATEWAY, signer.certificate, b"massage", signature)
    with pytest.raises(AuthenticationError, match="takes a worker"):
        worker.verify(IdentityRole.WORKER, signer.certificate, b"message", signature)
    revoke("g", directories.ca)
    shutil.copy(directories.ca / "ca.crl", own)
    clock.advance(2.0)
    with pytest.raises(AuthenticationError):
        worker.verify(IdentityRole.GATEWAY, signer.certificate, b"message", signature)


def test_what_cannot_be_read_or_does_not_exist_is_refused(directories: Directories) -> None:
    own = directories.issue("w-0")
    for keeps_certificate in (False, True):
        with pytest.raises(ConfigError, match="No such file"):
            renew(own, directories.path / "elsewhere", keeps_certificate=keeps_certificate)
    for days in (4_000_000, 10**10):
        with pytest.raises(ConfigError):
            directories.issue("w-1", days=days)
    (directories.ca / "ca.crl").unlink()
    with pytest.raises(ConfigError, match=r"ca\.crl"):
        list(describe(directories.ca))
    with pytest.raises(ConfigError, match=r"ca\.crl"):
        revoke("w-0", directories.ca)


@pytest.mark.parametrize("ends", ["truncated", "removed"])
def test_a_list_that_ends_while_a_process_runs_revokes_as_before(
    directories: Directories, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """As a copy to a full disk leaves it."""
    stolen, own = directories.issue("stolen"), directories.issue("w")
    der = Credentials.from_directory(stolen, KEY).signer.certificate
    revoke("stolen", directories.ca)
    shutil.copy(directories.ca / "ca.crl", own)
    clock = clock_at(dt.datetime.now(dt.UTC))
    credentials = Credentials.from_directory(own, KEY, clock)
    if ends == "truncated":
        (own / "ca.crl").write_bytes(b"")
    else:
        (own / "ca.crl").unlink()
    clock.advance(1.5)
    with pytest.raises(AuthenticationError, match="worker stolen was revoked"):
        credentials.find_peer(der)
    assert "ca.crl" in caplog.text
    assert "what was read before stays in use" in caplog.text
    shutil.copy(directories.ca / "ca.crl", own)
    renew(own, directories.ca)
    clock.advance(1.5)
    assert credentials.number == 1
    with pytest.raises(AuthenticationError, match="worker stolen was revoked"):
        credentials.find_peer(der)


def test_an_empty_list_at_the_start_is_none_and_warned_of(
    directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    own = directories.issue("w")
    (own / "ca.crl").unlink()
    assert Credentials.from_directory(own, KEY).identity.revoked == b""
    assert not caplog.records
    (own / "ca.crl").write_bytes(b"")
    assert Credentials.from_directory(own, KEY).identity.revoked == b""
    assert "ca.crl is empty, so that nothing counts as revoked" in caplog.text


def test_an_identity_without_a_list_gets_none_with_a_second_authority(
    directories: Directories,
) -> None:
    own = directories.issue("w")
    (own / "ca.crl").unlink()
    create_authority(directories.path / "ca2")
    renew(own, directories.path / "ca2", keeps_certificate=True)
    assert not (own / "ca.crl").exists()
    assert Credentials.from_directory(own, KEY).own.name == "w"


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt", "ca.crl"])
def test_files_without_a_last_line_break_can_be_used(directories: Directories, name: str) -> None:
    own = directories.issue("w")
    (own / name).write_bytes((own / name).read_bytes().rstrip(b"\n"))
    assert contexts_of(Credentials.from_directory(own, KEY).identity).dialing.cert_store_stats()


def test_rotating_and_revoking_keep_what_files_without_a_last_line_break_have(
    directories: Directories,
) -> None:
    own, second = directories.issue("w"), directories.path / "ca2"
    first, last = directories.issue("a"), directories.issue("b")
    revoke("a", directories.ca)
    create_authority(second)
    for path in (directories.ca / "ca.crl", own / "ca.crt", own / "ca.crl", second / "ca.crt"):
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
    revoke("b", directories.ca)
    shutil.copy(directories.ca / "ca.crl", own)
    renew(own, second, keeps_certificate=True)
    credentials = Credentials.from_directory(own, KEY)
    assert credentials.identity.authorities.count(b"BEGIN") == 2
    for revoked in (first, last):
        der = Credentials.from_directory(revoked, KEY).signer.certificate
        with pytest.raises(AuthenticationError, match="was revoked"):
            credentials.find_peer(der)


def test_an_identity_that_tls_cannot_use_is_not_taken_up(
    directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    own, clock = directories.issue("w"), clock_at(dt.datetime.now(dt.UTC))
    credentials = Credentials.from_directory(own, KEY, clock, check=contexts_of)
    before, kept = credentials.identity, (own / "ca.crt").read_bytes()
    # A comment, which OpenSSL reads as text: it must be ASCII there.
    (own / "ca.crt").write_bytes("Autorität\n".encode() + kept)
    clock.advance(1.5)
    assert credentials.identity is before
    assert "the identity worker w cannot be used" in caplog.text
    with pytest.raises(ConfigError, match="cannot be used"):
        Credentials.from_directory(own, KEY, clock, check=contexts_of)
    (own / "ca.crt").write_bytes(b"Authority\n" + kept)
    clock.advance(1.5)
    assert credentials.identity is not before
