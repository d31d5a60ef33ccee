"""A shorter schedule that breaks the same invariant: the first thing to read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from baton.sim.handoff.running import run_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.sim.handoff.plan import Schedule
    from baton.sim.handoff.violation import Invariant

Item = TypeVar("Item")
MAX_TRIES: Final = 200


def shrink(schedule: Schedule) -> Schedule:
    """Leave out faults and clients, one at a time, as long as the same invariant breaks.

    The schedule itself, if nothing breaks in it.
    """
    violation = run_schedule(schedule).violation
    if violation is None:
        return schedule
    num_tries = 0
    found: Schedule | None = schedule
    while found is not None:
        schedule, found = found, None
        for smaller in _smaller(schedule):
            num_tries += 1
            if num_tries > MAX_TRIES:
                return schedule
            if _breaks(smaller, violation.invariant):
                found = smaller
                break
    return schedule


def _breaks(schedule: Schedule, invariant: Invariant) -> bool:
    violation = run_schedule(schedule).violation
    return violation is not None and violation.invariant == invariant


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """With one thing less: all that were left out leave the rest as it is."""
    for place in range(len(schedule.faults)):
        yield replace(schedule, faults=_without(schedule.faults, place))
    if len(schedule.clients) > 1:
        for place in range(len(schedule.clients)):
            yield replace(schedule, clients=_without(schedule.clients, place))
    for place, client in enumerate(schedule.clients):
        if client.leaves_after_s is not None:
            stays = replace(client, leaves_after_s=None)
            clients = (*schedule.clients[:place], stays, *schedule.clients[place + 1 :])
            yield replace(schedule, clients=clients)


def _without(items: tuple[Item, ...], place: int) -> tuple[Item, ...]:
    return items[:place] + items[place + 1 :]
