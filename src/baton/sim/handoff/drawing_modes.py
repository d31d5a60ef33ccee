"""Schedules in which blocks are lent: they need more of a cluster than chance would give them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton.sim.handoff.memory import VOCABULARY
from baton.sim.handoff.plan import Slow

if TYPE_CHECKING:
    from random import Random

    from baton.authority.ticket import HandoffMode
    from baton.sim.handoff.plan import Client, Schedule, WorkerPlan

LENT: Final = 0.2
"""Of all schedules."""
PRESSED: Final = 0.2
"""Of those."""
LENDING_KIND: Final = "sim-shared"
_MIXTURES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("reference",),
    ("reference",),
    ("reference", "push"),
    ("reference", "pull", "push"),
)


def draw_lending(chance: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with workers that can lend, and requests that are to be lent."""
    if chance.random() >= LENT:
        return schedule
    modes, kinds = chance.choice(_MIXTURES), schedule.kinds
    if LENDING_KIND not in kinds:
        kinds = (LENDING_KIND, *kinds[1:])
    size = chance.choice((2, 4, 4, 8))
    schedule = _press(chance, schedule) if chance.random() < PRESSED else schedule
    return replace(
        schedule,
        workers=tuple(_suit(chance, worker, size) for worker in schedule.workers),
        kinds=kinds,
        clients=tuple(_ask(chance, client, modes) for client in schedule.clients),
    )


def _press(chance: Random, schedule: Schedule) -> Schedule:
    """Prefill is short of what it has lent: more clients, and slower answers."""
    last = schedule.clients[-1]
    more = tuple(
        replace(
            last,
            arrives_s=last.arrives_s + 0.05 * chance.random(),
            prompt=tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(16, 24))),
        )
        for _ in range(chance.choice((2, 3)))
    )
    slow = Slow(last.arrives_s, schedule.workers[-1].name, 2.0, chance.choice((10.0, 20.0)))
    faults = sorted((*schedule.faults, slow), key=lambda fault: fault.at_s)
    return replace(schedule, clients=(*schedule.clients, *more), faults=tuple(faults))


def _suit(chance: Random, worker: WorkerPlan, block_size: int) -> WorkerPlan:
    """As a rule its pages can be lent: of the same size, not staged, more than one prompt's."""
    if chance.random() < 0.1:  # noqa: PLR2004
        return worker
    num_tokens = worker.num_blocks * worker.block_size
    factor = chance.choice((1, 2, 2)) if worker.is_prefill else 1
    num_blocks = factor * num_tokens // block_size
    return replace(worker, block_size=block_size, num_blocks=num_blocks, staging_pages=None)


def _ask(chance: Random, client: Client, modes: tuple[HandoffMode, ...]) -> Client:
    """Answers long enough for something to befall them."""
    num_output = chance.choice((client.num_output, 6, 8))
    return replace(client, mode=chance.choice(modes), num_output=num_output)
