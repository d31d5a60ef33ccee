"""Traces of many requests as one file in Chrome's trace event format, for ui.perfetto.dev.

    process  the gateway, and each worker
    thread   a row of requests that do not overlap; transfers and layers have rows of their own
    slice    a request; within it its stages; within those their parts. Of a layer: from computed
             to landed

A row's slices nest: of two, one contains the other or they do not overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.protocol.request_traces import RequestTrace
    from baton.telemetry.timeline import Lane

MICROSECONDS: Final = 1e6
REQUEST_ROWS, TRANSFER_ROWS, LAYER_ROWS = 1, 1000, 2000
"""The number of the first thread of each kind."""
_KINDS: Final = {REQUEST_ROWS: "requests", TRANSFER_ROWS: "transfers", LAYER_ROWS: "layers"}


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event: "X" is a slice with a duration, "M" names a process or thread. Times in us."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    cat: str = ""
    args: dict[str, str | int | float] = {}


class TraceFile(msgspec.Struct, frozen=True, rename="camel"):
    """The whole file. `other_data` has the Unix time of `ts` 0."""

    trace_events: list[TraceEvent]
    display_time_unit: str
    other_data: dict[str, str | float]


def make_trace_file(traces: Iterable[RequestTrace]) -> TraceFile:
    """A file of these requests, on one time axis."""
    found = sorted(traces, key=lambda trace: trace.received_at)
    base = found[0].received_at if found else 0.0
    lanes = [(trace, lane, trace.received_at - base) for trace in found for lane in trace.timeline]
    lanes.sort(key=lambda each: each[2] + each[1].start_s)
    first_s = lanes[0][2] + lanes[0][1].start_s if lanes else 0.0
    begin, rows = base + first_s, _Rows()
    for trace, lane, received_s in lanes:
        _add_lane(rows, trace, lane, received_s - first_s)
    return TraceFile(
        [*rows.names, *rows.events], "ms", {"began_at_unix_s": begin, "baton": __version__}
    )


class _Rows:
    """Gives each lane a process, and in it the first row that is free."""

    def __init__(self) -> None:
        self.names: list[TraceEvent] = []
        self.events: list[TraceEvent] = []
        self._processes: dict[str, int] = {}
        self._free_at: dict[tuple[int, int], list[float]] = {}

    def take(self, process: str, first: int, start_us: float, end_us: float) -> tuple[int, int]:
        """Process and thread for a slice; `first` is the first thread of its kind."""
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._name("process_name", pid, 0, process)
        rows = self._free_at.setdefault((pid, first), [])
        row = next((i for i, free_at in enumerate(rows) if free_at <= start_us), len(rows))
        if row == len(rows):
            rows.append(end_us)
            self._name("thread_name", pid, first + row, f"{_KINDS[first]} {row + 1}")
        rows[row] = end_us
        return pid, first + row

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self.names.append(TraceEvent(what, "M", pid, tid, args={"name": name}))


def _add_lane(rows: _Rows, trace: RequestTrace, lane: Lane, offset_s: float) -> None:
    def at(seconds: float) -> float:
        return round((offset_s + seconds) * MICROSECONDS, 3)

    start, end = at(lane.start_s), at(lane.end_s)
    is_transfer = lane.name == "transfer"
    process = trace.decode.worker if is_transfer and trace.decode is not None else lane.worker
    pid, tid = rows.take(process, TRANSFER_ROWS if is_transfer else REQUEST_ROWS, start, end)
    rows.events.append(
        TraceEvent(
            trace.id, "X", pid, tid, start, round(end - start, 3), lane.name, _args(trace, lane)
        )
    )
    for stage in lane.stages:
        begin, until = at(stage.start_s), at(stage.end_s)
        duration = round(until - begin, 3)
        rows.events.append(TraceEvent(stage.name, "X", pid, tid, begin, duration, lane.name))
    for layer in trace.layers if is_transfer else ():
        begin = max(0.0, at(layer.ready_s))  # of a clock that jumped, before all else
        until = max(begin, at(layer.landed_s))
        pid, tid = rows.take(process, LAYER_ROWS, begin, until)
        duration = round(until - begin, 3)
        rows.events.append(
            TraceEvent(f"layer {layer.layer}", "X", pid, tid, begin, duration, "layer")
        )


def _args(trace: RequestTrace, lane: Lane) -> dict[str, str | int | float]:
    """What a slice shows when it is selected."""
    summary = trace.summary
    found: dict[str, str | int | float | None] = {
        "status": trace.status,
        "model": trace.model,
        "mode": trace.gateway.mode,
        "outcome": trace.gateway.outcome,
        "trace_id": trace.gateway.trace_id,
        "clock_error_s": None if lane.clock is None else lane.clock.error_s,
    }
    if lane.name == "transfer" and summary is not None:
        found |= {
            "transport": summary.transport,
            "expected_transport": summary.expected_transport,
            "bytes": summary.num_bytes,
            "pages": summary.num_pages,
            "distance": trace.distance,
        }
    return {name: value for name, value in found.items() if value is not None}
