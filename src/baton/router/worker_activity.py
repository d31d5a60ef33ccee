"""What one worker has been given to do, and how fast it does it. Pure: times are given.

A worker's prompts are taken for a queue: each begins when the one before it is done. What is
predicted is corrected by what is seen, and `WorkerCost`s learn from it.
"""

from __future__ import annotations

from collections import Counter
from math import exp, inf
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.protocol.worker_http import StoreLoads
from baton.router.learning import NOTHING_SEEN, WorkerCost

if TYPE_CHECKING:
    from baton.router.devices import SharedDevice
    from baton.router.load import ModelCosts

WINDOW_S: Final = 3.0
"""Over which the share of a worker's time that prompts take is averaged."""
MOST_SHARE: Final = 0.95
"""Of a worker's time that prompts take: a step is not called slower than 20 times for that."""
NO_PROMPTS: Final = inf
"""A time at which none was computed lately."""
NO_PLACE: Final = -1
UNLIMITED_TOKENS: Final = 1e9
"""Of a step, where a worker reports no limit: a prompt is computed in one."""
NO_LOADS: Final = StoreLoads(0, 0, 0.0)


class LoadColumns:
    """What placement looks at of one model's workers, one row for each: see `WorkerActivity`.

    A policy reads many workers at once as arrays, requests change one at a time. Of costs they have
    the `WorkerCost.evidence` `[3, num_rows]`. `most_running` answers run at once, others wait.
    `place` is a number of the model's `Places`. A step computes `step_tokens` at most.
    `num_limited` answers have a limit for the gaps between tokens, at least `gap_limit_s`; of all
    rows they are `num_limited_of_all`.
    """

    FIRST_ROWS: Final = 64

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_rows = 0
        self.free_at = np.zeros(self.FIRST_ROWS)
        self.num_decodes = np.zeros(self.FIRST_ROWS)
        self.most_running = np.full(self.FIRST_ROWS, inf)
        self.step_tokens = np.full(self.FIRST_ROWS, UNLIMITED_TOKENS)
        self.num_limited = np.zeros(self.FIRST_ROWS)
        self.gap_limit_s = np.full(self.FIRST_ROWS, inf)
        self.num_limited_of_all = 0
        self.prefill_share = np.zeros(self.FIRST_ROWS)
        self.share_at = np.zeros(self.FIRST_ROWS)
        self.prefill_evidence = np.zeros((3, self.FIRST_ROWS))
        self.step_evidence = np.zeros((3, self.FIRST_ROWS))
        self.load_evidence = np.zeros((3, self.FIRST_ROWS))
        self.place = np.full(self.FIRST_ROWS, NO_PLACE, dtype=np.intp)

    def add_row(self) -> int:
        """A row for one worker more."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._num_rows
            self._num_rows += 1
            if row == len(self.free_at):
                self._grow()
        for column in (self.free_at, self.num_decodes, self.prefill_share, self.share_at):
            column[row] = 0.0
        self.most_running[row] = self.gap_limit_s[row] = inf
        self.step_tokens[row], self.num_limited[row] = UNLIMITED_TOKENS, 0.0
        for evidence in (self.prefill_evidence, self.step_evidence, self.load_evidence):
            evidence[:, row] = NOTHING_SEEN
        self.place[row] = NO_PLACE
        return row

    def free_row(self, row: int) -> None:
        """Its worker is forgotten."""
        self._free.append(row)

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)], -1))


class GapLimits:
    """Targets for the gaps between tokens, of the answers of the worker at `row`."""

    def __init__(self, columns: LoadColumns, row: int) -> None:
        self._columns, self._row = columns, row
        self._nums: Counter[float] = Counter()

    def count(self, itl_s: float, change: int) -> None:
        """One answer with this target more, or one less."""
        columns, row, nums = self._columns, self._row, self._nums
        nums[itl_s] += change
        if not nums[itl_s]:
            del nums[itl_s]
        columns.num_limited[row] += change
        columns.num_limited_of_all += change
        columns.gap_limit_s[row] = min(nums, default=inf)


class WorkerActivity:
    """One worker's part. `num_prefills` prompts are waiting or computed here, of `prefill_tokens`.

    `num_decodes` answers are generated here, or will be. `free_at`: when the prompts will be done.
    `prefill_cost` gives seconds of a prompt's tokens, `step_cost` seconds of a step's answers,
    `load_cost` seconds of tokens that are loaded from the store. `row` is its row in the model's
    columns, which follow whatever changes here. `device`: the one that it computes on, if known.
    `gap_limits`: of its answers that have one.
    """

    __slots__ = (
        "_busy_on",
        "_columns",
        "_drift_s",
        "_last_done_at",
        "_loads",
        "_num_streams",
        "_prefill_share",
        "_share_at",
        "_stream_seconds",
        "_streams_at",
        "device",
        "free_at",
        "gap_limits",
        "load_cost",
        "num_decodes",
        "num_prefills",
        "prefill_cost",
        "prefill_tokens",
        "row",
        "step_cost",
    )

    def __init__(self, costs: ModelCosts) -> None:
        self.prefill_cost, self.step_cost = WorkerCost(costs.prefill), WorkerCost(costs.step)
        self.load_cost, self._loads = WorkerCost(costs.load), NO_LOADS
        self.device: SharedDevice | None = None
        self._busy_on: SharedDevice | None = None
        self._columns, self.row = costs.columns, costs.columns.add_row()
        self.gap_limits = GapLimits(self._columns, self.row)
        self.num_prefills = self.prefill_tokens = self.num_decodes = self._num_streams = 0
        self.free_at = self._drift_s = self._last_done_at = 0.0
        self._stream_seconds = self._streams_at = self._prefill_share = self._share_at = 0.0

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

    def pace_s(self, more: int, now: float) -> float:
        """Of a token, with so many answers more."""
        share = min(MOST_SHARE, self.prefill_share(now))
        pace_s = self.step_cost.predict(self.num_decodes + more) / (1.0 - share)
        if self.device is not None:
            pace_s *= max(1, self.device.num_busy + (more > 0 and self._busy_on is None))
        return pace_s

    def add_prefill(
        self, num_tokens: int, now: float, num_stored: int = 0, num_cached: int = 0
    ) -> tuple[float, float]:
        """A prompt is given to it: when it should be done, and what that is relative to.

        It has `num_cached` other tokens of it, and `num_stored` more are loaded before that, while
        others are computed.
        """
        self.num_prefills += 1
        self.prefill_tokens += num_tokens
        takes_s = self.prefill_cost.predict(num_tokens, num_cached + num_stored)
        self._set_free_at(max(now, self.free_at) + takes_s)
        self._prefill_share = self.prefill_share(now) + takes_s / WINDOW_S
        self._share_at = now
        self._columns.prefill_share[self.row] = self._prefill_share
        self._columns.share_at[self.row] = now
        load_s = self.load_cost.predict(num_stored) if num_stored else 0.0
        return self.free_at + load_s, self._drift_s

    def finish_prefill(self, num_tokens: int, expected: tuple[float, float], now: float) -> None:
        """It was computed: what was expected of those behind it moves by as much as this did."""
        self._remove_prefill(num_tokens)
        late_s = now - (expected[0] + self._drift_s - expected[1])
        self._drift_s += late_s
        self._set_free_at(max(now, self.free_at + late_s))

    def observe_prefill(
        self, num_tokens: int, began_at: float, done_at: float, num_cached: int = 0
    ) -> None:
        """A prompt that was given to it then was computed now, after the one before it."""
        began_at = max(began_at, self._last_done_at)
        if done_at < began_at:  # a later one was reported first
            return
        self.prefill_cost.observe(num_tokens, done_at - began_at, num_cached)
        self._columns.prefill_evidence[:, self.row] = self.prefill_cost.evidence
        self._last_done_at = done_at

    def skip_prefill(self, done_at: float) -> None:
        """A prompt was computed now, and what computing took is not known: some was loaded."""
        self._last_done_at = max(self._last_done_at, done_at)

    def note_loads(self, loads: StoreLoads) -> None:
        """It reports what it has loaded from its store since its start."""
        before, self._loads = self._loads, loads
        is_another_life = (
            loads.num_loads < before.num_loads
            or loads.num_tokens < before.num_tokens
            or loads.seconds < before.seconds
        )
        if is_another_life:
            before = NO_LOADS
        num_loads = loads.num_loads - before.num_loads
        if num_loads:
            num_tokens, seconds = (
                loads.num_tokens - before.num_tokens,
                loads.seconds - before.seconds,
            )
            self.observe_loads(num_tokens / num_loads, seconds / num_loads)

    def observe_loads(self, num_tokens: float, seconds: float) -> None:
        """A load, or a mean one of several, was of so many tokens and took so long."""
        self.load_cost.observe(num_tokens, seconds)
        self._columns.load_evidence[:, self.row] = self.load_cost.evidence

    def drop_prefill(self, num_tokens: int, expected: tuple[float, float], now: float) -> None:
        """It was computed at an unknown time, or never will be: those behind it need not wait."""
        self._remove_prefill(num_tokens)
        early_s = min(0.0, now - (expected[0] + self._drift_s - expected[1]))
        self._drift_s += early_s
        self._set_free_at(max(now, self.free_at + early_s))

    def count_streams(self, change: int, now: float) -> tuple[float, float]:
        """One answer more begins here, or ends: answers times seconds until now.

        And workers of its device that had answers, times seconds.
        """
        self._stream_seconds += self._num_streams * (now - self._streams_at)
        device = self.device
        if self._busy_on is None and device is not None:
            self._busy_on = device
            device.count(+1, now)
        self._num_streams += change
        self._streams_at = now
        if self._busy_on is not None and not self._num_streams:
            self._busy_on.count(-1, now)
            self._busy_on = None
        return self._stream_seconds, now if device is None else device.busy_seconds(now)

    def count_decodes(self, change: int) -> None:
        """One answer more is to be generated here, or one less."""
        self.num_decodes += change
        self._columns.num_decodes[self.row] = self.num_decodes

    def observe_step(self, num_streams: float, seconds: float) -> None:
        """A step with so many answers took so long."""
        self.step_cost.observe(num_streams, seconds)
        self._columns.step_evidence[:, self.row] = self.step_cost.evidence

    def _set_free_at(self, at: float) -> None:
        self.free_at = self._columns.free_at[self.row] = at

    def _remove_prefill(self, num_tokens: int) -> None:
        self.num_prefills -= 1
        self.prefill_tokens -= num_tokens
