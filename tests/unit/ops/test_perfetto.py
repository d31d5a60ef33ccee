"""`baton trace export`: what it writes is valid in Chrome's trace event format."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.ops.perfetto import make_trace_file
from baton.protocol.request_traces import RequestTrace
from baton.telemetry.timeline import Lane, LayerTransfer, Stage
from baton.telemetry.trace import RequestSpan

KEYS = {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"}


@st.composite
def lanes(draw, name: str, worker: str) -> Lane:
    start = draw(st.floats(0, 3))
    stages, at = [], start
    for number, took in enumerate(draw(st.lists(st.floats(0, 2), min_size=1, max_size=4))):
        stages.append(Stage(f"stage {number}", at, at + took))
        if draw(st.booleans()):
            stages.append(Stage("part", at + took / 3, at + took / 2, is_part=True))
        at += took
    return Lane(name, worker, start, at, tuple(stages), None)


@st.composite
def layers(draw) -> LayerTransfer:
    ready_s = draw(st.floats(0, 3))
    return LayerTransfer(draw(st.integers(0, 99)), ready_s, ready_s + draw(st.floats(0, 2)))


@st.composite
def traces(draw) -> RequestTrace:
    number = draw(st.integers(0, 10**6))
    span = RequestSpan(request_id=f"r{number}", worker="d", epoch="e", role="decode")
    return RequestTrace(
        id=f"r{number}", status=200, placement=(), summary=None, gateway=span, decode=span,
        prefill=None, missing=(), received_at=1e9 + draw(st.floats(0, 5)),
        layers=tuple(draw(st.lists(layers(), max_size=5))),
        timeline=(
            draw(lanes("gateway", "gateway")), draw(lanes("transfer", "p → d")),
            draw(lanes("decode", draw(st.sampled_from("de")))),
        ),
    )  # fmt: skip


@given(st.lists(traces(), max_size=6))
def test_slices_of_a_row_nest_and_rows_have_names(found) -> None:
    content = msgspec.json.decode(msgspec.json.encode(make_trace_file(found)))
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    slices, named = {}, set()
    for event in content["traceEvents"]:
        assert set(event) <= KEYS
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            named.add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            begin = event.get("ts", 0.0)
            assert begin >= 0
            row = slices.setdefault((event["pid"], event["tid"]), [])
            row.append((begin, begin + event["dur"]))
    assert {(pid, 0) for pid, _ in slices} <= named
    assert slices.keys() <= named
    for row in slices.values():
        open_until = []
        for begin, end in sorted(row, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin + 0.002:  # times are written in ns
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002
            open_until.append(end)
    assert sum(map(len, slices.values())) == sum(
        1 + len(lane.stages) for trace in found for lane in trace.timeline
    ) + sum(len(trace.layers) for trace in found)


def test_a_window_without_requests_is_an_empty_file() -> None:
    assert make_trace_file([]).trace_events == []
