"""Schedules in which blocks are lent, or kept in a store: they need more than chance would give."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton.sim.handoff.memory import VOCABULARY
from baton.sim.handoff.plan import Rot, Slow, StorePlan

if TYPE_CHECKING:
    from random import Random

    from baton.authority.ticket import HandoffMode
    from baton.sim.handoff.plan import Client, Schedule, WorkerPlan

LENT: Final = 0.2
"""Of all schedules."""
_LEAVING_S: Final = 0.04
POOLED: Final = 0.15
"""Of the others."""
PRESSED: Final = 0.2
"""Of those."""
LENDING_KIND: Final = "sim-shared"
_MIXTURES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("reference",),
    ("reference",),
    ("reference", "push"),
    ("reference", "pull", "push"),
)
_POOL_MIXTURES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("pool",),
    ("pool",),
    ("pool", "push"),
    ("pool", "pull"),
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


def draw_pooling(chance: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with a store, and requests that are to go through it."""
    if chance.random() >= POOLED or schedule.lends:
        return schedule
    modes = chance.choice(_POOL_MIXTURES)
    rots = [
        Rot(chance.choice(schedule.clients).arrives_s + 0.02 * chance.random(), (how,) * count)
        for how in ("refuse", "lose", "flip", "cut", "swap")
        for count in (chance.choice((1, 1, 3)),)
        if chance.random() < 0.2  # noqa: PLR2004
    ]
    return replace(
        schedule,
        clients=_pool(chance, schedule.clients, modes),
        faults=tuple(sorted((*schedule.faults, *rots), key=lambda fault: fault.at_s)),
        store=StorePlan(chance.choice((2, 4, 4, 8, 16)), chance.choice((1500, 4000, 100_000))),
    )


def _pool(
    chance: Random, clients: tuple[Client, ...], modes: tuple[HandoffMode, ...]
) -> tuple[Client, ...]:
    """Many prompts differ in their last token alone; many clients leave soon."""
    first = clients[0].prompt
    are_alike = chance.random() < 0.3  # noqa: PLR2004
    return tuple(
        replace(
            each,
            mode=chance.choice(modes),
            prompt=(*first[:-1], chance.randrange(VOCABULARY)) if are_alike else each.prompt,
            leaves_after_s=_LEAVING_S * chance.random()
            if chance.random() < 0.15  # noqa: PLR2004
            else each.leaves_after_s,
        )
        for each in clients
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
