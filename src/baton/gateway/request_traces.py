"""`/debug/requests`: what is remembered of the latest requests, merged with what workers recorded.

a request ends ─► `RequestHistory` (the last ones) ─► `KeptTraces` (gateway/kept_traces.py)
somebody asks  ─► `RequestTraces.of`: fetches the workers' spans, and makes one timeline
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, BatonError
from baton.protocol.request_traces import GapSummary, ListedRequest, RequestList, RequestTrace
from baton.protocol.worker_http import trace_path
from baton.telemetry.timeline import (
    WorkerTrace,
    compare_prediction,
    list_layers,
    make_timeline,
)
from baton.telemetry.trace import RequestSpan, Stamp, read_token_gaps, summarize
from baton.telemetry.trace_merge import merge_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from yarl import URL

    from baton.clock import Clock
    from baton.gateway.request_history import RequestRecord
    from baton.gateway.transfer_feed import TransferFeed
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers
    from baton.router.fleet import WorkerView
    from baton.router.load import FleetLoad
    from baton.router.placement import Placement

NUM_LISTED: Final = 100
FETCH_TIMEOUT_S: Final = 2.0
OK: Final = 200

log = logging.getLogger(__name__)


_trace_decoder = msgspec.json.Decoder(RequestSpan)


class RequestTraces:
    """Merges what gateway and workers remember of a request."""

    def __init__(
        self,
        workers: Workers,
        upstream: Upstream,
        load: FleetLoad,
        clock: Clock,
        *,
        transfers: TransferFeed,
    ) -> None:
        self._workers, self._upstream, self._load, self._clock = workers, upstream, load, clock
        self._transfers = transfers

    def list(
        self, records: Iterable[RequestRecord], why_kept: Callable[[str], str | None]
    ) -> RequestList:
        """Lines for these requests."""
        return RequestList(
            tuple(self._show(each, why_kept(each.trace.request_id)) for each in records)
        )

    async def merge(self, record: RequestRecord, kept: str | None = None) -> RequestTrace:
        """One request, with the traces of its workers as far as they have them."""
        placed, request_id = record.placement, record.trace.request_id
        decode, prefill = await asyncio.gather(
            self._fetch(placed.decode if placed else None, request_id),
            self._fetch(placed.prefill if placed else None, request_id),
        )
        return self._merge(record, decode, prefill, kept)

    def _show(self, record: RequestRecord, kept: str | None) -> ListedRequest:
        trace, stamps = record.trace, record.trace.stamps
        received = stamps.get(Stamp.RECEIVED)
        first, last = stamps.get(Stamp.FIRST_TOKEN), stamps.get(Stamp.FINISHED)
        return ListedRequest(
            id=trace.request_id,
            status=record.status,
            mode=trace.mode,
            outcome=trace.outcome,
            received_at=self._to_unix(received),
            first_token_s=None if first is None or received is None else first - received,
            total_s=None if last is None or received is None else last - received,
            peer=trace.peer,
            model=record.model,
            trace_id=trace.trace_id,
            kept=kept,
        )

    def _to_unix(self, at: float | None) -> float:
        return 0.0 if at is None else self._clock.unix_now() - (self._clock.now() - at)

    async def _fetch(self, view: WorkerView | None, request_id: str) -> WorkerTrace | None:
        worker = None if view is None else self._workers.with_id(view.id)
        if worker is None:
            return None
        path = trace_path(request_id)
        urls = [url.with_path(path, encoded=True) for url in worker.control_urls]
        answers = await asyncio.gather(*(self._fetch_span(worker, url) for url in urls))
        spans = [span for span in answers if span is not None]
        if not spans:
            return None
        clock = worker.clock.estimate(self._clock.now())
        if len(answers) == 1:
            return WorkerTrace(spans[0], clock)
        missing = tuple(rank for rank, span in enumerate(answers) if span is None)
        return WorkerTrace(merge_ranks(worker.name, spans), clock, missing)

    async def _fetch_span(self, worker: Worker, url: URL) -> RequestSpan | None:
        try:
            status, body = await self._upstream.get(url, FETCH_TIMEOUT_S)
            if status == OK:
                return _trace_decoder.decode(body)
        except (BatonError, *UNDECODABLE) as exc:
            log.info("no trace from %s at %s: %s", worker, url, exc)
        return None

    def _merge(
        self,
        record: RequestRecord,
        decode: WorkerTrace | None,
        prefill: WorkerTrace | None,
        kept: str | None,
    ) -> RequestTrace:
        placed, gateway = record.placement, record.trace
        timeline = make_timeline(gateway, decode, prefill)
        first = None if prefill is None else prefill.span
        return RequestTrace(
            id=gateway.request_id,
            status=record.status,
            placement=(*placed.reasons, *placed.why) if placed is not None else (),
            summary=None if decode is None else summarize(gateway, decode.span, first),
            gateway=gateway,
            decode=None if decode is None else decode.span,
            prefill=first,
            missing=_list_missing(placed, decode, prefill),
            model=record.model,
            path=record.path,
            received_at=self._to_unix(gateway.stamps.get(Stamp.RECEIVED)),
            timeline=timeline,
            compared=compare_prediction(gateway, timeline),
            token_gaps=summarize_gaps(gateway),
            distance=self._find_distance(placed),
            kept=kept,
            layers=list_layers(gateway, decode, prefill),
            lost_share=self._find_lost_share(placed),
        )

    def _find_distance(self, placed: Placement | None) -> str | None:
        if placed is None or placed.prefill is None:
            return None
        handoffs = self._load.costs(placed.decode.model).handoffs
        return str(handoffs.distance(placed.prefill, placed.decode))

    def _find_lost_share(self, placed: Placement | None) -> float | None:
        if placed is None or placed.prefill is None:
            return None
        sender = self._workers.with_id(placed.prefill.id)
        if sender is None:
            return None
        return self._transfers.find_lost_share(sender, placed.decode.id)


def _list_missing(
    placed: Placement | None, decode: WorkerTrace | None, prefill: WorkerTrace | None
) -> tuple[str, ...]:
    """Workers, and ranks of servers, that have no trace of a request that was placed there.

    A vLLM server traces only requests with a ticket: those that are handed over.
    """
    found: list[str] = []
    if placed is not None and (placed.prefill is not None or placed.decode.protocol != "vllm"):
        for role, view, trace in (
            ("decode", placed.decode, decode),
            ("prefill", placed.prefill, prefill),
        ):
            if view is not None and trace is None:
                found.append(f"{role} ({view.id})")
            elif view is not None and trace is not None:
                found += [f"{role} ({view.id}, rank {rank})" for rank in trace.missing_ranks]
    return tuple(found)


def latest(
    records: Iterable[RequestRecord], now: float, last_s: float, most: int
) -> Iterator[RequestRecord]:
    """Of `records`, latest first: `most` at most, of those that ended within `last_s` seconds."""
    return islice((each for each in records if now - each.ended_at <= last_s), most)


def summarize_gaps(span: RequestSpan) -> GapSummary | None:
    """The gaps of a streamed answer; None where there are none."""
    gaps = sorted(read_token_gaps(span))
    if not gaps:
        return None
    num = len(gaps)
    return GapSummary(
        num, sum(gaps) / num, gaps[num // 2], gaps[min(num - 1, int(0.99 * num))], gaps[-1]
    )
