"""One schedule, from its beginning until all is released, or an invariant breaks."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.sim.handoff import internals
from baton.sim.handoff.allowed_failures import check_failures, check_request
from baton.sim.handoff.timeline import StuckError
from baton.sim.handoff.violation import Invariant, ViolationError
from baton.sim.handoff.world import World

if TYPE_CHECKING:
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
    were asked for, and what became of leases and exports.
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
        seen=world.checker.leases.seen + world.checker.exports.seen,
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
        left = internals.find_leftovers(process.agent, process.loop, process.scheduler)
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
