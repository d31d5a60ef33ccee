"""What a gateway has given its workers to do, and how fast they do it. Pure: times are given.

    begin ──► prefilled ──► first_token ──► end          of each `RunningRequest`
    waits or is computed    │               │
    at its prefill worker   KV moves        its answer is generated at its decode worker

A worker's prompts are taken for a queue: each begins when the one before it is done. What is
predicted is corrected by what is seen, and `LearnedLine`s learn from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Final

from baton.router.learning import LearnedLine

if TYPE_CHECKING:
    from baton.ids import WorkerId
    from baton.router.placement import Placement

WINDOW_S: Final = 5.0
"""Over which the share of a worker's time that prompts take is averaged."""
MIN_STREAMED: Final = 4
"""Parts of an answer from which its pace is learned."""
_TYPICAL_TOKENS: Final = 1000.0
_PREFILL_GUESS: Final = (0.005, 5e-5)
_STEP_GUESS: Final = (0.01, 2e-4)
_HANDOFF_GUESS: Final = (0.003, 1e-6)
_TYPICAL_STREAMS: Final = 16.0


@dataclass(slots=True)
class WorkerActivity:
    """One worker's part. `num_prefills` prompts are waiting or computed here, of `prefill_tokens`.

    `num_decodes` answers are generated here, or will be. `free_at`: when the prompts will be done.
    `prefill_line` gives seconds of a prompt's tokens, `step_line` seconds of a step's answers.
    """

    num_prefills: int = 0
    prefill_tokens: int = 0
    num_decodes: int = 0
    free_at: float = 0.0
    prefill_line: LearnedLine = field(
        default_factory=lambda: LearnedLine(_PREFILL_GUESS, _TYPICAL_TOKENS)
    )
    step_line: LearnedLine = field(
        default_factory=lambda: LearnedLine(_STEP_GUESS, _TYPICAL_STREAMS)
    )
    _drift_s: float = 0.0
    _last_done_at: float = 0.0
    _prefill_share: float = 0.0
    _share_at: float = 0.0

    @property
    def num_requests(self) -> int:
        """Prompts and answers that it has."""
        return self.num_prefills + self.num_decodes

    def queue_s(self, now: float) -> float:
        """How long a prompt that comes now waits for those before it."""
        return max(0.0, self.free_at - now)

    def prefill_share(self, now: float) -> float:
        """The share of its time that prompts took lately, 0 to 1."""
        return min(1.0, self._prefill_share * exp((self._share_at - now) / WINDOW_S))

    def add_prefill(self, num_tokens: int, now: float) -> tuple[float, float]:
        """A prompt is given to it: when it should be done, and what that is relative to."""
        self.num_prefills += 1
        self.prefill_tokens += num_tokens
        takes_s = self.prefill_line.predict(num_tokens)
        self.free_at = max(now, self.free_at) + takes_s
        self._prefill_share = self.prefill_share(now) + takes_s / WINDOW_S
        self._share_at = now
        return self.free_at, self._drift_s

    def finish_prefill(
        self, num_tokens: int, began_at: float, expected: tuple[float, float], now: float
    ) -> None:
        """It was computed: what was expected of those behind it moves by as much as this did."""
        self._remove_prefill(num_tokens)
        late_s = now - (expected[0] + self._drift_s - expected[1])
        self._drift_s += late_s
        self.free_at = max(now, self.free_at + late_s)
        self.prefill_line.observe(num_tokens, now - max(began_at, self._last_done_at))
        self._last_done_at = now

    def drop_prefill(self, num_tokens: int, now: float) -> None:
        """It is not computed, or it is not known when."""
        self._remove_prefill(num_tokens)
        if self.num_prefills == 0:
            self.free_at = min(self.free_at, now)

    def _remove_prefill(self, num_tokens: int) -> None:
        self.num_prefills -= 1
        self.prefill_tokens -= num_tokens


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One attempt, from its placement to its end. Owner: the gateway's thread."""

    prefill: WorkerActivity
    decode: WorkerActivity
    handoff_line: LearnedLine | None
    num_tokens: int
    began_at: float
    _expected: tuple[float, float]
    _is_prefilled: bool = False
    _prefilled_at: float | None = None
    _first_at: float | None = None
    _num_decodes: int = 0
    _is_over: bool = False

    def prefilled(self, now: float) -> None:
        """Its prefill worker has computed the prompt."""
        if self._is_over or self._is_prefilled:
            return
        self._is_prefilled, self._prefilled_at = True, now
        self.prefill.finish_prefill(self.num_tokens, self.began_at, self._expected, now)

    def first_token(self, now: float) -> None:
        """The answer has begun."""
        if self._is_over or self._first_at is not None:
            return
        if self.handoff_line is not None and self._prefilled_at is not None:
            self.handoff_line.observe(self.num_tokens, now - self._prefilled_at)
        self.prefilled(now)
        self._first_at, self._num_decodes = now, self.decode.num_decodes

    def end(self, now: float, num_streamed: int = 0) -> None:
        """It is over. `num_streamed` parts of the answer came one by one; 0: not known."""
        if self._is_over:
            return
        if not self._is_prefilled:
            self.prefill.drop_prefill(self.num_tokens, now)
        elif self._first_at is not None and num_streamed >= MIN_STREAMED:
            pace_s = (now - self._first_at) / (num_streamed - 1)
            num_streams = (self._num_decodes + self.decode.num_decodes) / 2
            alone = 1.0 - min(MOST_SHARE, self.decode.prefill_share(now))
            self.decode.step_line.observe(num_streams, pace_s * alone)
        self.decode.num_decodes -= 1
        self._is_over = True


MOST_SHARE: Final = 0.95
"""Of a worker's time that prompts take: a step is not called slower than 20 times for that."""


class FleetLoad:
    """All workers' parts. Owner: the gateway's thread."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerActivity] = {}
        self._handoffs: dict[tuple[WorkerId, WorkerId], LearnedLine] = {}

    def of(self, worker: WorkerId) -> WorkerActivity:
        """What that worker has to do."""
        activity = self._workers.get(worker)
        if activity is None:
            activity = self._workers[worker] = WorkerActivity()
        return activity

    def handoff_line(self, prefill: WorkerId, decode: WorkerId) -> LearnedLine:
        """Seconds from a prompt's end at one worker to the first token from the other."""
        line = self._handoffs.get((prefill, decode))
        if line is None:
            line = LearnedLine(_HANDOFF_GUESS, _TYPICAL_TOKENS)
            self._handoffs[prefill, decode] = line
        return line

    def begin(self, placement: Placement, num_tokens: int, now: float) -> RunningRequest:
        """A request of so many prompt tokens goes to these workers."""
        decode, line = self.of(placement.decode.id), None
        prefill = decode
        if placement.prefill is not None:
            prefill = self.of(placement.prefill.id)
            line = self.handoff_line(placement.prefill.id, placement.decode.id)
        expected = prefill.add_prefill(num_tokens, now)
        decode.num_decodes += 1
        return RunningRequest(prefill, decode, line, num_tokens, now, expected)

    def keep_only(self, workers: set[WorkerId]) -> None:
        """Forget workers that are gone for good, and what was learned of them."""
        self._workers = {name: each for name, each in self._workers.items() if name in workers}
        self._handoffs = {pair: line for pair, line in self._handoffs.items() if workers >= {*pair}}
