"""LoRA adapters in a fleet: which requests they are for, and who can serve those."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.worker_http import Role
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import Placement, PlacementRequest, Unplaceable
from baton.router.simple import LeastLoaded
from tests.unit.router.test_round_robin import worker

P, D, W = (worker(name, role) for name, role in zip("pdw", Role, strict=True))


def having(view: WorkerView, *adapters: str) -> WorkerView:
    return replace(view, adapters=frozenset(adapters))


def test_answers_come_from_decode_workers_and_a_name_is_the_first_ones():
    other = worker("other", Role.BOTH, model="other")
    workers = having(P, "of-prefill"), having(D, "sql"), having(other, "sql", "law")
    fleet = Fleet.of(workers)
    assert fleet.adapters == {"sql": "demo", "law": "other"}
    assert fleet.beginning_at(0.5).adapters == fleet.adapters


def test_adapters_that_several_workers_have_are_looked_at_once():
    """A fleet is made with each report of a load: 256 workers may have 1,000 adapters each."""
    num_read = 0

    class Counted(frozenset):
        def __iter__(self):
            nonlocal num_read
            num_read += 1
            return super().__iter__()

    alike = Counted({"sql", "law"})
    workers = [replace(worker(f"w{n}", Role.BOTH), adapters=alike) for n in range(4)]
    other = replace(worker("other", Role.BOTH, model="other"), adapters=alike)
    assert Fleet.of([*workers, other]).adapters == {"sql": "demo", "law": "demo"}
    assert num_read == 2, "once for each model"


def test_a_fleet_of_which_all_have_an_adapter_is_the_same_fleet():
    fleet = Fleet.of([having(P, "sql"), having(D, "sql")])
    assert fleet.with_adapter("demo", "sql") is fleet
    assert not fleet.models["demo"].is_part


def test_workers_without_it_are_left_out_and_prefill_workers_are_named():
    fleet = Fleet.of([P, having(D, "sql"), W])
    part = fleet.with_adapter("demo", "sql")
    served = part.models["demo"]
    assert (served.prefills, [each.id for each in served.decodes]) == ((), ["d"])
    assert served.is_part
    assert part.absent_prefills == ("p has no adapter 'sql'",)
    # What policies make for a fleet they know by its identity.
    assert fleet.with_adapter("demo", "sql") is part


def test_a_part_of_a_part_is_a_part():
    """No labour is divided for it: its workers have other requests, too."""
    fleet = Fleet.of([P, having(D, "sql"), W])
    part = fleet.with_adapter("demo", "sql").only("demo", "baton")
    assert [each.id for each in part.models["demo"].decodes] == ["d"]
    assert part.models["demo"].is_part
    assert not fleet.only("demo", "baton").models["demo"].is_part


def test_a_policy_places_it_there_or_nowhere():
    policy, load, request = LeastLoaded(), FleetLoad(), PlacementRequest("demo")
    fleet = Fleet.of([P, having(D, "sql"), W])
    placed = policy.place(fleet.with_adapter("demo", "sql"), request, load)
    assert isinstance(placed, Placement)
    assert (placed.prefill, placed.decode.id) == (None, "d")
    assert placed.reasons == ("p has no adapter 'sql'",)
    gone = fleet.with_adapter("demo", "law")
    assert isinstance(policy.place(gone, request, load), Unplaceable)
