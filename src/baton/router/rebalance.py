"""Which running streams move to another worker, and where to. Pure: times are given.

A worker is left by a stream at a time while it is `SLOW` (a token takes longer than some stream
there may take, or the gap in which a part of a prompt is computed does) or under `PRESSURE` (it
lacks KV blocks, and requests wait or are preempted for that), and has been so for `SETTLE_S`.
Another worker takes it if it stays well within the limits of all its streams. A move must save more
time than it costs.

Against oscillation: what takes a stream is not left because of it (`WELL_WITHIN`), both workers
rest after a move, as their loads have yet to show what it did, and a stream moves a few times only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.ids import WorkerId

    Seconds: TypeAlias = Callable[[WorkerId, WorkerId, int], float]

TYPICAL_ANSWER_TOKENS: Final = 128
"""Of an answer whose client names no limit."""
SETTLE_S: Final = 2.0
REST_S: Final = 2.0
STREAM_RESTS_S: Final = 10.0
WELL_WITHIN: Final = 0.8
"""Of its limits: what the new worker may need for a token."""
MOST_MOVES: Final = 3
"""Of one stream; drains do not count."""
GAIN_OVER_COST: Final = 2.0
SPARE_BLOCKS: Final = 2.0
"""The new worker has room for so many times the KV that the stream may come to."""


class MoveCause(StrEnum):
    """Why a stream moves: its worker ends, generates too slowly, or lacks KV blocks."""

    DRAIN = "drain"
    SLOW = "slow"
    PRESSURE = "pressure"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """A stream that can be moved. `key` is the caller's.

    `num_tokens` have KV, `num_left` may follow, each of which is to take `limit_s` at most on the
    average, and `gap_limit_s` in any case. It was moved `num_moves` times, last at `moved_at`.
    Workers in `excluded` cannot take it.
    """

    key: int
    worker: WorkerId
    num_tokens: int
    num_left: int
    limit_s: float
    num_moves: int = 0
    moved_at: float = -inf
    gap_limit_s: float = inf
    excluded: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """A worker's seconds for a token as it is, and what is predicted with one stream more.

    `takes`: it may be given requests. `num_free_tokens`: for which it has KV blocks. `gap_s` and
    `next_gap_s`: as the paces, of the longest gaps between tokens; 0: not known.
    """

    id: WorkerId
    pace_s: float
    next_pace_s: float
    takes: bool = True
    lacks_blocks: bool = False
    num_free_tokens: float = inf
    gap_s: float = 0.0
    next_gap_s: float = 0.0

    def exceeds(self, limit_s: float, gap_limit_s: float) -> bool:
        """Whether a token, or a gap between two, takes longer."""
        return self.pace_s > limit_s or self.gap_s > gap_limit_s


@dataclass(frozen=True, slots=True)
class _Limits:
    """The least of some streams."""

    limit_s: float
    gap_limit_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """The stream `key` is to go on at `target`."""

    key: int
    target: WorkerId
    cause: MoveCause


class Rebalancer:
    """Of one model's workers. Owner: the caller's thread."""

    def __init__(self) -> None:
        self._since: dict[tuple[WorkerId, MoveCause], float] = {}
        self._rests_until: dict[WorkerId, float] = {}

    def find_moves(
        self,
        streams: Sequence[StreamLoad],
        workers: Sequence[WorkerPace],
        cost_s: Seconds,
        now: float,
    ) -> list[Move]:
        """The moves to begin now; at most one from and to each worker.

        `cost_s` predicts how long a handoff of so many tokens from one worker to another takes.
        """
        by_worker: dict[WorkerId, list[StreamLoad]] = {worker.id: [] for worker in workers}
        for stream in streams:
            if stream.worker in by_worker:
                by_worker[stream.worker].append(stream)
        limits = {worker: _find_least(own) for worker, own in by_worker.items()}
        causes = {worker.id: _find_cause(worker, limits[worker.id]) for worker in workers}
        self._note(causes, now)
        moves: list[Move] = []
        for worker in sorted(workers, key=lambda w: w.pace_s, reverse=True):
            cause = causes[worker.id]
            if cause is None or not self._is_due(worker.id, cause, now):
                continue
            targets = [
                (target, limits[target.id])
                for target in workers
                if target.id != worker.id
                and target.takes
                and causes[target.id] is None
                and not self._is_resting(target.id, now)
            ]
            # Gaps are no shorter for those that stay: who has no limit for them need not leave.
            is_any = cause is MoveCause.PRESSURE or worker.pace_s > limits[worker.id].limit_s
            rested = [
                stream
                for stream in by_worker[worker.id]
                if stream.num_moves < MOST_MOVES and stream.moved_at + STREAM_RESTS_S <= now
                if is_any or worker.gap_s > stream.gap_limit_s
            ]
            found = _find_best(rested, worker, cause, targets=targets, cost_s=cost_s)
            if found is not None:
                moves.append(found)
                self._rests_until[worker.id] = self._rests_until[found.target] = now + REST_S
        return moves

    def _note(self, causes: dict[WorkerId, MoveCause | None], now: float) -> None:
        known = {(worker, cause) for worker, cause in causes.items() if cause is not None}
        self._since = {key: self._since.get(key, now) for key in known}
        self._rests_until = {w: at for w, at in self._rests_until.items() if at > now}

    def _is_due(self, worker: WorkerId, cause: MoveCause, now: float) -> bool:
        return now - self._since[worker, cause] >= SETTLE_S and not self._is_resting(worker, now)

    def _is_resting(self, worker: WorkerId, now: float) -> bool:
        return self._rests_until.get(worker, -inf) > now


def _find_cause(worker: WorkerPace, least: _Limits) -> MoveCause | None:
    if worker.lacks_blocks:
        return MoveCause.PRESSURE
    return MoveCause.SLOW if worker.exceeds(least.limit_s, least.gap_limit_s) else None


def _find_least(streams: Sequence[StreamLoad]) -> _Limits:
    return _Limits(
        min((stream.limit_s for stream in streams), default=inf),
        min((stream.gap_limit_s for stream in streams), default=inf),
    )


def _find_best(
    streams: Iterable[StreamLoad],
    worker: WorkerPace,
    cause: MoveCause,
    *,
    targets: Sequence[tuple[WorkerPace, _Limits]],
    cost_s: Seconds,
) -> Move | None:
    """The stream that has longest to go, to the worker that is then fastest."""
    for stream in sorted(streams, key=lambda s: (-s.num_left, s.num_tokens)):
        best: WorkerPace | None = None
        for target, least in targets:
            if target.id in stream.excluded:
                continue
            if target.next_pace_s > WELL_WITHIN * min(least.limit_s, stream.limit_s):
                continue
            if target.next_gap_s > WELL_WITHIN * min(least.gap_limit_s, stream.gap_limit_s):
                continue
            if target.num_free_tokens < SPARE_BLOCKS * (stream.num_tokens + stream.num_left):
                continue
            # For so long its blocks are others', or its gaps within their limit.
            gain_s = stream.num_left * target.next_pace_s
            if cause is MoveCause.SLOW and worker.gap_s <= stream.gap_limit_s:
                gain_s = stream.num_left * (worker.pace_s - target.next_pace_s)
            if gain_s < GAIN_OVER_COST * cost_s(worker.id, target.id, stream.num_tokens):
                continue
            if best is None or target.next_pace_s < best.next_pace_s:
                best = target
        if best is not None:
            return Move(stream.key, best.id, cause)
    return None
