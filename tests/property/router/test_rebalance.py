"""Moves end, help, and break nothing: whatever the streams, the workers and their predictions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import WorkerId
from baton.router.rebalance import (
    GAIN_OVER_COST,
    MOST_MOVES,
    REST_S,
    SETTLE_S,
    SPARE_BLOCKS,
    STREAM_RESTS_S,
    WELL_WITHIN,
    Move,
    MoveCause,
    Rebalancer,
    StreamLoad,
    WorkerPace,
)

NAMES = [WorkerId(f"w{i}") for i in range(4)]
FIXED_S, EACH_S = 0.01, 0.01
"""A step takes so long, and so much longer for each stream."""
PIECE_S = 0.1
"""Of a prompt."""


def cheap(source: WorkerId, target: WorkerId, num_tokens: int) -> float:
    assert source != target
    return 1e-6 * num_tokens


streams_of = st.lists(
    st.builds(
        StreamLoad,
        key=st.just(0),
        worker=st.sampled_from(NAMES),
        num_tokens=st.integers(1, 10_000),
        num_left=st.integers(0, 4000),
        limit_s=st.sampled_from([0.02, 0.05, 0.1, 0.5]),
        num_moves=st.integers(0, MOST_MOVES),
        moved_at=st.floats(-20, 0),
        gap_limit_s=st.sampled_from([0.05, 0.2, inf]),
        excluded=st.frozensets(st.sampled_from(NAMES), max_size=2),
    ),
    max_size=20,
).map(lambda streams: [replace(s, key=i) for i, s in enumerate(streams)])


def paces(
    streams: list[StreamLoad], names: list[WorkerId] = NAMES, **changes: object
) -> list[WorkerPace]:
    """What workers that are alike need with these streams. The first one computes prompts, too."""
    counts, found = Counter(stream.worker for stream in streams), []
    for name in names:
        pace_s, next_pace_s = (FIXED_S + EACH_S * (counts[name] + more) for more in (0, 1))
        piece_s = PIECE_S if name == NAMES[0] else 0.0
        gaps_s = {"gap_s": pace_s + piece_s, "next_gap_s": next_pace_s + piece_s}
        found.append(replace(WorkerPace(name, pace_s, next_pace_s), **{**gaps_s, **changes}))
    return found


def settle(
    streams: list[StreamLoad], rebalancer: Rebalancer, steps: int = 100
) -> tuple[list[StreamLoad], list[tuple[float, Move]]]:
    """Carry out each move as it is decided, for as long as `steps` half seconds."""
    done, now = [], 0.0
    for _ in range(steps):
        for move in rebalancer.find_moves(streams, paces(streams), cheap, now):
            before = streams[move.key]
            done.append((now, move))
            streams[move.key] = replace(
                before, worker=move.target, num_moves=before.num_moves + 1, moved_at=now
            )
        now += 0.5
    return streams, done


def num_late(streams: list[StreamLoad]) -> int:
    found = {worker.id: worker for worker in paces(streams)}
    return sum(
        found[each.worker].pace_s > each.limit_s or found[each.worker].gap_s > each.gap_limit_s
        for each in streams
    )


@given(streams_of)
def test_moves_end_and_make_no_stream_late(streams):
    late = num_late(streams)
    moved, done = settle(list(streams), Rebalancer())
    assert num_late(moved) <= late
    assert all(s.num_moves <= MOST_MOVES for s in moved)
    assert len(done) <= MOST_MOVES * len(streams)
    _, more = settle(moved, Rebalancer())
    assert len(more) <= len(done) or not done


@given(streams_of)
def test_workers_and_streams_rest(streams):
    moved_from = {stream.key: stream.worker for stream in streams}
    _, done = settle(list(streams), Rebalancer())
    last: dict[object, float] = {}
    for at, move in done:
        assert at >= SETTLE_S
        for worker in (moved_from[move.key], move.target):
            assert at - last.get(worker, -REST_S) >= REST_S
            last[worker] = at
        assert at - last.get(move.key, -STREAM_RESTS_S) >= STREAM_RESTS_S
        last[move.key] = at
        moved_from[move.key] = move.target


@given(
    streams_of,
    st.lists(
        st.builds(
            WorkerPace,
            id=st.just(NAMES[0]),
            pace_s=st.floats(0.001, 1),
            next_pace_s=st.floats(0.001, 1),
            takes=st.booleans(),
            lacks_blocks=st.booleans(),
            num_free_tokens=st.floats(0, 30_000),
            gap_s=st.floats(0.001, 1),
            next_gap_s=st.floats(0.001, 1),
        ),
        min_size=len(NAMES),
        max_size=len(NAMES),
    ),
    st.floats(0, 10),
)
def test_each_move_is_one_that_may_be(streams, drawn, each_cost_s):
    """Against the rules as they are written, at one moment of any fleet."""
    workers = [replace(worker, id=name) for name, worker in zip(NAMES, drawn, strict=True)]
    by_id = {worker.id: worker for worker in workers}

    def cost_s(source: WorkerId, target: WorkerId, num_tokens: int) -> float:
        return each_cost_s

    rebalancer = Rebalancer()
    assert rebalancer.find_moves(streams, workers, cost_s, 0.0) == []
    moves = rebalancer.find_moves(streams, workers, cost_s, SETTLE_S)
    touched = [worker for m in moves for worker in (streams[m.key].worker, m.target)]
    assert len(touched) == len(set(touched))
    for move in moves:
        stream, target = streams[move.key], by_id[move.target]
        source = by_id[stream.worker]
        others = [s for s in streams if s.worker == move.target]
        own = [s for s in streams if s.worker == stream.worker]
        assert target.takes
        assert move.target not in stream.excluded
        assert not target.lacks_blocks
        for each in (stream, *others):
            assert target.next_pace_s <= WELL_WITHIN * each.limit_s
            assert target.next_gap_s <= WELL_WITHIN * each.gap_limit_s
        assert target.num_free_tokens >= SPARE_BLOCKS * (stream.num_tokens + stream.num_left)
        assert stream.num_moves < MOST_MOVES
        assert stream.moved_at + STREAM_RESTS_S <= SETTLE_S
        gain_s = stream.num_left * target.next_pace_s
        if move.cause is MoveCause.PRESSURE:
            assert source.lacks_blocks
        elif source.gap_s <= stream.gap_limit_s:
            assert any(source.pace_s > each.limit_s for each in own)
            gain_s = stream.num_left * (source.pace_s - target.next_pace_s)
        assert gain_s >= GAIN_OVER_COST * each_cost_s


def crowd(num: int) -> list[StreamLoad]:
    return [StreamLoad(i, NAMES[0], 100 + i, 100 + i, 0.055) for i in range(num)]


def test_a_crowded_worker_is_relieved_until_it_is_within_its_limit():
    moved, done = settle(crowd(8), Rebalancer())
    assert num_late(moved) == 0
    assert [move.key for _, move in done] == [7, 6, 5, 4], "those with most tokens left go"
    assert Counter(stream.worker for stream in moved)[NAMES[0]] == 4


def test_streams_with_a_limit_for_gaps_leave_who_computes_prompts_and_others_stay():
    streams = [
        StreamLoad(i, NAMES[i % 2], 100, 100, 0.1, gap_limit_s=0.1 if i < 4 else inf)
        for i in range(8)
    ]
    moved, done = settle(streams, Rebalancer())
    assert {move.key for _, move in done} == {0, 2}
    assert {move.cause for _, move in done} == {MoveCause.SLOW}
    assert num_late(moved) == 0


def test_a_short_spell_moves_nothing():
    rebalancer, streams = Rebalancer(), crowd(8)
    for now in range(20):
        many = streams if now % 2 else streams[:2]
        assert not rebalancer.find_moves(many, paces(many), cheap, float(now))


@pytest.mark.parametrize("takes", [True, False])
def test_pressure_moves_the_longest_answer_where_there_are_blocks(takes):
    streams = [replace(stream, limit_s=10.0) for stream in crowd(3)]
    workers = paces(streams, takes=takes)
    workers[0] = replace(workers[0], lacks_blocks=True)
    workers[1] = replace(workers[1], num_free_tokens=100)
    rebalancer = Rebalancer()
    assert not rebalancer.find_moves(streams, workers, cheap, 0.0)
    moves = rebalancer.find_moves(streams, workers, cheap, SETTLE_S)
    assert moves == ([Move(2, NAMES[2], MoveCause.PRESSURE)] if takes else [])
