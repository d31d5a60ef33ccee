"""A request's trace as OpenTelemetry spans: the one place that knows OpenTelemetry's names.

`gen_ai.*` are those of the GenAI semantic conventions in version 1.44.0 of the semantic
conventions, whose status is Development. All else is `baton.*`.

    chat MODEL (gateway)
    ├── admit, tokenize, queue, place, wait, answer
    ├── prefill (the worker that computed the prompt) ── its stages, chunks
    └── decode (the worker that answered) ── its stages, transfer, exposed transfer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import structs
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from baton import __version__
from baton.ids import new_span_id, new_trace_id
from baton.protocol.worker_http import CHAT_COMPLETIONS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.protocol.request_traces import RequestTrace
    from baton.telemetry.timeline import Lane
    from baton.telemetry.trace import RequestSpan

Attributes: TypeAlias = dict[str, str | int | float | bool]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
PROVIDER: Final = "baton"
SERVER_ERROR: Final = 500
PREFILL: Final = "prefill"
DECODE: Final = "decode"
NS: Final = 1_000_000_000

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
ERROR_TYPE: Final = "error.type"
HTTP_STATUS: Final = "http.response.status_code"

_SCOPE: Final = InstrumentationScope("baton", __version__, SCHEMA_URL)
_UNSET: Final = Status(StatusCode.UNSET)


def make_spans(trace: RequestTrace) -> list[ReadableSpan]:
    """All spans of one request, the gateway's first; none where nothing was recorded."""
    lanes: dict[str, Lane] = {lane.name: lane for lane in trace.timeline}
    own = lanes.get("gateway")
    if own is None:
        return []
    made = _Spans(trace)
    context = made.context(trace.gateway.span_id)
    parent = made.context(trace.gateway.parent_id) if trace.gateway.parent_id else None
    status = _UNSET
    attributes = _request_attributes(trace)
    if trace.status >= SERVER_ERROR:
        status = Status(StatusCode.ERROR, trace.gateway.outcome)
        attributes[ERROR_TYPE] = str(trace.status)
    name = f"{attributes[OPERATION_NAME]} {trace.model}".rstrip()
    made.add(_Described(name, attributes, SpanKind.SERVER, status), own, context, parent)
    made.add_stages(own, context)
    for role, span in ((PREFILL, trace.prefill), (DECODE, trace.decode)):
        lane = lanes.get(role)
        if lane is not None:
            recorded = span or trace.decode
            shown = made.context(span.span_id if span is not None else "")
            described = _Described(role, _lane_attributes(recorded), SpanKind.SERVER)
            made.add(described, lane, shown, context)
            made.add_stages(lane, shown)
            if role == DECODE and (transfer := lanes.get("transfer")) is not None:
                made.add_stages(structs.replace(transfer, worker=lane.worker), shown)
    return made.spans


@dataclass(frozen=True, slots=True)
class _Described:
    """What a span shows."""

    name: str
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    status: Status = _UNSET


class _Spans:
    """Collects the spans of one trace."""

    def __init__(self, trace: RequestTrace) -> None:
        self.spans: list[ReadableSpan] = []
        self._trace_id = int(trace.gateway.trace_id or new_trace_id(), 16)
        self._received_ns = int(trace.received_at * NS)

    def context(self, span_id: str) -> SpanContext:
        """The context of a span of this trace; of a new one for ""."""
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(
            self._trace_id, int(span_id or new_span_id(), 16), is_remote=False, trace_flags=sampled
        )

    def add(
        self,
        shown: _Described,
        lane: Lane,
        context: SpanContext,
        parent: SpanContext | None,
        *,
        times: tuple[float, float] | None = None,
    ) -> None:
        """One span; it lasts as long as its lane unless `times` are given."""
        start_s, end_s = times or (lane.start_s, lane.end_s)
        service = "baton-gateway" if lane.name == "gateway" else "baton-worker"
        resource = Resource({
            "service.name": service,
            "service.instance.id": lane.worker,
            "service.version": __version__,
        })
        self.spans.append(
            ReadableSpan(
                shown.name,
                context,
                parent,
                resource,
                shown.attributes,
                kind=shown.kind,
                status=shown.status,
                start_time=self._received_ns + int(start_s * NS),
                end_time=self._received_ns + int(end_s * NS),
                instrumentation_scope=_SCOPE,
            )
        )

    def add_stages(self, lane: Lane, parent: SpanContext) -> None:
        """The stages of a lane below its span, and their parts below them."""
        above = parent
        for stage in lane.stages:
            context = self.context("")
            below = above if stage.is_part else parent
            times = stage.start_s, stage.end_s
            self.add(_Described(stage.name, {}), lane, context, below, times=times)
            if not stage.is_part:
                above = context


def _request_attributes(trace: RequestTrace) -> Attributes:
    gateway, summary = trace.gateway, trace.summary
    is_chat = trace.path == CHAT_COMPLETIONS_PATH
    found: dict[str, str | int | float | bool | None] = {
        OPERATION_NAME: "chat" if is_chat else "text_completion",
        PROVIDER_NAME: PROVIDER,
        REQUEST_MODEL: trace.model or None,
        HTTP_STATUS: trace.status,
        "baton.request_id": trace.id,
        "baton.mode": gateway.mode,
        "baton.distance": trace.distance,
        "baton.kept": trace.kept,
    }
    if summary is not None:
        found |= {
            RESPONSE_MODEL: trace.model,
            INPUT_TOKENS: summary.num_prompt_tokens,
            CACHED_TOKENS: summary.num_cached_tokens,
            OUTPUT_TOKENS: summary.num_output_tokens,
            TIME_TO_FIRST_CHUNK: summary.first_token_s,
        }
    for each in trace.compared:
        found[f"baton.predicted.{each.part}_s"] = each.predicted_s
    return dict(_known(found))


def _lane_attributes(span: RequestSpan | None) -> Attributes:
    if span is None:
        return {}
    return dict(
        _known({
            "baton.transport": span.transport,
            "baton.expected_transport": span.expected_transport,
            "baton.num_bytes": span.num_bytes,
            "baton.num_pages": span.num_pages,
            "baton.num_cached_tokens": span.num_cached_tokens,
            "baton.verify_s": span.verify_s,
            "baton.outcome": span.outcome,
        })
    )


def _known(
    found: dict[str, str | int | float | bool | None],
) -> Iterator[tuple[str, str | int | float | bool]]:
    for name, value in found.items():
        if value is not None:
            yield name, value
