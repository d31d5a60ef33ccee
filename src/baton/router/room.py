"""How many more requests the workers of a model can use now. Pure: times are given.

A worker is full when it has as many requests of this gateway as it may:

    configured, or what it reports to run at once, and `spare_for` that, so that the engine has the
    next ones at hand when some end
    less where its own queue is longer than that: then it runs fewer (it lacks blocks, or serves
    other gateways too), and its report shows how many

Besides, a prompt waits while every worker has `AHEAD_S` of prompts before it, where that is known.
A worker that reports nothing is never full, unless a limit is configured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from baton.router.load import MOST_WORKERS

if TYPE_CHECKING:
    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad
    from baton.router.fleet import ModelWorkers, WorkerView
    from baton.router.load import FleetLoad, WorkerActivity

AHEAD_S: Final = 0.5
"""Of prompts at a worker: more need not be there, as it reports each one that is computed."""
LEAST_AHEAD: Final = 2
"""Prompts that a worker may have whatever they cost: one is computed, one is at hand."""
LEAST_SEEN: Final = 8
"""Prompts from which a worker's speed is known."""
LEAST_SPARE: Final = 2
SPARE_SHARE: Final = 8
"""One in so many of those that run: requests that end together leave no place empty for long."""


def spare_for(most_running: int) -> int:
    """Requests that may wait at an engine that runs so many at once."""
    return max(LEAST_SPARE, most_running // SPARE_SHARE)


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
        self._least = self._most

    def limit(self, worker: WorkerId) -> float:
        """How many requests of this gateway it may have."""
        return self._limits.get(worker, self._most)

    def note_report(self, worker: WorkerId, model: str, report: WorkerLoad | None) -> None:
        """A worker was asked for its load just now; None: it does not report it."""
        known = self._limits.pop(worker, inf)
        if len(self._limits) >= MOST_WORKERS:  # names of lives that are over
            self._limits.clear()
        if report is not None:
            activity = self._load.find(worker, model)
            given = 0 if activity is None else count_given(activity)
            limit = self._find_limit(report, given, known)
            if limit < inf:
                self._limits[worker] = limit
        self._least = min(self._limits.values(), default=inf)
        self._least = min(self._least, self._most)

    def look(self, served: ModelWorkers, now: float, num_running: int) -> Room:
        """What a model's workers can use, which have `num_running` requests in all, or fewer.

        Where none is available nothing is held back: placement reports that.
        """
        is_behind = self._is_behind(served, now)
        if num_running < self._least:  # none can be full
            return NO_ROOM if is_behind else UNLIMITED
        decodes = [(w.id, self._count_free(w)) for w in served.decodes if w.available]
        helpers = [(w.id, self._count_free(w)) for w in served.helpers if w.available]
        full = frozenset(worker for worker, free in (*decodes, *helpers) if free <= 0)
        if is_behind:
            return Room(0, full)
        num_free = (
            min(
                sum(max(0, free) for _, free in each)
                for each in (decodes, helpers or decodes)
                if each
            )
            if decodes
            else inf
        )
        return Room(num_free, full)

    def _find_limit(self, report: WorkerLoad, given: int, known: float) -> float:
        most, spare = self._most, LEAST_SPARE
        if self._max_running is not None:
            spare = spare_for(self._max_running)
        elif report.max_running is not UNSET:
            spare = spare_for(report.max_running)
            most = report.max_running + spare
        if report.num_waiting:
            return min(most, max(spare, given - report.num_waiting + spare))
        if known < most and given:  # it may have more room than it had: step by step
            return min(most, 2 * max(known, spare))
        return most

    def _count_free(self, worker: WorkerView) -> float:
        activity = self._load.find(worker.id, worker.model)
        return self.limit(worker.id) - (0 if activity is None else count_given(activity))

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


def count_given(activity: WorkerActivity) -> int:
    """Requests that a worker's engine has: those that it answers have their prompts there, too."""
    return max(activity.num_prefills, activity.num_decodes)


def _has_enough(activity: WorkerActivity, now: float) -> bool:
    return (
        activity.num_prefills >= LEAST_AHEAD
        and activity.prefill_cost.num_seen >= LEAST_SEEN
        and activity.queue_s(now) > AHEAD_S
    )
