from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.gateway.metrics import SecondsCollector

EDGES_S = (0.01, 0.1, 1.0)


@given(st.lists(st.floats(0, 5) | st.sampled_from(EDGES_S), max_size=20))
def test_it_is_exposed_as_prometheus_own_histogram_would_be(gaps_s):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    labels = ("model", "mode")
    oracle = Histogram("gap_seconds", "Gaps.", labels, buckets=EDGES_S, registry=theirs)
    collector = SecondsCollector("gap_seconds", "Gaps.", EDGES_S)
    ours.register(collector)
    for gap_s in gaps_s:
        oracle.labels("m", "push").observe(gap_s)
        collector.child("m", "push").observe(gap_s)
    assert sorted(lines(ours)) == sorted(lines(theirs))


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


def test_a_child_is_made_once():
    collector = SecondsCollector("gap_seconds", "Gaps.", EDGES_S)
    assert collector.child("m", "push") is collector.child("m", "push")
    assert collector.child("m", "push") is not collector.child("m", "colocated")
