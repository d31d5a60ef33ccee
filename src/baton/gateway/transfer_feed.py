"""Reads what workers have measured of KV transfers, and keeps the reports of the last minute."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from baton.gateway.rank_reports import merge_transfers
from baton.gateway.report_feed import ReportFeed, ReportPage
from baton.gateway.transfer_sums import subtract_segments
from baton.protocol.worker_http import TRANSFERS_PATH
from baton.telemetry.transfer_report import MAX_REPORT_BYTES, SegmentCounts, TransferReport

if TYPE_CHECKING:
    from baton.clock import Clock, Instant
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker, Workers

INTERVAL_S: Final = 5.0
WINDOW_S: Final = 60.0

_decoder = msgspec.json.Decoder(TransferReport)


class ReportHistory:
    """The reports of one life of a worker that a window of `WINDOW_S` needs."""

    def __init__(self) -> None:
        self._reports: deque[tuple[Instant, TransferReport]] = deque()

    @property
    def latest(self) -> TransferReport:
        """What was reported last."""
        return self._reports[-1][1]

    def add(self, report: TransferReport, now: Instant) -> None:
        """One more; what an earlier life of the worker reported is forgotten."""
        if self._reports and self.latest.epoch != report.epoch:
            self._reports.clear()
        self._reports.append((now, report))

    def find_baseline(self, now: Instant) -> TransferReport:
        """The report from the beginning of the window, else the first one there is."""
        while len(self._reports) > 1 and self._reports[1][0] <= now - WINDOW_S:
            self._reports.popleft()
        return self._reports[0][1]


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
        pairs = subtract_segments(history.latest, history.find_baseline(self._clock.now()))
        sent = (recent.sent for _, recent in pairs if recent.peer == receiver)
        return functools.reduce(SegmentCounts.plus, sent, SegmentCounts()).lost_share

    def note_reports(self) -> None:
        """See `ReportFeed`."""
        now = self._clock.now()
        for worker in self.histories.keys() - self.reports.keys():
            del self.histories[worker]
        for worker, report in self.reports.items():
            history = self.histories.get(worker)
            if history is None:
                history = self.histories[worker] = ReportHistory()
            elif history.latest is report:
                continue
            history.add(report, now)
            history.find_baseline(now)
