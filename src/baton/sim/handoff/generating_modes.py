"""Schedules in which blocks are exported, or kept in a store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton.sim.handoff.memory import VOCABULARY
from baton.sim.handoff.plan import CorruptEntries, Slow, StorePlan

if TYPE_CHECKING:
    from random import Random

    from baton.auth.ticket import HandoffMode
    from baton.sim.handoff.plan import Client, Schedule, WorkerPlan

REFERENCE_PROBABILITY: Final = 0.2
"""Of all schedules."""
_LEAVING_S: Final = 0.04
POOL_PROBABILITY: Final = 0.15
"""Of the others."""
MEMORY_PRESSURE_PROBABILITY: Final = 0.2
"""Of those."""
EXPORTING_KIND: Final = "sim-shared"
_EXPORT_MODE_MIXES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("reference",),
    ("reference",),
    ("reference", "push"),
    ("reference", "pull", "push"),
)
_POOL_MODE_MIXES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("pool",),
    ("pool",),
    ("pool", "push"),
    ("pool", "pull"),
)


def add_reference_mode(rng: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with workers that export, and requests in that mode."""
    if rng.random() >= REFERENCE_PROBABILITY:
        return schedule
    modes, kinds = rng.choice(_EXPORT_MODE_MIXES), schedule.kinds
    if EXPORTING_KIND not in kinds:
        kinds = (EXPORTING_KIND, *kinds[1:])
    size = rng.choice((2, 4, 4, 8))
    schedule = (
        _add_memory_pressure(rng, schedule)
        if rng.random() < MEMORY_PRESSURE_PROBABILITY
        else schedule
    )
    return replace(
        schedule,
        workers=tuple(_make_exportable(rng, worker, size) for worker in schedule.workers),
        kinds=kinds,
        clients=tuple(_ask(rng, client, modes) for client in schedule.clients),
    )


def add_pool_mode(rng: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with a store, and requests that are to go through it."""
    if rng.random() >= POOL_PROBABILITY or schedule.shares_blocks:
        return schedule
    modes = rng.choice(_POOL_MODE_MIXES)
    entry_faults = [
        CorruptEntries(rng.choice(schedule.clients).arrives_s + 0.02 * rng.random(), (how,) * count)
        for how in ("refuse", "lose", "flip", "cut", "swap")
        for count in (rng.choice((1, 1, 3)),)
        if rng.random() < 0.2  # noqa: PLR2004
    ]
    return replace(
        schedule,
        clients=_pool(rng, schedule.clients, modes),
        faults=tuple(sorted((*schedule.faults, *entry_faults), key=lambda fault: fault.at_s)),
        store=StorePlan(rng.choice((2, 4, 4, 8, 16)), rng.choice((1500, 4000, 100_000))),
    )


def _pool(
    rng: Random, clients: tuple[Client, ...], modes: tuple[HandoffMode, ...]
) -> tuple[Client, ...]:
    """Many prompts differ in their last token alone; many clients leave soon."""
    first = clients[0].prompt
    are_alike = rng.random() < 0.3  # noqa: PLR2004
    return tuple(
        replace(
            each,
            mode=rng.choice(modes),
            prompt=(*first[:-1], rng.randrange(VOCABULARY)) if are_alike else each.prompt,
            leaves_after_s=_LEAVING_S * rng.random()
            if rng.random() < 0.15  # noqa: PLR2004
            else each.leaves_after_s,
        )
        for each in clients
    )


def _add_memory_pressure(rng: Random, schedule: Schedule) -> Schedule:
    """Prefill is short of blocks, having exported many: more clients, and slower answers."""
    last = schedule.clients[-1]
    more = tuple(
        replace(
            last,
            arrives_s=last.arrives_s + 0.05 * rng.random(),
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(16, 24))),
        )
        for _ in range(rng.choice((2, 3)))
    )
    slow = Slow(last.arrives_s, schedule.workers[-1].name, 2.0, rng.choice((10.0, 20.0)))
    faults = sorted((*schedule.faults, slow), key=lambda fault: fault.at_s)
    return replace(schedule, clients=(*schedule.clients, *more), faults=tuple(faults))


def _make_exportable(rng: Random, worker: WorkerPlan, block_size: int) -> WorkerPlan:
    """As a rule its pages can be exported: of the same size, not staged, more than one prompt's."""
    if rng.random() < 0.1:  # noqa: PLR2004
        return worker
    num_tokens = worker.num_blocks * worker.block_size
    factor = rng.choice((1, 2, 2)) if worker.is_prefill else 1
    num_blocks = factor * num_tokens // block_size
    return replace(worker, block_size=block_size, num_blocks=num_blocks, staging_pool=None)


def _ask(rng: Random, client: Client, modes: tuple[HandoffMode, ...]) -> Client:
    """Answers long enough for something to befall them."""
    num_output = rng.choice((client.num_output, 6, 8))
    return replace(client, mode=rng.choice(modes), num_output=num_output)
