"""Assignments of workers to hosts, against all that there are."""

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.config.sections import HostTable
from baton.planner.assignment import (
    Location,
    Needs,
    NoAssignmentError,
    assign_workers,
    divide_traffic,
)
from baton.planner.traffic import DISTANCES

MAX_WORKERS = 3
TOLERANCE = 1e-5
"""Above what an even division is worth (`EVENNESS`), and below any difference of two links here."""

names = st.sampled_from(["", "a", "b"])
hosts = st.lists(
    st.builds(
        HostTable,
        name=st.uuids().map(str),
        zone=names,
        rack=names,
        gpus=st.integers(0, 4).map(float),
        cpus=st.integers(0, 6).map(float),
        labels=st.dictionaries(st.just("kind"), st.sampled_from(["x", "y"])),
    ),
    min_size=1,
    max_size=4,
)
selectors = st.sampled_from([{}, {}, {"kind": "x"}, {"kind": "!y"}, {"rack": "in(a,b)"}])
workers = st.tuples(
    st.integers(1, MAX_WORKERS), st.integers(0, 2), st.integers(0, 2), selectors
)  # number, GPUs, CPUs, labels
costs = st.lists(st.integers(1, 50), min_size=4, max_size=4).map(
    lambda each: dict(zip(DISTANCES, np.cumsum(each).astype(float).tolist(), strict=True))
)
spreads = st.sampled_from(["none", "none", "host", "rack", "zone"])


def needs_of(role, worker):
    number, gpus, cpus, selector = worker
    named = tuple(f"{role}-{each}" for each in range(number))
    return Needs(role, named, float(gpus), float(cpus), 0, selector)


def allows(host, selector):
    """Written out, for the selectors above."""
    match selector:
        case {"kind": "x"}:
            return host.labels.get("kind") == "x"
        case {"kind": "!y"}:
            return host.labels.get("kind") != "y"
        case {"rack": _}:
            return host.rack in {"a", "b"}
    return True


def is_allowed(found, counts, prefill, decode, spread):
    """Whether hosts may have so many workers, by the plain rules."""
    for host, (first, second) in zip(found, counts, strict=True):
        for own, num in ((prefill, first), (decode, second)):
            if num and not allows(host, own.selector):
                return False
        for at, free in enumerate((host.gpus, host.cpus)):
            if first * prefill.amounts[at] + second * decode.amounts[at] > free:
                return False
    if spread == "none":
        return True
    domains = {}
    for host, own in zip(found, counts, strict=True):
        location = Location.of(host.zone, host.rack, host.name)
        so_far = domains.get(getattr(location, spread), (0, 0))
        domains[getattr(location, spread)] = tuple(np.add(so_far, own))
    most = [(len(each.names) + 1) // 2 for each in (prefill, decode)]
    return all(p <= most[0] and d <= most[1] for p, d in domains.values())


def cost_of(found, counts, byte_s):
    located = [
        (Location.of(host.zone, host.rack, host.name), own)
        for host, own in zip(found, counts, strict=True)
    ]
    return sum(goes.share * byte_s[at] for at, goes in divide_traffic(located).items())


def divisions(number, num_hosts):
    """All ways to divide so many workers among hosts."""
    return [each for each in product(range(number + 1), repeat=num_hosts) if sum(each) == number]


@given(hosts, workers, workers, costs, spreads)
def test_no_assignment_costs_less(found, prefill, decode, byte_s, spread):
    prefill, decode = needs_of("prefill", prefill), needs_of("decode", decode)
    all_counts = [
        tuple(zip(first, second, strict=True))
        for first in divisions(len(prefill.names), len(found))
        for second in divisions(len(decode.names), len(found))
    ]
    possible = [
        cost_of(found, counts, byte_s)
        for counts in all_counts
        if is_allowed(found, counts, prefill, decode, spread)
    ]
    if not possible:
        with pytest.raises(NoAssignmentError, match="no room"):
            assign_workers(found, (prefill, decode), byte_s, spread)
        return
    assigned = assign_workers(found, (prefill, decode), byte_s, spread)
    assert assigned.keys() == {*prefill.names, *decode.names}
    counts = [
        tuple(sum(assigned[name] is host for name in each.names) for each in (prefill, decode))
        for host in found
    ]
    assert is_allowed(found, counts, prefill, decode, spread)
    assert cost_of(found, counts, byte_s) <= min(possible) + TOLERANCE * max(byte_s.values())


@given(
    st.lists(st.tuples(names, names, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    costs,
)
def test_kv_that_prefers_the_nearest_costs_as_little_as_any_division(placed, byte_s):
    """The formula of shares, against a linear program over all pairs of hosts."""
    optimize = pytest.importorskip("scipy.optimize")
    located = [
        (Location.of(zone, rack, str(at)), (p, d)) for at, (zone, rack, p, d) in enumerate(placed)
    ]
    totals = [sum(own[at] for _, own in located) for at in (0, 1)]
    assume(all(totals))
    prefill = [own[0] / totals[0] for _, own in located]
    decode = [own[1] / totals[1] for _, own in located]
    num = len(located)
    distances = [byte_s[one.distance(other)] for one, _ in located for other, _ in located]
    sums = [[float(pair // num == at) for pair in range(num * num)] for at in range(num)] + [
        [float(pair % num == at) for pair in range(num * num)] for at in range(num)
    ]
    best = optimize.linprog(distances, A_eq=sums, b_eq=[*prefill, *decode])
    assert best.status == 0
    traffic = divide_traffic(located)
    assert sum(goes.share for goes in traffic.values()) == pytest.approx(1.0)
    assert max(goes.most for goes in traffic.values()) <= 1 / totals[0] + 1e-9
    cost = sum(goes.share * byte_s[at] for at, goes in traffic.items())
    assert cost == pytest.approx(best.fun)


@given(hosts, st.integers(1, MAX_WORKERS), costs)
def test_workers_of_both_parts_are_divided_evenly(found, number, byte_s):
    found = [msgspec.structs.replace(host, cpus=float(number)) for host in found]
    needs = Needs("both", tuple(f"worker-{each}" for each in range(number)), cpus=1.0)
    assigned = assign_workers(found, (needs,), byte_s)
    counts = [sum(each is host for each in assigned.values()) for host in found]
    assert max(counts) - min(counts) <= 1
