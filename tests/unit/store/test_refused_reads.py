"""Entries that a server refused to give are misses for a while, and tell when it refuses all."""

from __future__ import annotations

from baton.store.remote.refused_reads import MAX_NAMES, READ_AGAIN_S, SERVER_REFUSES, RefusedReads
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import name_of

NAMES = [name_of(f"{i}") for i in range(MAX_NAMES + 1)]


def test_they_are_left_alone_for_a_while() -> None:
    clock = ManualClock()
    refused = RefusedReads(clock)
    assert not refused
    refused.add(NAMES[0])
    clock.advance(READ_AGAIN_S - 1)
    refused.add(NAMES[1])
    clock.advance(1)
    assert refused
    assert [name in refused for name in NAMES[:3]] == [False, True, False]


def test_not_more_than_some_are_remembered() -> None:
    refused = RefusedReads(ManualClock())
    for name in NAMES:
        refused.add(name)
    assert [name in refused for name in NAMES] == [False] + [True] * MAX_NAMES


def test_those_that_are_too_large_are_left_alone_and_are_no_refusal() -> None:
    clock = ManualClock()
    refused = RefusedReads(clock)
    for name in NAMES[: 2 * SERVER_REFUSES]:
        refused.leave_alone(name)
    assert NAMES[0] in refused
    assert not refused.add(NAMES[-1]), "the first of a row"
    clock.advance(READ_AGAIN_S)
    assert NAMES[0] not in refused


def test_different_ones_in_a_row_are_refused_by_the_server() -> None:
    refused = RefusedReads(ManualClock())
    row = NAMES[:SERVER_REFUSES]
    assert not any(refused.add(NAMES[0]) for _ in range(2 * SERVER_REFUSES)), "it is the same one"
    assert [refused.add(name) for name in row] == [False] * (SERVER_REFUSES - 1) + [True]
    assert not any(refused.add(name) for name in row[:-1]), "the next row"
    refused.end_row()
    assert not refused.add(row[-1])
