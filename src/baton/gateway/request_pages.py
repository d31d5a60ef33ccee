"""`GET /debug/requests` and `/debug/requests/{id}`.

/debug/requests                     the latest
/debug/requests?slow, ?failed       those that are kept longer for that
/debug/requests?last_s=60&most=500  of the last minute, 500 at most
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from baton.errors import InvalidRequestError
from baton.gateway.errors import PathNotFoundError
from baton.gateway.kept_traces import KeptTraces
from baton.gateway.otel_export import open_export
from baton.gateway.request_traces import NUM_LISTED, RequestTraces, latest
from baton.gateway.tail_sampling import KeptKind, TailSampler

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import msgspec

    from baton.clock import Clock
    from baton.config.sections import TraceSection
    from baton.gateway.request_history import RequestHistory
    from baton.gateway.trace_metrics import TraceMetrics
    from baton.protocol.request_traces import RequestList, RequestTrace

MAX_LISTED: Final = 10_000
MAX_QUERY_BYTES: Final = 256


@asynccontextmanager
async def open_request_pages(
    section: TraceSection,
    records: RequestHistory,
    traces: RequestTraces,
    *,
    clock: Clock,
    metrics: TraceMetrics,
) -> AsyncGenerator[RequestPages]:
    """Keep and export what is recorded, as configured, for as long as the block runs.

    Raises:
        ConfigError: an export is configured, and OpenTelemetry is not installed.
    """
    export = None
    if section.otlp_endpoint is not None:
        export = open_export(section.otlp_endpoint, metrics, clock)
        export.start()
    sampler = TailSampler(section.slow_quantile, section.slow_ttft_s)
    kept = KeptTraces(
        traces, sampler, section.kept_size, clock=clock, metrics=metrics, export=export
    )
    records.on_add = kept.offer
    fetching = asyncio.create_task(kept.run())
    try:
        yield RequestPages(records, kept, traces, clock)
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        if export is not None:
            await asyncio.to_thread(export.close)


class RequestPages:
    """Owner: the event loop's thread."""

    def __init__(
        self, records: RequestHistory, kept: KeptTraces, traces: RequestTraces, clock: Clock
    ) -> None:
        self._records, self._kept, self._traces, self._clock = records, kept, traces, clock

    async def show(self, request_id: str, query: bytes) -> msgspec.Struct:
        """The list, where `request_id` is empty, or one request.

        Raises:
            InvalidRequestError: the query cannot be read.
            PathNotFoundError: the gateway has forgotten the request.
        """
        return await self._find(request_id) if request_id else self._list(query)

    async def _find(self, request_id: str) -> RequestTrace:
        record = self._records.find(request_id)
        kept = self._kept.find_record(request_id)
        if (record is None or record is kept) and (whole := self._kept.find(request_id)):
            return whole
        record = record or kept
        if record is None:
            raise PathNotFoundError(f"no request {request_id!r} is remembered")
        return await self._traces.merge(record, self._kept.why_kept(request_id))

    def _list(self, query: bytes) -> RequestList:
        asked = _read_query(query)
        last_s = _read_number(asked, "last_s", float("inf"))
        usual = MAX_LISTED if "last_s" in asked else NUM_LISTED
        most = int(min(MAX_LISTED, _read_number(asked, "most", usual)))
        kinds = [kind for kind in KeptKind if kind in asked]
        if len(kinds) > 1:
            raise InvalidRequestError("ask for slow or for failed requests, not both")
        records = self._kept.latest_first(kinds[0]) if kinds else self._records.latest_first()
        found = latest(records, self._clock.now(), last_s, most)
        return self._traces.list(found, self._kept.why_kept)


def _read_query(query: bytes) -> dict[str, str]:
    if len(query) > MAX_QUERY_BYTES:
        raise InvalidRequestError(f"the query has more than {MAX_QUERY_BYTES} bytes")
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    unknown = asked.keys() - {*KeptKind, "last_s", "most"}
    if unknown:
        raise InvalidRequestError(
            f"unknown: {', '.join(sorted(unknown))[:100]}; there are slow, failed, last_s and most"
        )
    return asked


def _read_number(asked: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(asked.get(name, default))
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InvalidRequestError(f"{name} must be a number above 0")
    return value
