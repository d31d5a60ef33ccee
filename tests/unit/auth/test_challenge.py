from __future__ import annotations

import pytest

from baton.auth.challenge import DialerChallenge, ListenerChallenge
from baton.auth.key import ClusterKey
from baton.errors import AuthenticationError, ProtocolError

KEY = ClusterKey(b"k" * 32)


def test_two_holders_of_the_key_believe_each_other() -> None:
    dialer, listener = DialerChallenge(KEY, "tcp"), ListenerChallenge(KEY, "tcp")
    listener.finish(dialer.answer(listener.proof(dialer.hello())))


def test_a_listener_with_another_key_is_refused() -> None:
    dialer = DialerChallenge(KEY, "tcp")
    listener = ListenerChallenge(ClusterKey(b"x" * 32), "tcp")
    with pytest.raises(AuthenticationError, match="BATON_CLUSTER_KEY"):
        dialer.answer(listener.proof(dialer.hello()))


def test_a_dialer_that_reflects_the_listeners_proof_is_refused() -> None:
    listener = ListenerChallenge(KEY, "tcp")
    proof = listener.proof(b"n" * 16)
    with pytest.raises(AuthenticationError):
        listener.finish(proof[16:])


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


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ProtocolError):
        ListenerChallenge(KEY, "tcp").proof(b"short")
    with pytest.raises(ProtocolError):
        DialerChallenge(KEY, "tcp").answer(b"short")
