"""I4: every accepted request ends once and in time; and which faults excuse a failure.

Promise 1 of the design: a failure of a handoff costs time, never the request. So a request may
fail only where its decode worker, or the gateway's way to it, was struck; and a handoff may wait
for its deadline only where somebody stood still, or fell silent: as hardware does, which has not
let go of a write that it reported as failed, or a store that has lost the prefill worker's word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from baton.handoff.session.lease import LEASE_STAGE
from baton.sim.handoff import internals
from baton.sim.handoff.plan import (
    GATEWAY,
    Crash,
    CutConnections,
    DropRequest,
    DuplicateRequest,
    Partition,
    Pause,
    ReplayMessages,
    Slow,
)

if TYPE_CHECKING:
    from baton.ids import TicketId
    from baton.sim.handoff.gateway import SimRequest
    from baton.sim.handoff.plan import Fault
    from baton.sim.handoff.world import World

Invariant: TypeAlias = Literal["I1", "I2", "I3", "I4", "I5", "I7", "I8", "stuck", "error"]


class ViolationError(BaseException):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


SLACK_S: Final = 0.5
_STALE_TWICE: Final = 2
_HARMLESS: Final = frozenset({"declined"})


def check_request(world: World, request: SimRequest) -> None:
    """Raise `ViolationError` where a request ended wrongly, late, or without need."""
    if request.outcome is None or request.ended_s > request.deadline_s + SLACK_S:
        raise ViolationError("I4", f"{request.name} did not end by its deadline")
    expected = request.expected_tokens[: len(request.tokens)]
    if request.tokens != expected:
        raise ViolationError("I1", f"{request.name} was answered {request.tokens}, not {expected}")
    if request.outcome == "answered":
        if len(request.tokens) != request.client.num_output:
            raise ViolationError("I4", f"{request.name} was cut short: {request.tokens}")
    elif request.outcome != "left" and not _may_fail(world.schedule.faults):
        raise ViolationError("I4", f"{request.name} ended without need: {request.outcome}")


def check_failures(world: World) -> None:
    """Raise `ViolationError` where a handoff failed, or waited for its deadline, without need."""
    faults, clients = world.schedule.faults, world.schedule.clients
    is_left = any(client.leaves_after_s is not None for client in clients)
    is_quiet = not faults and not is_left
    # Two workers that are short of memory may wait for each other, for a while (`StallDetector`).
    is_quiet &= not any("not taken" in str(event.error) for _, event in world.checker.failures)
    for worker, event in world.checker.failures:
        error = event.error
        if "not taken" in str(error):
            continue
        if is_quiet and error.stage not in _HARMLESS and not _may_be_evicted(world, event.ticket):
            raise ViolationError("I4", f"{worker}: {error}, and nothing had befallen anybody")
        if _is_held_by_lease(world, event.ticket, str(error)):
            continue
        is_allowed = event.ticket in world.checker.waits_for_landing
        is_allowed |= any(map(_can_stall, faults))
        is_allowed |= (
            world.store is not None and internals.marker_name(event.ticket) in world.store.lost
        )
        if "deadline passed" in str(error) and not is_allowed:
            raise ViolationError("I4", f"{worker} waited until its deadline: {error}")
        if error.stage == LEASE_STAGE and not any(map(_can_stop_renewals, faults)) and not is_left:
            raise ViolationError(
                "I4", f"{worker}: {error}, and no worker was kept from renewing it"
            )


def _may_be_evicted(world: World, ticket: TicketId) -> bool:
    """Whether a small store lost some of what was put, so that this handoff may find it gone."""
    is_pooled = world.checker.tickets[ticket].mode == "pool"
    return is_pooled and world.store is not None and bool(world.store.lost)


def _is_held_by_lease(world: World, ticket: TicketId, error: str) -> bool:
    """Decode gave up a pull as its link broke, and could not report it: the lease bounds the wait.

    Where the request's own deadline is sooner, that does.
    """
    is_pulled = world.checker.tickets[ticket].mode == "pull"
    is_cut = any(isinstance(fault, CutConnections) for fault in world.schedule.faults)
    return is_pulled and is_cut and "no grant came" in error


def _can_stop_renewals(fault: Fault) -> bool:
    """Whether somebody may be kept from renewing for longer than a lease, or not be asked to."""
    match fault:
        case (
            Crash()
            | CutConnections()
            | Pause()
            | Partition()
            | DropRequest()
            | DuplicateRequest()
            | ReplayMessages()
        ):
            return True
        case _:
            return False


def _may_fail(faults: tuple[Fault, ...]) -> bool:
    num_incarnations = sum(isinstance(fault, Crash | Pause) for fault in faults)
    return num_incarnations >= _STALE_TWICE or any(map(_affects_decode, faults))


def _affects_decode(fault: Fault) -> bool:
    match fault:
        case Crash(worker=worker) | Pause(worker=worker) | Slow(worker=worker):
            return worker.startswith("d")
        case Partition(another=another):
            return another == GATEWAY
        case DropRequest() | DuplicateRequest():
            return True
        case _:
            return False


def _can_stall(fault: Fault) -> bool:
    match fault:
        case (
            Crash(silently=True)
            | CutConnections(silently=True)
            | Pause()
            | Partition()
            | Slow()
            | ReplayMessages()
        ):
            return True
        case DuplicateRequest():
            return True  # no gateway knows of the second request, and none will end it
        case _:
            return False
