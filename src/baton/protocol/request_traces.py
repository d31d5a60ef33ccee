"""A gateway's answers to `/debug/requests` and `/debug/requests/{id}`."""

from __future__ import annotations

import msgspec

from baton.telemetry.timeline import ComparedTime, Lane, LayerTransfer
from baton.telemetry.trace import RequestSpan, TraceSummary


class ListedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `/debug/requests`. `received_at` is Unix seconds; `peer` the workers.

    `kept` is why it is remembered longer than others, if it is.
    """

    id: str
    status: int
    mode: str | None
    outcome: str | None
    received_at: float
    first_token_s: float | None
    total_s: float | None
    peer: str | None
    model: str
    trace_id: str
    kept: str | None = None


class RequestList(msgspec.Struct, frozen=True):
    """The answer to `/debug/requests`: the latest first."""

    requests: tuple[ListedRequest, ...]


class GapSummary(msgspec.Struct, frozen=True):
    """Seconds between the parts of a streamed answer, of the first `num` of them."""

    num: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/debug/requests/{id}`. `missing` names the roles that kept no trace.

    `received_at` is Unix seconds; all times of `timeline` count from then. `distance` is the
    topology distance between the two workers. `kept`: why it is remembered longer, if it is.
    `layers`: those of a handoff of which both workers recorded the transfer. `lost_share`: of the
    TCP segments from the prefill to the decode worker in the minute before this answer, or before
    the trace was kept.
    """

    id: str
    status: int
    placement: tuple[str, ...]
    summary: TraceSummary | None
    gateway: RequestSpan
    decode: RequestSpan | None
    prefill: RequestSpan | None
    missing: tuple[str, ...]
    model: str = ""
    path: str = ""
    received_at: float = 0.0
    timeline: tuple[Lane, ...] = ()
    compared: tuple[ComparedTime, ...] = ()
    token_gaps: GapSummary | None = None
    distance: str | None = None
    kept: str | None = None
    layers: tuple[LayerTransfer, ...] = ()
    lost_share: float | None = None
