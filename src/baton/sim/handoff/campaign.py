"""Many seeds, one after the other, in as many processes as are wanted."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

from baton.sim.handoff import internals
from baton.sim.handoff.allowed_failures import (
    Invariant,
    ViolationError,
    check_failures,
    check_request,
)
from baton.sim.handoff.generating import generate_schedule
from baton.sim.handoff.timeline import StuckError
from baton.sim.handoff.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from baton.sim.handoff.plan import Schedule

RELEASE_S: Final = 8.0
"""After the last request and the last fault: everything but early grants is released by then."""
RENEWED_S: Final = 1.0
"""What is held for no process is released a lease after its last renewal: by then."""
FORGET_S: Final = 20.0
"""And by then, with the expiry of the last ticket, they are too."""
_CHECK_EVERY: Final = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """What broke, and how."""

    invariant: Invariant
    what: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    `injected` counts the faults that took effect, `ends` how requests ended, `seen` which modes
    were asked for, and what became of leases, exports and layers that land.
    """

    schedule: Schedule
    violation: Violation | None
    num_steps: int
    virtual_s: float
    injected: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    log: tuple[str, ...] = ()


def run_schedule(schedule: Schedule, *, keeps_log: bool = False) -> Outcome:
    """Run it; the same schedule gives the same outcome, to the last line of its log."""
    world = World(schedule, keeps_log=keeps_log)
    violation: Violation | None = None
    try:
        _run(world)
    except ViolationError as exc:
        violation = Violation(exc.invariant, exc.what)
    except StuckError as exc:
        violation = Violation("stuck", str(exc))
    except Exception as exc:  # noqa: BLE001 -- whatever the code under test raises is a finding
        where = traceback.format_exc(limit=-4) if keeps_log else ""
        violation = Violation("error", f"{type(exc).__name__}: {exc}\n{where}".rstrip())
    finally:
        world.close()
    checker = world.checker
    if violation is not None:
        world.timeline.note("CHECKER", f"{violation.invariant}: {violation.what}")
    return Outcome(
        schedule=schedule,
        violation=violation,
        num_steps=world.timeline.num_steps,
        virtual_s=world.timeline.now_s,
        injected=world.fabric.transfer_faults.injected
        + (Counter() if world.store is None else world.store.injected),
        ends=Counter(str(request.outcome).split(":")[0] for request in world.requests),
        seen=checker.seen + checker.leases.seen + checker.exports.seen + checker.pooling.seen,
        log=tuple(world.timeline.log or ()),
    )


def _run(world: World) -> None:
    timeline = world.timeline
    over_since_s: float | None = None
    while timeline.step():
        if timeline.num_steps % _CHECK_EVERY or not world.is_over:
            continue
        if over_since_s is None:
            over_since_s = timeline.now_s
        if not _find_leftovers(world):
            break
        _check_bound(world, timeline.now_s - over_since_s)
    for process in world.processes:
        if process.is_alive:
            world.checker.check_state(process)
    for request in world.requests:
        check_request(world, request)
    check_failures(world)


def _find_leftovers(world: World) -> list[str]:
    """What is still held, worker by worker."""
    found: list[str] = []
    for process in world.processes:
        if not process.is_alive:
            continue
        left = internals.find_leftovers(process.handoffs, process.loop, process.scheduler)
        if (
            world.live[process.name] is process
        ):  # none finds an incarnation whose address is another's
            left += internals.find_exported(process.agent, process.scheduler)
        num = sum(transport.num_under_way for transport in process.transports)
        found += [f"{process.name}: {each.num} {each.what}" for each in left]
        found += [f"{process.name}: {num} windows or transfers"] if num else []
        num_early = internals.count_early_grants(process.agent)
        found += [f"{process.name}: {num_early} early grants"] if num_early else []
    return found


def _check_bound(world: World, since_s: float) -> None:
    """I3: within a bound, everything is released."""
    if since_s < max(RELEASE_S, 1.1 * world.schedule.lease_s + RENEWED_S):
        return
    found = _find_leftovers(world)
    held = [each for each in found if "early grants" not in each]
    if held or since_s > FORGET_S:
        raise ViolationError("I3", f"{since_s:.1f} s after the end: {'; '.join(held or found)}")


CHUNK: Final = 100
MAX_FOUND: Final = 20
"""So many failing seeds are enough to stop at."""


@dataclass(slots=True)
class Tally:
    """What runs came to. `found` has the seeds that broke an invariant."""

    num_schedules: int = 0
    num_steps: int = 0
    virtual_s: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    found: dict[int, Violation] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Count another's runs too."""
        self.num_schedules += other.num_schedules
        self.num_steps += other.num_steps
        self.virtual_s += other.virtual_s
        self.injected += other.injected
        self.ends += other.ends
        self.seen += other.seen
        self.found |= other.found


def run_seeds(seeds: Iterable[int]) -> Tally:
    """Run the schedule of each seed."""
    tally = Tally()
    for seed in seeds:
        outcome = run_schedule(generate_schedule(seed))
        tally.num_schedules += 1
        tally.num_steps += outcome.num_steps
        tally.virtual_s += outcome.virtual_s
        tally.injected += outcome.injected
        tally.ends += outcome.ends
        tally.seen += outcome.seen
        if outcome.violation is not None:
            tally.found[seed] = outcome.violation
    return tally


def run_campaign(first: int, num_schedules: int, num_jobs: int) -> Iterator[Tally]:
    """Run seeds `[first, first + num_schedules)`; the tally so far, chunk by chunk.

    Ends early after `MAX_FOUND` failing seeds. With one job everything runs in this process.
    """
    stop = first + num_schedules
    chunks = iter(range(at, min(at + CHUNK, stop)) for at in range(first, stop, CHUNK))
    total = Tally()
    for tally in map(run_seeds, chunks) if num_jobs == 1 else _run_apart(chunks, num_jobs):
        total.add(tally)
        yield total
        if len(total.found) >= MAX_FOUND:
            return


def be_quiet() -> None:
    """What production code logs under thousands of faults is of no interest; nor is garbage."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _start_job() -> None:
    be_quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the first process' business


def _run_apart(chunks: Iterator[range], num_jobs: int) -> Iterator[Tally]:
    """Two chunks for each process are under way, no more: so an interruption ends soon."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_jobs, context, initializer=_start_job) as pool:
        running: set[Future[Tally]] = set()
        try:
            for chunk in chunks:
                running.add(pool.submit(run_seeds, chunk))
                if len(running) >= 2 * num_jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


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
