"""Reads, now and then, what workers have measured of their links, for the costs of handoffs.

A worker that reports none keeps what it reported before until it is down.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.rank_reports import merge_links
from baton.gateway.report_feed import ReportFeed, ReportPage
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES, Upstream
from baton.ids import WorkerId
from baton.kv.layout import KVLayout
from baton.protocol.worker_http import LINKS_PATH, MeasuredLink, MeasuredLinks, WorkerInfo
from baton.router.handoff_costs import KVShape, LinkCost, WorkerLinks, group_links

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from baton.clock import Clock
    from baton.gateway.workers import Workers
    from baton.router.fleet import WorkerView
    from baton.router.load import FleetLoad

INTERVAL_S: Final = 10.0

_decoder = msgspec.json.Decoder(MeasuredLinks)


class LinkFeed(ReportFeed[MeasuredLinks]):
    """See `ReportFeed`; it teaches `load` what links cost."""

    def __init__(self, workers: Workers, upstream: Upstream, load: FleetLoad, clock: Clock) -> None:
        page = ReportPage(LINKS_PATH, INTERVAL_S, MAX_SMALL_ANSWER_BYTES, _decode, merge_links)
        super().__init__(workers, upstream, clock, page)
        self._load = load
        self._grouped: dict[WorkerId, tuple[MeasuredLinks, WorkerLinks]] = {}
        self._located: dict[WorkerId, tuple[str, str]] = {}

    async def note_reports(self) -> None:
        """See `ReportFeed`. Only new reports are looked into: there are pairs by the thousands."""
        by_model: dict[str, list[WorkerLinks]] = {}
        shapes: dict[str, KVShape] = {}
        views = {
            view.id: view
            for served in self._workers.fleet.models.values()
            for view in (*served.prefills, *served.decodes)
        }
        located = {view.id: (view.model, view.topology) for view in views.values()}
        if located != self._located:  # on which pairs and distances depend
            self._located, self._grouped = located, {}
        for worker, report in self.reports.items():
            info = worker.info
            if info is not None and info.worker in views:
                view = views[info.worker]
                before = self._grouped.get(view.id)
                if before is None or before[0] is not report:
                    pairs = _find_pairs(view, report.links, views)
                    places = self._load.costs(view.model).handoffs.places
                    self._grouped[view.id] = before = report, group_links(pairs, places)
                    await asyncio.sleep(0)
                by_model.setdefault(view.model, []).append(before[1])
                if (shape := read_shape(info)) is not None:
                    shapes[view.model] = shape
        for model, measured in by_model.items():
            self._load.costs(model).handoffs.note_links(measured, shapes.get(model))


def _decode(body: bytes) -> MeasuredLinks | None:
    report = _decoder.decode(body)
    return report if report.links else None


def _find_pairs(
    view: WorkerView, links: Iterable[MeasuredLink], views: Mapping[WorkerId, WorkerView]
) -> Iterator[tuple[WorkerView, WorkerView, LinkCost]]:
    for link in links:
        peer = views.get(WorkerId(link.peer))
        if peer is not None and peer.model == view.model and peer.id != view.id:
            pair = (view, peer) if link.direction == "push" else (peer, view)
            cost = LinkCost(
                link.latency_s, link.byte_s, link.transport, link.encoding, link.kv_byte_s
            )
            yield *pair, cost


def read_shape(info: WorkerInfo) -> KVShape | None:
    """What a token's KV takes at that worker (of vLLM: at a rank); None if it does not decode."""
    try:
        layout = msgspec.convert(info.layout, KVLayout)
    except UNDECODABLE:
        return None
    return KVShape(layout.bytes_per_token, layout.num_layers)
