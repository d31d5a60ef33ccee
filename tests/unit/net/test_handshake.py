import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import AuthenticationError, ProtocolError
from baton.net.framing import (
    MAGIC,
    MAX_HANDSHAKE_BYTES,
    PREFIX_BYTES,
    DialerHandshake,
    ListenerHandshake,
)

KEY, OTHER_KEY = Credentials.of(ClusterKey(b"k" * 32)), Credentials.of(ClusterKey(b"o" * 32))


def body(frame):
    assert int.from_bytes(frame[:PREFIX_BYTES], "little") == len(frame) - PREFIX_BYTES
    assert len(frame) <= PREFIX_BYTES + MAX_HANDSHAKE_BYTES
    return frame[PREFIX_BYTES:]


def test_two_that_hold_the_key_prove_it():
    dialer, listener = DialerHandshake(KEY, "tcp"), ListenerHandshake(KEY, "tcp")
    proof = listener.reply(body(dialer.opening()))
    assert not listener.done
    assert listener.reply(body(dialer.reply(body(proof)))) == b""
    assert listener.done


def test_a_listener_without_the_key_is_found_out():
    dialer, listener = DialerHandshake(KEY, "tcp"), ListenerHandshake(OTHER_KEY, "tcp")
    with pytest.raises(AuthenticationError):
        dialer.reply(body(listener.reply(body(dialer.opening()))))


def test_a_dialer_without_the_key_is_found_out():
    dialer, listener = DialerHandshake(KEY, "tcp"), ListenerHandshake(KEY, "tcp")
    listener.reply(body(dialer.opening()))
    with pytest.raises(AuthenticationError):
        listener.reply(bytes(32))
    assert not listener.done


def test_a_proof_for_one_purpose_does_not_open_another():
    dialer, listener = DialerHandshake(KEY, "tcp"), ListenerHandshake(KEY, "shared")
    with pytest.raises(AuthenticationError):
        dialer.reply(body(listener.reply(body(dialer.opening()))))


@pytest.mark.parametrize("start", [b"", b"BATON", b"BATON\x01", b"GET / "])
def test_another_protocol_or_version_is_told_apart(start):
    rest = body(DialerHandshake(KEY, "tcp").opening())[len(MAGIC) :]
    with pytest.raises(ProtocolError, match="version"):
        ListenerHandshake(KEY, "tcp").reply(start + rest)
    with pytest.raises(ProtocolError, match="version"):
        DialerHandshake(KEY, "tcp").reply(start + bytes(48))
