from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.records import Record, Records
from baton.telemetry.trace import LegTrace


def record(request_id: str, status: int = 200) -> Record:
    trace = LegTrace(request_id=request_id, worker="gateway", epoch="e", leg="gateway")
    return Record(trace, None, status)


@given(st.lists(st.sampled_from("abcdefg"), max_size=30), st.integers(1, 5))
def test_the_latest_are_remembered(ids, capacity):
    records = Records(capacity)
    for number, request_id in enumerate(ids):
        records.add(record(request_id, number))
    expected = list(dict.fromkeys(reversed(ids)))[:capacity]
    assert [r.trace.request_id for r in records.latest_first()] == expected
    for request_id in "abcdefg":
        found = records.find(request_id)
        assert (found is not None) == (request_id in expected)
        if found is not None:
            assert found.status == max(i for i, other in enumerate(ids) if other == request_id)
