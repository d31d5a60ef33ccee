from __future__ import annotations

import msgspec
import pytest

from baton.telemetry.trace import RequestSpan, Stamp, TraceRing


def trace(request_id: str) -> RequestSpan:
    return RequestSpan(request_id=request_id, worker="w0", epoch="e", role="colocated")


def test_the_ring_forgets_the_oldest() -> None:
    ring = TraceRing(2)
    for name in ("a", "b", "c"):
        ring.add(trace(name))
    assert ring.find("a") is None
    assert [found.request_id for n in ("b", "c") if (found := ring.find(n))] == ["b", "c"]
    assert len(ring) == 2


def test_the_newest_trace_of_a_request_wins_and_is_the_youngest() -> None:
    ring = TraceRing(2)
    retried = trace("a")
    for one in (trace("a"), trace("b"), retried, trace("c")):
        ring.add(one)
    retried.outcome = "stop"
    found = ring.find("a")
    assert found is not None
    assert found.outcome == "stop"
    assert ring.find("b") is None


def test_what_is_found_does_not_change_afterwards() -> None:
    ring, one = TraceRing(1), trace("a")
    ring.add(one)
    found = ring.find("a")
    one.stamp(Stamp.FINISHED, 3.0)
    one.fallbacks.append("x")
    assert found is not None
    assert (found.stamps, found.fallbacks) == ({}, [])


def test_the_first_instant_of_a_name_wins() -> None:
    one = trace("a")
    one.stamp(Stamp.FIRST_TOKEN, 1.0)
    one.stamp(Stamp.FIRST_TOKEN, 2.0)
    assert one.stamps == {Stamp.FIRST_TOKEN: 1.0}


def test_a_trace_crosses_the_wire_as_json() -> None:
    one = trace("a")
    one.stamp(Stamp.FIRST_TOKEN, 1.5)
    one.peer_stamps[Stamp.PREFILL_DONE] = 1.25
    assert msgspec.json.decode(msgspec.json.encode(one), type=RequestSpan) == one


def test_a_ring_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="remembers nothing"):
        TraceRing(0)
