"""Hardware that does not let go of a failed write excuses who waits for it, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.session.receive import ReceiveSession
from baton.sim.handoff import fabric
from baton.sim.handoff.campaign import run_schedule
from baton.sim.handoff.fabric import Fabric
from baton.sim.handoff.plan import Client, FailTransfers, Schedule, WorkerPlan

if TYPE_CHECKING:
    import pytest

    from baton.sim.handoff.campaign import Outcome

NUM_SEEDS = 10
VERY_LATE_S = 6.0
"""Longer than a handoff may take."""


def test_a_handoff_waits_for_its_deadline_where_a_failed_write_may_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fabric, "LATE_S", VERY_LATE_S)
    assert not any(outcome.violation for outcome in run_some())
    monkeypatch.setattr(Fabric, "is_late", lambda self, grant: False)
    assert find_expired_waits()


def test_a_handoff_that_does_not_hear_of_its_fence_is_not_excused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ReceiveSession, "fenced", lambda self, transport: [])
    assert find_expired_waits()


def run_some() -> list[Outcome]:
    """The writes of one request fail over a transport that posts; another one is there."""
    prompt = tuple(range(20))
    return [
        run_schedule(
            Schedule(
                seed=seed,
                workers=(make_worker("p0"), make_worker("d0")),
                kinds=("sim-rdma", "sim-tcp"),
                op="WRITE",
                clients=(Client(0.0, prompt, 2, None, "push"),),
                faults=(FailTransfers(0.0, "sim-rdma", 5),),
            )
        )
        for seed in range(NUM_SEEDS)
    ]


def find_expired_waits() -> list[str]:
    """What the checker says of those who waited."""
    found = [outcome.violation for outcome in run_some()]
    return [
        each.what for each in found if each is not None and "waited until its deadline" in each.what
    ]


def make_worker(name: str) -> WorkerPlan:
    """One with room, and a good clock."""
    return WorkerPlan(name, 4, 32, None, 0.0, 1.0, 0.0)
