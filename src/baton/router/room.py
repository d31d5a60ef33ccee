"""How many more requests the workers of a model can use now. Pure: times are given.

A worker is full when it has as many requests of this gateway as it may:

    configured, or what it reports to run at once, and `spare_for` that, so that the engine has the
    next ones at hand when some end
    less where it lacks blocks, or its own queue stays longer than that (it serves other gateways,
    too): its report shows how many it does run
    as many as leave each answer within the model's `tpot_s`, and a step that computes no prompt
    within its `itl_s`, if there are such targets

Besides, a prompt waits while every worker has `AHEAD_S` of prompts before it. Predictions count
once they were learned. A worker that never reported is never full, unless a limit is configured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import copysign, inf
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from baton.router.load import MOST_WORKERS
from baton.router.worker_activity import NO_PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import ModelWorkers, WorkerView
    from baton.router.load import FleetLoad
    from baton.router.worker_activity import WorkerActivity

AHEAD_S: Final = 0.5
"""Of prompts at a worker: more need not be there, as it reports each one that is computed."""
LEAST_AHEAD: Final = 2
"""Prompts that a worker may have whatever they cost: one is computed, one is at hand."""
LEAST_SEEN: Final = 8
"""Prompts, or answers, from which a worker's speed is known."""
LEAST_SPARE: Final = 4
SPARE_SHARE: Final = 8
"""One in so many of those that run: requests that end together leave no place empty for long."""
LACKS_BLOCKS: Final = 8
"""If fewer than one in so many are free. Else requests wait for the next step, as a rule."""


