"""Reads what workers have measured of KV transfers, and keeps the reports of the last minute."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from baton.gateway.rank_reports import merge_transfers
from baton.gateway.report_feed import MAX_AGE_S, ReportFeed, ReportPage
from baton.gateway.transfer_sums import subtract_segments
from baton.protocol.worker_http import TRANSFERS_PATH
from baton.telemetry.transfer_report import (
    MAX_REPORT_BYTES,
    HandoffTransfers,
    LinkSegments,
    LinkTransfers,
    SegmentCounts,
    StoreReport,
    StoreTier,
    TransferReport,
)

if TYPE_CHECKING:
    from baton.clock import Clock, Instant
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers

INTERVAL_S: Final = 5.0
WINDOW_S: Final = 60.0

_decoder = msgspec.json.Decoder(TransferReport)


class _MergedStore(StoreReport, frozen=True, kw_only=True):
    """Of several ranks: without the limits of the report of one."""

    tiers: tuple[StoreTier, ...] = ()


class _MergedReport(TransferReport, frozen=True, kw_only=True):
    """Of several ranks: without the limits of the report of one."""

    epoch: str
    handoffs: tuple[HandoffTransfers, ...] = ()
    links: tuple[LinkTransfers, ...] = ()
    segments: tuple[LinkSegments, ...] = ()
    store: _MergedStore | None = None


_encoder = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(_MergedReport)


class _Kept(NamedTuple):
    """A report from which an earlier one can be subtracted later: packed, it takes a tenth."""

    at: Instant
    segments: tuple[LinkSegments, ...]
    packed: bytes


class ReportHistory:
    """The reports of one incarnation of a worker that a window of `WINDOW_S` needs.

    `latest` is what was reported last: the only one that is kept decoded.
    """

    def __init__(self, report: TransferReport, now: Instant) -> None:
        self._kept: deque[_Kept] = deque()
        self.latest = report
        self.add(report, now)

    def add(self, report: TransferReport, now: Instant) -> None:
        """One more; what an earlier incarnation of the worker reported is forgotten."""
        if self.latest.epoch != report.epoch:
            self._kept.clear()
        self.latest = report
        self._kept.append(_Kept(now, report.segments, _encoder.encode(report)))
        self._find_first(now)

    def find_baseline_at(self, now: Instant) -> Instant:
        """When the report was read that `unpack_baseline` gives: cheaper than that."""
        return self._find_first(now).at

    def unpack_baseline(self, now: Instant) -> TransferReport:
        """The report from the beginning of the window, else the first one there is: some 10 ms."""
        return _unpacker.decode(self._find_first(now).packed)

    def find_earlier_segments(self, now: Instant) -> tuple[LinkSegments, ...]:
        """Those of the baseline."""
        return self._find_first(now).segments

    def _find_first(self, now: Instant) -> _Kept:
        latest_at = self._kept[-1].at
        # While the worker reports, figures stay as they are from one report to the next.
        ends_at = now if now - latest_at > MAX_AGE_S else latest_at
        while len(self._kept) > 1 and self._kept[1].at <= ends_at - WINDOW_S:
            self._kept.popleft()
        return self._kept[0]


class TransferFeed(ReportFeed[TransferReport]):
    """See `ReportFeed`."""

    def __init__(self, workers: Workers, upstream: Upstream, clock: Clock) -> None:
        page = ReportPage(
            TRANSFERS_PATH, INTERVAL_S, MAX_REPORT_BYTES, _decoder.decode, merge_transfers
        )
        super().__init__(workers, upstream, clock, page)
        self.histories: dict[Worker, ReportHistory] = {}

    def find_lost_share(self, sender: Worker, receiver: str) -> float | None:
        """Of the TCP segments from one worker to another in the last `WINDOW_S`.

        None where none was sent, or the sender's kernel counts none.
        """
        history = self.histories.get(sender)
        if history is None:
            return None
        earlier = history.find_earlier_segments(self._clock.now())
        pairs = subtract_segments(history.latest.segments, earlier)
        sent = (recent.sent for _, recent in pairs if recent.peer == receiver)
        return functools.reduce(SegmentCounts.plus, sent, SegmentCounts()).lost_share

    async def note_reports(self) -> None:
        """See `ReportFeed`."""
        now = self._clock.now()
        for worker in self.histories.keys() - self.reports.keys():
            del self.histories[worker]
        for worker, report in tuple(self.reports.items()):
            history = self.histories.get(worker)
            if history is None:
                self.histories[worker] = ReportHistory(report, now)
            elif history.latest is not report:
                history.add(report, now)
            await asyncio.sleep(0)  # to pack a large one takes a millisecond
