"""Slow and failed requests, complete with their workers' spans, while these still have them.

`offer` is called when a request ends and decides; tasks of its own then fetch the workers' spans,
so that no request waits for it. What is exported (gateway/otel_export.py) goes the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from baton.gateway.tail_sampling import KeptKind, TailSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.clock import Clock
    from baton.gateway.otel_export import SpanExport
    from baton.gateway.request_history import RequestRecord
    from baton.gateway.request_traces import RequestTraces
    from baton.gateway.trace_metrics import TraceMetrics
    from baton.protocol.request_traces import RequestTrace

NUM_FETCHING: Final = 4
MOST_PENDING: Final = 1024
"""Requests whose workers' spans are still to be fetched; what comes beyond them is lost."""
SETTLE_S: Final = 0.25
"""Between the end of a request here and the end of its workers' spans."""

log = logging.getLogger(__name__)


class KeptTraces:
    """Owner: the event loop's thread. `capacity`: of each `KeptKind`."""

    def __init__(
        self,
        traces: RequestTraces,
        sampler: TailSampler,
        capacity: int,
        *,
        clock: Clock,
        metrics: TraceMetrics,
        export: SpanExport | None,
    ) -> None:
        self._traces, self._sampler, self._capacity = traces, sampler, capacity
        self._clock, self._metrics, self._export = clock, metrics, export
        self._kept: dict[KeptKind, OrderedDict[str, tuple[RequestRecord, str]]] = {
            kind: OrderedDict() for kind in KeptKind
        }
        self._merged: dict[str, RequestTrace] = {}
        self._pending: asyncio.Queue[tuple[RequestRecord, str | None]] = asyncio.Queue(MOST_PENDING)

    def offer(self, record: RequestRecord) -> None:
        """A request has ended: keep it if it is slow or failed, export it if it is sampled."""
        found, why = self._sampler.look(record), None
        if found is not None:
            kind, why = found
            self._keep(kind, record, why)
        elif self._export is None or not record.trace.is_sampled:
            return
        try:
            self._pending.put_nowait((record, why))
        except asyncio.QueueFull:
            self._metrics.lost["workers"].inc()

    def find(self, request_id: str) -> RequestTrace | None:
        """The complete trace of a request that is kept, once it is fetched."""
        return self._merged.get(request_id)

    def find_record(self, request_id: str) -> RequestRecord | None:
        """What the gateway recorded of a request that is kept."""
        found = (ring[request_id] for ring in self._kept.values() if request_id in ring)
        return next(found, (None, ""))[0]

    def why_kept(self, request_id: str) -> str | None:
        """Why a request is kept, if it is."""
        for ring in self._kept.values():
            if request_id in ring:
                return ring[request_id][1]
        return None

    def latest_first(self, kind: KeptKind) -> Iterator[RequestRecord]:
        """Those that are kept for this cause."""
        return (record for record, _ in reversed(self._kept[kind].values()))

    async def run(self) -> None:
        """Fetch until cancelled."""
        await asyncio.gather(*(self._fetch() for _ in range(NUM_FETCHING)))

    def _keep(self, kind: KeptKind, record: RequestRecord, why: str) -> None:
        request_id = record.trace.request_id
        for other in self._kept.values():
            other.pop(request_id, None)
        self._merged.pop(request_id, None)  # of an earlier request with the same id
        ring = self._kept[kind]
        ring[request_id] = record, why
        self._metrics.kept[kind].inc()
        if len(ring) > self._capacity:
            oldest, _ = ring.popitem(last=False)
            self._merged.pop(oldest, None)

    async def _fetch(self) -> None:
        while True:
            record, why = await self._pending.get()
            try:
                wait_s = record.ended_at + SETTLE_S - self._clock.now()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                trace = await self._traces.merge(record, why)
                if self.find_record(trace.id) is record:
                    self._merged[trace.id] = trace
                if self._export is not None:
                    self._export.offer(trace)
            except Exception:
                self._metrics.lost["workers"].inc()
                log.exception("the trace of request %s cannot be kept", record.trace.name)
