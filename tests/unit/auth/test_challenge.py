from __future__ import annotations

import datetime as dt

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from baton.auth.certificates import Authority, Identity, IdentityRole, to_pem
from baton.auth.challenge import (
    ANSWER_BYTES,
    EPHEMERAL_BYTES,
    MAC_BYTES,
    SIGNATURE_BYTES,
    DialerChallenge,
    ListenerChallenge,
)
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import AuthenticationError, ProtocolError

KEY = Credentials.of(ClusterKey(b"k" * 32))
AUTHORITY = Authority.generate()


def issued(role: IdentityRole, name: str, *revoked: int) -> Credentials:
    certificate, private_key = AUTHORITY.issue([role], name)
    crl = AUTHORITY.revoke(revoked, dt.datetime.now(dt.UTC))
    identity = Identity(
        certificate.public_bytes(Encoding.PEM), AUTHORITY.certificate, to_pem(private_key), crl
    )
    return Credentials(ClusterKey.generate(), lambda: identity)


def test_both_know_who_the_other_is_and_share_keys_that_nobody_else_has() -> None:
    dialer = DialerChallenge(issued(IdentityRole.WORKER, "d"), "tcp")
    listener = ListenerChallenge(issued(IdentityRole.WORKER, "p"), "tcp")
    listener.finish(dialer.answer(listener.proof(dialer.hello())))
    assert dialer.peer is not None
    assert listener.peer is not None
    assert (dialer.peer.name, listener.peer.name) == ("p", "d")
    assert dialer.session is not None
    assert listener.session is not None
    assert listener.session.open(dialer.session.seal(b"body")) == b"body"
    assert dialer.session.keys == listener.session.keys[::-1]


def test_two_connections_of_the_same_peers_share_no_key() -> None:
    sessions = []
    for _ in range(2):
        dialer, listener = DialerChallenge(KEY, "tcp"), ListenerChallenge(KEY, "tcp")
        listener.finish(dialer.answer(listener.proof(dialer.hello())))
        assert dialer.session is not None
        sessions.append(dialer.session.keys)
    assert not set(sessions[0]) & set(sessions[1])


def test_a_listener_with_another_key_is_refused() -> None:
    dialer = DialerChallenge(KEY, "tcp")
    listener = ListenerChallenge(Credentials.generate(), "tcp")
    with pytest.raises(AuthenticationError, match="BATON_CLUSTER_KEY"):
        dialer.answer(listener.proof(dialer.hello()))


@pytest.mark.parametrize("role", [IdentityRole.GATEWAY, IdentityRole.MONITOR])
def test_who_is_no_worker_is_refused_on_either_side(role: IdentityRole) -> None:
    worker, other = issued(IdentityRole.WORKER, "w"), issued(role, "g")
    dialer, listener = DialerChallenge(worker, "tcp"), ListenerChallenge(other, "tcp")
    with pytest.raises(AuthenticationError, match=f"{role} g"):
        dialer.answer(listener.proof(dialer.hello()))
    dialer, listener = DialerChallenge(other, "tcp"), ListenerChallenge(worker, "tcp")
    answer = dialer.answer(listener.proof(dialer.hello()))
    with pytest.raises(AuthenticationError, match=f"{role} g"):
        listener.finish(answer)


def test_a_revoked_worker_is_refused() -> None:
    stolen = issued(IdentityRole.WORKER, "stolen")
    worker = issued(IdentityRole.WORKER, "w", stolen.own.serial_number)
    dialer, listener = DialerChallenge(worker, "tcp"), ListenerChallenge(stolen, "tcp")
    with pytest.raises(AuthenticationError, match="worker stolen was revoked"):
        dialer.answer(listener.proof(dialer.hello()))


def test_a_dialer_that_reflects_the_listeners_proof_is_refused() -> None:
    listener = ListenerChallenge(KEY, "tcp")
    proof = listener.proof(DialerChallenge(KEY, "tcp").hello())
    with pytest.raises(AuthenticationError):
        listener.finish(proof[EPHEMERAL_BYTES:])


def test_a_proof_for_another_purpose_is_refused() -> None:
    dialer, listener = DialerChallenge(KEY, "tcp"), ListenerChallenge(KEY, "handoff")
    with pytest.raises(AuthenticationError):
        dialer.answer(listener.proof(dialer.hello()))


def test_an_answer_of_an_earlier_connection_is_refused() -> None:
    dialer, listener = DialerChallenge(KEY, "tcp"), ListenerChallenge(KEY, "tcp")
    answer = dialer.answer(listener.proof(dialer.hello()))
    later = ListenerChallenge(KEY, "tcp")
    later.proof(dialer.hello())
    with pytest.raises(AuthenticationError):
        later.finish(answer)


def test_a_worker_on_the_way_cannot_put_its_name_on_anothers_connection() -> None:
    """It relays both ephemeral keys, and signs them itself: it lacks the secret (SIGMA's MAC)."""
    dialer = DialerChallenge(issued(IdentityRole.WORKER, "d"), "tcp")
    listener = ListenerChallenge(issued(IdentityRole.WORKER, "p"), "tcp")
    answer = dialer.answer(listener.proof(dialer.hello()))
    relay = issued(IdentityRole.WORKER, "relay").signer
    message = b"|".join((b"dialer", listener._transcript, relay.certificate))
    mac = answer[SIGNATURE_BYTES : SIGNATURE_BYTES + MAC_BYTES]
    with pytest.raises(AuthenticationError, match="worker relay signed, but does not know"):
        listener.finish(relay.sign(message) + mac + relay.certificate)


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ProtocolError):
        ListenerChallenge(KEY, "tcp").proof(b"short")
    with pytest.raises(ProtocolError):
        DialerChallenge(KEY, "tcp").answer(b"short")
    hello = DialerChallenge(KEY, "tcp").hello()
    with pytest.raises(ProtocolError):
        DialerChallenge(KEY, "tcp").answer(hello + bytes(ANSWER_BYTES + 1))
    with pytest.raises(AuthenticationError):
        DialerChallenge(KEY, "tcp").answer(hello + b"short")
    with pytest.raises(ProtocolError):  # a point of low order: the secret would be known
        ListenerChallenge(KEY, "tcp").proof(bytes(32))
