from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.request_history import RequestHistory, RequestRecord
from baton.telemetry.trace import RequestSpan


def record(request_id: str, status: int = 200) -> RequestRecord:
    trace = RequestSpan(request_id=request_id, worker="gateway", epoch="e", role="gateway")
    return RequestRecord(trace, None, status)


@given(st.lists(st.sampled_from("abcdefg"), max_size=30), st.integers(1, 5))
def test_the_latest_are_remembered(ids, capacity):
    records = RequestHistory(capacity)
    for number, request_id in enumerate(ids):
        records.add(record(request_id, number))
    expected = list(dict.fromkeys(reversed(ids)))[:capacity]
    assert [r.trace.request_id for r in records.latest_first()] == expected
    for request_id in "abcdefg":
        found = records.find(request_id)
        assert (found is not None) == (request_id in expected)
        if found is not None:
            assert found.status == max(i for i, other in enumerate(ids) if other == request_id)
