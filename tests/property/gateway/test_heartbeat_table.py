"""Heartbeats in any order, repeated, changed, of other epochs and of other gateways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from baton.clock import Instant
from baton.gateway.members.heartbeat_table import (
    MISSED_S,
    HeartbeatResult,
    HeartbeatTable,
    Renewal,
    Silence,
    judge_silence,
)
from baton.ids import Epoch, WorkerId
from baton.protocol.heartbeats import (
    HEARTBEAT_BYTES,
    HEARTBEAT_INTERVAL_S,
    MAX_RENEWAL_BYTES,
    Acknowledgement,
    make_acknowledgement,
    make_heartbeat,
    make_renewal,
    read_acknowledgement,
)

W, OTHER = WorkerId("w"), WorkerId("other")
FIRST, SECOND = Epoch("a" * 32), Epoch("b" * 32)
AT = URL("https://10.0.0.1:1")
OWN = b"certificate"


def at(second: float) -> Instant:
    return Instant(second)


@given(sequences=st.lists(st.integers(1, 2**64 - 1), max_size=20))
def test_only_a_later_heartbeat_is_taken(sequences: list[int]) -> None:
    table = HeartbeatTable(b"s" * 32)
    grant = table.grant(W, FIRST, AT, OWN)
    latest, received_at = 0, None
    for number, sequence in enumerate(sequences):
        result = table.take(make_heartbeat(grant, sequence), at(number))
        assert (result is HeartbeatResult.TAKEN) == (sequence > latest)
        if sequence > latest:
            latest, received_at = sequence, at(number)
        (found,) = table
        assert found.received_at == received_at


@given(position=st.integers(0, HEARTBEAT_BYTES - 1), bit=st.integers(0, 7))
def test_a_changed_heartbeat_is_not_taken(position: int, bit: int) -> None:
    table = HeartbeatTable(b"s" * 32)
    changed = bytearray(make_heartbeat(table.grant(W, FIRST, AT, OWN), 7))
    changed[position] ^= 1 << bit
    assert table.take(bytes(changed), at(1)) in {HeartbeatResult.UNKNOWN, HeartbeatResult.FORGED}


@given(data=st.binary(max_size=64))
def test_anything_else_is_not_taken(data: bytes) -> None:
    table = HeartbeatTable(b"s" * 32)
    grant = table.grant(W, FIRST, AT, OWN)
    assert table.take(data, at(1)) is HeartbeatResult.UNKNOWN
    assert table.take(grant.id + data, at(1)) is not HeartbeatResult.TAKEN


def test_a_grant_is_of_one_epoch_one_worker_and_one_gateway() -> None:
    table, another = HeartbeatTable(b"s" * 32), HeartbeatTable(b"t" * 32)
    first = table.grant(W, FIRST, AT, OWN)
    assert table.grant(W, FIRST, AT, OWN) == first
    grants = {first, table.grant(OTHER, FIRST, AT, OWN), another.grant(W, FIRST, AT, OWN)}
    assert table.take(make_heartbeat(first, 5), at(1)) is HeartbeatResult.TAKEN
    grants.add(table.grant(W, SECOND, AT, OWN))
    assert len({grant.key for grant in grants}) == len({grant.id for grant in grants}) == 4
    assert table.take(make_heartbeat(first, 6), at(2)) is HeartbeatResult.UNKNOWN
    table.forget(W)
    assert [each.worker for each in table] == [OTHER]


def test_a_stall_of_two_seconds_is_suspected_and_three_seconds_are_silent() -> None:
    silent_after_s = 2.75  # the default
    stall_s = 2.0 + HEARTBEAT_INTERVAL_S
    assert judge_silence(HEARTBEAT_INTERVAL_S, silent_after_s) is Silence.NONE
    assert judge_silence(MISSED_S, silent_after_s) is Silence.NONE
    assert judge_silence(stall_s, silent_after_s) is Silence.SUSPECTED
    assert judge_silence(3.0 - 0.1, silent_after_s) is Silence.SILENT, "with 0.1 s to look"


@pytest.mark.parametrize("now", [0.0, 100.0])
def test_who_never_sent_one_lacks_none(now: float) -> None:
    table = HeartbeatTable(b"s" * 32)
    table.grant(W, FIRST, AT, OWN)
    assert not table.missing(at(now))


@given(sealed=st.binary(min_size=9, max_size=1100))
def test_a_renewal_is_read_as_it_was_sealed_once_in_a_moment(sealed: bytes) -> None:
    table = HeartbeatTable(b"s" * 32)
    datagram = make_renewal(table.grant(W, FIRST, AT, OWN), sealed)
    assert datagram is not None
    renewal = table.read_renewal(datagram, at(1))
    assert isinstance(renewal, Renewal)
    assert (renewal.sealed, renewal.sender.worker, renewal.sender.certificate) == (sealed, W, OWN)
    assert renewal.sender.received_at is None, "it is no heartbeat"
    assert table.read_renewal(datagram, at(1)) is HeartbeatResult.REPEATED
    assert isinstance(table.read_renewal(datagram, at(2)), Renewal), "leases refuse what is old"


@given(data=st.data(), bit=st.integers(0, 7))
def test_a_changed_renewal_is_not_read(data: st.DataObject, bit: int) -> None:
    table = HeartbeatTable(b"s" * 32)
    datagram = make_renewal(table.grant(W, FIRST, AT, OWN), b"announcement")
    assert datagram is not None
    changed = bytearray(datagram)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << bit
    result = table.read_renewal(bytes(changed), at(1))
    assert result in {HeartbeatResult.UNKNOWN, HeartbeatResult.FORGED}


def test_what_is_too_long_for_a_datagram_is_posted() -> None:
    grant = HeartbeatTable(b"s" * 32).grant(W, FIRST, AT, OWN)
    longest = make_renewal(grant, bytes(MAX_RENEWAL_BYTES - 24))
    assert longest is not None
    assert len(longest) == MAX_RENEWAL_BYTES
    assert make_renewal(grant, bytes(MAX_RENEWAL_BYTES - 23)) is None


@given(sequence=st.integers(1, 2**53), asks_for_post=st.booleans(), data=st.data())
def test_only_a_gateway_with_the_key_acknowledges(
    sequence: int, asks_for_post: bool, data: st.DataObject
) -> None:
    grant = HeartbeatTable(b"s" * 32).grant(W, FIRST, AT, OWN)
    acknowledgement = Acknowledgement(sequence, asks_for_post)
    datagram = make_acknowledgement(grant, acknowledgement)
    assert read_acknowledgement(datagram, grant) == acknowledgement
    assert read_acknowledgement(make_heartbeat(grant, sequence), grant) is None, "the worker's own"
    changed = bytearray(datagram)
    changed[data.draw(st.integers(8, len(changed) - 1))] ^= 1
    another = HeartbeatTable(b"t" * 32).grant(W, FIRST, AT, OWN)
    assert read_acknowledgement(bytes(changed), grant) is None
    assert read_acknowledgement(datagram, another) is None
