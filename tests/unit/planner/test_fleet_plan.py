"""Where a fleet's workers go, and what is shown of it."""

import io

import pytest

from baton.config.sections import FleetSection, HostTable
from baton.errors import ConfigError
from baton.planner import assignment
from baton.planner.assignment import Needs, NoAssignmentError, assign_workers
from baton.planner.fleet_plan import describe_fleet, plan_assignments, split_path
from baton.planner.fleet_printing import print_plan
from baton.planner.traffic import ExpectedKV, choose_rates, expect_kv
from baton.router.handoff_costs import DEFAULTS
from baton.router.topology import Distance, Places

RATES = choose_rates({}, {})
KV = ExpectedKV("m", 1.0, 1000, 1e9)


def host(name, rack="r1", zone="z1", **has):
    return HostTable(name=name, rack=rack, zone=zone, **{"gpus": 2.0, **has})


def needs(num_prefill, num_decode, **each):
    return tuple(
        Needs(role, tuple(f"{role}-{at}" for at in range(num)), **{"gpus": 1.0, **each})
        for role, num in (("prefill", num_prefill), ("decode", num_decode))
    )


def plan(hosts, wanted, kv=KV, **fleet):
    section = FleetSection(**fleet)
    rates = choose_rates(section.links, {})
    assignments = plan_assignments(hosts, wanted, rates, section)
    workers = [(name, each.role) for each in wanted for name in each.names]
    return describe_fleet(workers, assignments, rates, kv=kv, spread=section.spread)


def shares(planned):
    return {each.distance: each.share for each in planned.traffic if each.share > 1e-9}


def test_each_host_gets_a_pair_rather_than_one_role():
    planned = plan([host("h1"), host("h2", "r2"), host("h3", "r3", "z2")], needs(2, 2))
    assert shares(planned) == {"same_host": 1.0}
    assert {each.name: each.nearest for each in planned.workers} == {
        "prefill-0": ("decode-0",), "prefill-1": ("decode-1",),
        "decode-0": ("prefill-0",), "decode-1": ("prefill-1",),
    }  # fmt: skip


def test_what_does_not_fit_on_a_host_stays_in_its_rack():
    hosts = [host(f"h{at}", f"r{at % 2}", gpus=1.0) for at in range(4)]
    planned = plan(hosts, needs(2, 2))
    assert shares(planned) == {"same_rack": 1.0}
    one, other = (planned.assignments[name] for name in ("prefill-0", "decode-0"))
    assert Places().distance(one, other) is Distance.SAME_RACK


def test_a_spread_bounds_what_one_host_has():
    hosts = [host("h1", gpus=4.0), host("h2", gpus=4.0)]
    assert set(plan(hosts, needs(1, 3), spread="host").assignments.values()) == {
        "z1/r1/h1", "z1/r1/h2",
    }  # fmt: skip
    with pytest.raises(NoAssignmentError, match=r"change fleet\.spread"):
        plan(hosts, needs(1, 3), spread="rack")


def test_why_nothing_fits_and_what_there_is():
    wanted = needs(1, 4, memory_bytes=1 << 30, selector={"tier": "!spot"})
    spot = host("h2", memory_bytes=8 << 30, labels={"tier": "spot"})
    with pytest.raises(NoAssignmentError) as raised:
        plan([host("h1", memory_bytes=3 << 30, gpus=8.0), spot], wanted)
    text = str(raised.value)
    assert "of 4 decode workers: 1 GPUs, 1 GiB each, labels tier=!spot" in text
    assert "z1/r1/h1: 8 GPUs, 3 GiB" in text
    assert "ray.workers.ROLE" in text


def test_workers_without_needs_count_as_one_cpu():
    planned = plan([host("h1", cpus=1.0), host("h2", cpus=1.0)], needs(1, 1, gpus=0.0))
    assert len(set(planned.assignments.values())) == 2


def test_a_search_that_would_take_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(assignment, "MAX_STEPS", 1000)
    with pytest.raises(NoAssignmentError, match="20 \\+ 20 workers"):
        plan([host(f"h{at}", gpus=8.0) for at in range(8)], needs(20, 20))


def test_a_fleet_that_no_memory_has_room_for_is_refused():
    """The table of 30,000 and as many workers has 7 GB."""
    byte_s = {distance: 1e-9 / rate.gb_per_s for distance, rate in RATES.items()}
    with pytest.raises(NoAssignmentError, match="30000 \\+ 30000 workers"):
        assign_workers([host("h1", gpus=8.0)], needs(30_000, 30_000), byte_s)


