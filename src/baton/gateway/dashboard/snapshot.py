"""Makes the stream's events from what the gateway's other pages show."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.gateway.dashboard.events import (
    DistanceShown,
    DriftShown,
    History,
    Links,
    LossShown,
    ModelShown,
    PairShown,
    Point,
    RecentRequest,
    Tick,
    TokenCost,
    TransfersShown,
)
from baton.gateway.workers import Up
from baton.protocol.worker_http import Role, WorkerInfo
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.gateway.alerts.monitor import AlertMonitor
    from baton.gateway.dashboard.series import Series
    from baton.gateway.debug import LinkList, WorkerList
    from baton.gateway.queue_page import QueuePage
    from baton.gateway.request_context import Services
    from baton.gateway.request_history import RequestHistory, RequestRecord
    from baton.gateway.transfer_page import PairHandoffs, TransferPage, TransferPageReply

MOST_WORKERS: Final = 512
MOST_REQUESTS: Final = 50
MAX_TEXT_CHARS: Final = 200
COST_POINTS: Final = 60
"""One a second."""
HOUR_S: Final = 3600.0
THOUSAND: Final = 1000.0


@dataclass(frozen=True, slots=True)
class SnapshotPages:
    """The pages of which a snapshot is made."""

    workers: WorkerList
    queue: QueuePage
    links: LinkList
    transfers: TransferPage
    alerts: AlertMonitor


class SnapshotBuilder:
    """What a viewer is sent. Owner: the event loop's thread."""

    def __init__(
        self, pages: SnapshotPages, services: Services, records: RequestHistory, series: Series
    ) -> None:
        self._pages, self._records, self._series = pages, records, series
        self._workers, self._load = services.workers, services.load
        self._options, self._clock = services.options, services.clock

    def history(self) -> History:
        """The latest minutes."""
        return History(Point.__struct_fields__, tuple(self._series.points))

    def tick(self, point: Point) -> Tick:
        """All that changes quickly; `point` is the latest one."""
        workers = self._pages.workers.show(MOST_WORKERS)
        return Tick(
            version=__version__,
            point=point,
            workers=workers,
            num_hidden=len(self._workers.all) - len(workers.workers),
            queue=self._pages.queue.show(MOST_WORKERS),
            models=tuple(self._models()),
            targets=self._series.targets(),
            requests=tuple(map(_show, islice(self._records.latest_first(), MOST_REQUESTS))),
            cost=self._cost(),
            alerts=self._pages.alerts.show(),
        )

    async def links(self) -> Links:
        """What handoffs cost."""
        transfers = await self._pages.transfers.show()
        return Links(self._pages.links.show(), _show_transfers(transfers))

    def _models(self) -> Iterator[ModelShown]:
        for model in sorted(self._workers.fleet.models):
            yield ModelShown(model, round(self._load.costs(model).found_share, 4))

    def _cost(self) -> TokenCost | None:
        """Of the last minute: workers that do both parts cost each part by its share of time."""
        prices = self._options.prices
        if prices is None:
            return None
        prefill = decode = 0.0
        for worker in self._workers.all:
            match worker.address.role:
                case _ if not isinstance(worker.state, Up):
                    pass
                case Role.PREFILL:
                    prefill += prices.prefill
                case Role.DECODE:
                    decode += prices.decode
                case Role.BOTH:
                    share = self._prefill_share(worker.state.info)
                    prefill += prices.both * share
                    decode += prices.both * (1 - share)
        return self._divide_cost(prefill, decode)

    def _prefill_share(self, info: WorkerInfo) -> float:
        activity = self._load.find(info.worker, info.served_model_name)
        return 0.5 if activity is None else activity.prefill_share(self._clock.now())

    def _divide_cost(self, prefill: float, decode: float) -> TokenCost:
        points = list(self._series.points)[-COST_POINTS:]
        inputs = sum(each.computed_tokens + each.cached_tokens for each in points)
        outputs = sum(each.answer_tokens for each in points)
        each_s = len(points) / HOUR_S * THOUSAND
        return TokenCost(
            prefill + decode,
            prefill * each_s / inputs if inputs else None,
            decode * each_s / outputs if outputs else None,
        )


def _show(record: RequestRecord) -> RecentRequest:
    trace = record.trace
    stamps = trace.stamps
    received = stamps.get(Stamp.RECEIVED, 0.0)
    first, last = stamps.get(Stamp.FIRST_TOKEN), stamps.get(Stamp.FINISHED)
    return RecentRequest(
        trace.request_id,
        record.status,
        trace.mode,
        None if trace.outcome is None else trace.outcome[:MAX_TEXT_CHARS],
        trace.peer,
        round(trace.waited_s, 6),
        None if first is None else round(first - received, 6),
        None if last is None else round(last - received, 6),
    )


def _show_transfers(page: TransferPageReply) -> TransfersShown:
    return TransfersShown(
        window_s=page.window_s,
        pairs=tuple(map(_show_pair, page.handoffs)),
        distances=tuple(
            DistanceShown(
                each.distance,
                each.transport,
                each.num_pairs,
                each.recent.num,
                each.recent.num_bytes,
                each.recent.transfer_s.p50,
                each.recent.transfer_s.p99,
                each.recent.bytes_per_s.p50,
                each.recent.exposed_share.p50,
            )
            for each in page.handoffs_by_distance
        ),
        drifts=tuple(
            DriftShown(
                each.worker,
                each.peer,
                each.transport,
                each.operation,
                each.drift.state,
                each.drift.ratio,
            )
            for each in page.links
            if each.drift is not None and each.drift.ratio is not None
        ),
        losses=tuple(
            LossShown(each.sender, each.receiver, each.transport, each.recent.num, share)
            for each in page.segments
            if (share := each.recent.lost_share) is not None
        ),
        store=page.store,
        num_left_out=page.num_left_out,
    )


def _show_pair(pair: PairHandoffs) -> PairShown:
    return PairShown(
        pair.prefill,
        pair.decode,
        pair.distance,
        pair.transport,
        pair.mode,
        pair.operation,
        pair.recent.num,
        pair.recent.num_bytes,
        pair.recent.transfer_s.p50,
        pair.recent.s_per_mib.p50,
        pair.recent.exposed_share.p50,
        pair.num_mismatches,
        None if pair.last_mismatch is None else pair.last_mismatch.expected,
    )
