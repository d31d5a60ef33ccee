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
    Silence,
    judge_silence,
)
from baton.ids import Epoch, WorkerId
from baton.protocol.heartbeats import HEARTBEAT_BYTES, HEARTBEAT_INTERVAL_S, make_heartbeat

W, OTHER = WorkerId("w"), WorkerId("other")
FIRST, SECOND = Epoch("a" * 32), Epoch("b" * 32)
AT = URL("https://10.0.0.1:1")


def at(second: float) -> Instant:
    return Instant(second)


@given(sequences=st.lists(st.integers(1, 2**64 - 1), max_size=20))
def test_only_a_later_heartbeat_is_taken(sequences: list[int]) -> None:
    table = HeartbeatTable(b"s" * 32)
    grant = table.grant(W, FIRST, AT)
    latest, received_at = 0, None
    for number, sequence in enumerate(sequences):
        result = table.take(make_heartbeat(grant, sequence), at(number))
        assert (result is HeartbeatResult.TAKEN) == (sequence > latest)
        if sequence > latest:
            latest, received_at = sequence, at(number)
        found = table.find(W)
        assert found is not None
        assert found.received_at == received_at


@given(position=st.integers(0, HEARTBEAT_BYTES - 1), bit=st.integers(0, 7))
def test_a_changed_heartbeat_is_not_taken(position: int, bit: int) -> None:
    table = HeartbeatTable(b"s" * 32)
    changed = bytearray(make_heartbeat(table.grant(W, FIRST, AT), 7))
    changed[position] ^= 1 << bit
    assert table.take(bytes(changed), at(1)) in {HeartbeatResult.UNKNOWN, HeartbeatResult.FORGED}


@given(data=st.binary(max_size=64))
def test_anything_else_is_not_taken(data: bytes) -> None:
    table = HeartbeatTable(b"s" * 32)
    grant = table.grant(W, FIRST, AT)
    assert table.take(data, at(1)) is HeartbeatResult.UNKNOWN
    assert table.take(grant.id + data, at(1)) is not HeartbeatResult.TAKEN


def test_a_grant_is_of_one_epoch_one_worker_and_one_gateway() -> None:
    table, another = HeartbeatTable(b"s" * 32), HeartbeatTable(b"t" * 32)
    first = table.grant(W, FIRST, AT)
    assert table.grant(W, FIRST, AT) == first
    grants = {first, table.grant(OTHER, FIRST, AT), another.grant(W, FIRST, AT)}
    assert table.take(make_heartbeat(first, 5), at(1)) is HeartbeatResult.TAKEN
    grants.add(table.grant(W, SECOND, AT))
    assert len({grant.key for grant in grants}) == len({grant.id for grant in grants}) == 4
    assert table.take(make_heartbeat(first, 6), at(2)) is HeartbeatResult.UNKNOWN
    table.forget(W)
    assert table.find(W) is None
    assert len(table) == 1


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
    table.grant(W, FIRST, AT)
    assert not any(each.is_missing(at(now)) for each in table)