def test_a_thousand_gpus_are_assigned_exactly():
    hosts = [host(f"h{at}", f"r{at // 8}", f"z{at // 64}", gpus=8.0) for at in range(128)]
    wanted = needs(64, 192, gpus=4.0)
    byte_s = {distance: 1e-9 / rate.gb_per_s for distance, rate in RATES.items()}
    assigned = assign_workers(hosts, wanted, byte_s)
    on_host = [
        sorted(name.partition("-")[0] for name, its in assigned.items() if its is each)
        for each in hosts
    ]
    assert on_host.count(["decode", "prefill"]) == 64
    assert on_host.count(["decode", "decode"]) == 64


def test_links_are_as_configured_else_measured_else_guessed():
    rates = choose_rates({"same_rack": 12.5}, {Distance.SAME_RACK: 1.0, Distance.SAME_HOST: 9.0})
    found = {str(at): (rate.gb_per_s, rate.source) for at, rate in rates.items()}
    assert found == {
        "same_host": (9.0, "measured"),
        "same_rack": (12.5, "configured"),
        "same_zone": (pytest.approx(1e-9 / DEFAULTS[Distance.SAME_ZONE].byte_s), "default"),
        "cross_zone": (pytest.approx(1e-9 / DEFAULTS[Distance.CROSS_ZONE].byte_s), "default"),
    }
    with pytest.raises(ConfigError, match=r"fleet\.links has same_row"):
        choose_rates({"same_row": 1.0}, {})


def test_a_far_link_that_is_faster_is_no_reason_to_move_apart():
    planned = plan([host("h1"), host("h2", "r2")], needs(1, 1), links={"same_zone": 50.0})
    assert shares(planned) == {"same_host": 1.0}


def test_a_link_is_as_busy_as_the_worker_makes_it_that_uses_it():
    """Nine prefill workers stay on their hosts; all of the tenth one's KV crosses zones."""
    hosts = [host(f"h{at}", f"r{at}") for at in range(9)]
    hosts += [host("far", "r9", "z2", gpus=1.0), host("one", "r10", gpus=1.0)]
    planned = plan(hosts, needs(10, 10), kv=ExpectedKV("m", 1.0, 1000, 3e9))
    assert shares(planned) == {"same_host": pytest.approx(0.9), "cross_zone": pytest.approx(0.1)}
    busy = {each.distance: each.busy for each in planned.traffic}
    assert busy["cross_zone"] == pytest.approx(1.0), "0.3 GB/s of one worker, on a link as fast"
    assert busy["same_host"] == pytest.approx(0.3 / 8)
    assert busy["same_rack"] == busy["same_zone"] == 0.0


def test_the_kv_of_a_shipped_model():
    found = expect_kv(FleetSection(requests_per_s=2.0, prompt_tokens=1024), "llama-3.1-8b")
    assert found.bytes_per_s == 2 * 1024 * 131072


def test_what_is_printed():
    hosts = [host("h1"), host("h2", gpus=1.0)]
    planned = plan(hosts, needs(2, 1), kv=ExpectedKV("m", 8.0, 1000, 8e9), spread="host")
    shown = io.StringIO()
    print_plan(planned, shown)
    text = shown.getvalue()
    assert "no host has more than half" in text
    assert text.splitlines()[1].split() == ["prefill-0", "z1/r1/h1", "decode-0", "(same_host)"]
    assert "decode-0 (same_rack)" in text
    assert "note: links of same_rack would be busy for 200% of the time" in text


@pytest.mark.parametrize("path", ["", "a/b", "a/b/", "a/b/c/d"])
def test_what_is_no_path_of_a_host(path):
    with pytest.raises(ConfigError, match="zone/rack/host"):
        split_path(path)


def test_hosts_have_names_of_their_own():
    with pytest.raises(ConfigError, match="several hosts are called z1/r1/h1"):
        plan([host("h1"), host("h1")], needs(1, 1))
    with pytest.raises(ConfigError, match="in a name"):
        plan([host("h/1")], needs(1, 1))


def test_assignments_of_another_fleet_are_refused():
    with pytest.raises(ConfigError, match="names decode-7"):
        describe_fleet([("decode-0", "decode")], {"decode-7": "//h1"}, RATES, kv=KV, spread="none")


def test_workers_without_an_assignment_are_left_to_ray():
    workers = [("prefill-0", "prefill"), ("decode-0", "decode")]
    planned = describe_fleet(workers, {"decode-0": "h1"}, RATES, kv=None, spread="none")
    assert [each.host for each in planned.workers] == [None, "//h1"]
    assert planned.traffic == ()
    shown = io.StringIO()
    print_plan(planned, shown)
    assert "left to Ray" in shown.getvalue()
