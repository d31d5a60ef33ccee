"""`/debug/requests`: where did the time of one request go?"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from baton.errors import BatonError
from baton.gateway.errors import PathNotFoundError
from baton.telemetry.summary import TraceSummary, summarize
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from baton.gateway.request_history import RequestHistory, RequestRecord
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Workers
    from baton.router.fleet import WorkerView

NUM_LISTED: Final = 100
FETCH_TIMEOUT_S: Final = 2.0
OK: Final = 200

log = logging.getLogger(__name__)


class ListedRequest(msgspec.Struct, frozen=True):
    """One line of `/debug/requests`."""

    id: str
    status: int
    mode: str | None
    outcome: str | None


class RequestList(msgspec.Struct, frozen=True):
    """The answer to `/debug/requests`: the latest first."""

    requests: tuple[ListedRequest, ...]


class RequestTrace(msgspec.Struct, frozen=True):
    """The answer to `/debug/requests/{id}`. `missing` names the legs that nobody remembers."""

    id: str
    status: int
    placement: tuple[str, ...]
    summary: TraceSummary | None
    gateway: RequestSpan
    decode: RequestSpan | None
    prefill: RequestSpan | None
    missing: tuple[str, ...]


_trace_decoder = msgspec.json.Decoder(RequestSpan)


class RequestTraces:
    """Merges what gateway and workers remember of a request, when somebody asks."""

    def __init__(self, records: RequestHistory, workers: Workers, upstream: Upstream) -> None:
        self._records, self._workers, self._upstream = records, workers, upstream

    def latest(self) -> RequestList:
        """The latest requests."""
        return RequestList(
            tuple(
                ListedRequest(r.trace.request_id, r.status, r.trace.mode, r.trace.outcome)
                for r in islice(self._records.latest_first(), NUM_LISTED)
            )
        )

    async def of(self, request_id: str) -> RequestTrace:
        """One request, with the traces of its workers as far as they have them.

        Raises:
            PathNotFoundError: the gateway has forgotten it.
        """
        record = self._records.find(request_id)
        if record is None:
            raise PathNotFoundError(f"no request {request_id!r} is remembered")
        placed = record.placement
        decode, prefill = await asyncio.gather(
            self._fetch(placed.decode if placed else None, request_id),
            self._fetch(placed.prefill if placed else None, request_id),
        )
        return _merge(record, decode, prefill)

    async def _fetch(self, view: WorkerView | None, request_id: str) -> RequestSpan | None:
        worker = None if view is None else self._workers.with_id(view.id)
        if worker is None:
            return None
        path = f"/baton/v1/traces/{quote(request_id, safe='')}"
        for url in worker.control_urls:  # each rank has one of its own: the first stands for all
            try:
                status, body = await self._upstream.get(
                    url.with_path(path, encoded=True), FETCH_TIMEOUT_S
                )
                if status == OK:
                    return _trace_decoder.decode(body)
            except (BatonError, msgspec.MsgspecError) as exc:
                log.info("no trace of %s from %s: %s", request_id, worker, exc)
        return None


def _merge(
    record: RequestRecord, decode: RequestSpan | None, prefill: RequestSpan | None
) -> RequestTrace:
    placed = record.placement
    missing: list[str] = []
    if placed is not None and decode is None:
        missing.append(f"decode ({placed.decode.id})")
    if placed is not None and placed.prefill is not None and prefill is None:
        missing.append(f"prefill ({placed.prefill.id})")
    return RequestTrace(
        id=record.trace.request_id,
        status=record.status,
        placement=(*placed.reasons, *placed.why) if placed is not None else (),
        summary=None if decode is None else summarize(record.trace, decode, prefill),
        gateway=record.trace,
        decode=decode,
        prefill=prefill,
        missing=tuple(missing),
    )