def spare_for(most_running: int) -> int:
    """Requests that may wait at an engine that runs so many at once: no more than those."""
    return min(most_running, max(LEAST_SPARE, most_running // SPARE_SHARE))


@dataclass(frozen=True, slots=True)
class Room:
    """`num_free`: requests that the workers can use now. `full`: who takes none of them."""

    num_free: float
    full: frozenset[WorkerId] = frozenset()


UNLIMITED: Final = Room(inf)
NO_ROOM: Final = Room(0)


class FleetRoom:
    """Limits of all workers, kept from their reports. Owner: the gateway's thread.

    `max_running`: configured for each worker; None: what it reports.
    """

    def __init__(self, load: FleetLoad, max_running: int | None = None) -> None:
        self._load, self._max_running = load, max_running
        self._most = inf if max_running is None else max_running + spare_for(max_running)
        self._limits: dict[WorkerId, float] = {}
        self._reports: dict[WorkerId, WorkerLoad] = {}  # the latest ones
        self._least = self._most

    def limit(self, worker: WorkerId) -> float:
        """How many requests of this gateway it may have."""
        return self._limits.get(worker, self._most)

    def note_report(self, worker: WorkerId, model: str, report: WorkerLoad | None) -> None:
        """A worker was asked for its load just now; None: it did not report it.

        One that did before has as much room as it had without a queue: who is too busy to answer
        does not run more.
        """
        known = self._limits.pop(worker, inf)
        before = self._reports.pop(worker, None)
        if len(self._reports) >= MOST_WORKERS:  # names of incarnations that are over
            self._limits.clear()
            self._reports.clear()
        if (latest := report or before) is not None:
            self._reports[worker] = latest
        if report is None and before is not None:
            limit, _ = self._find_most(before)
            if limit < inf:
                self._limits[worker] = limit
        if report is not None:
            waited = 0 if before is None else before.num_waiting
            lacks_blocks = LACKS_BLOCKS * report.num_free_blocks < report.num_blocks
            waits = report.num_waiting if lacks_blocks else min(waited, report.num_waiting)
            activity = self._load.find(worker, model)
            given = 0 if activity is None else count_given(activity)
            most, spare = self._find_most(report)
            limit = most
            if waits > spare or (waits and lacks_blocks):
                limit = min(most, max(spare, given - waits + spare))
            elif known < most and given:  # it may have more room than it had: step by step
                limit = min(most, 2 * max(known, spare))
            if limit < inf:
                self._limits[worker] = limit
            self._load.limit_running(worker, model, limit - spare)
        self._least = min(self._limits.values(), default=inf)
        self._least = min(self._least, self._most)

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """These are gone."""
        for worker in workers:
            self._limits.pop(worker, None)
            self._reports.pop(worker, None)
        self._least = min(self._limits.values(), default=inf)
        self._least = min(self._least, self._most)

    def look(
        self,
        served: ModelWorkers,
        now: float,
        num_running: int,
        *,
        tpot_s: float | None = None,
        itl_s: float | None = None,
    ) -> Room:
        """What a model's workers can use, which have `num_running` requests in all, or fewer.

        `tpot_s` is what each answer is to take for a token at most, `itl_s` the longest gap. Where
        no worker is available nothing is held back: placement reports that.
        """
        is_behind = self._is_behind(served, now)
        has_targets = tpot_s is not None or itl_s is not None
        if num_running < self._least and not has_targets:  # none can be full
            return NO_ROOM if is_behind else UNLIMITED
        full: set[WorkerId] = set()
        num_free = self._count_free(served.decodes, now, full, tpot_s=tpot_s, itl_s=itl_s)
        if num_free is None:
            return UNLIMITED
        if served.helpers is not served.decodes:
            helped = self._count_free(served.helpers, now, full)
            num_free = num_free if helped is None else min(num_free, helped)
        return Room(0 if is_behind else num_free, frozenset(full))

    def _find_most(self, report: WorkerLoad) -> tuple[float, int]:
        """What a worker with room may have, and how many of them may wait there."""
        running = self._max_running
        if running is None and report.max_running is not UNSET:
            running = report.max_running
        if running is None:
            return inf, LEAST_SPARE
        return running + spare_for(running), spare_for(running)

    def _count_free(
        self,
        workers: Iterable[WorkerView],
        now: float,
        full: set[WorkerId],
        *,
        tpot_s: float | None = None,
        itl_s: float | None = None,
    ) -> float | None:
        """Requests that these can use, None if none is available; add who is `full`."""
        find, limits, most, total, is_any = self._load.find, self._limits, self._most, 0.0, False
        for worker in workers:
            if not worker.available:
                continue
            is_any = True
            name = worker.id
            free, activity = limits.get(name, most), find(name, worker.model)
            if activity is not None:
                free -= count_given(activity)
                if tpot_s is not None or itl_s is not None:
                    free = min(free, _count_within(activity, now, tpot_s, itl_s))
            if free > 0:
                total += free
            else:
                full.add(name)
        return total if is_any else None

    def _is_behind(self, served: ModelWorkers, now: float) -> bool:
        """Whether every worker has enough prompts before it."""
        is_any = False
        for workers in (served.decodes, served.helpers):
            for worker in workers:
                if not worker.available:
                    continue
                activity = self._load.find(worker.id, worker.model)
                if activity is None or not _has_enough(activity, now):
                    return False
                is_any = True
        return is_any


def _count_within(
    activity: WorkerActivity, now: float, tpot_s: float | None, itl_s: float | None
) -> float:
    """Answers more that leave each within its targets; one alone is as fast as can be."""
    if not activity.num_decodes or activity.step_cost.num_seen < LEAST_SEEN:
        return inf
    found = inf
    if tpot_s is not None:
        found = _count_until(tpot_s, activity.pace_s(0, now), activity.pace_s(1, now))
    if itl_s is not None:
        steps_s = activity.pace_s(0, NO_PROMPTS), activity.pace_s(1, NO_PROMPTS)
        found = min(found, _count_until(itl_s, *steps_s))
    return found


def _count_until(limit_s: float, now_s: float, next_s: float) -> float:
    """How many more, of which the first adds `next_s - now_s`."""
    each_s = next_s - now_s
    return (limit_s - now_s) // each_s if each_s > 0 else copysign(inf, limit_s - now_s)


def count_given(activity: WorkerActivity) -> int:
    """Requests that a worker's engine has: those that it answers have their prompts there, too."""
    return max(activity.num_prefills, activity.num_decodes)


def _has_enough(activity: WorkerActivity, now: float) -> bool:
    return (
        activity.num_prefills >= LEAST_AHEAD
        and activity.prefill_cost.num_seen >= LEAST_SEEN
        and activity.queue_s(now) > AHEAD_S
    )
