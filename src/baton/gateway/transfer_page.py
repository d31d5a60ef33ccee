"""`/debug/transfers`: what handoffs and links took, by pair and by distance; the store.

Quantiles are of the workers' log histograms: within 1 %.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from baton.gateway.store_page import FleetStore, WorkerStore, add_stores
from baton.gateway.transfer_feed import WINDOW_S, ReportHistory, TransferFeed
from baton.gateway.transfer_sums import (
    add_handoffs,
    add_links,
    subtract_handoffs,
    subtract_links,
    subtract_segments,
)
from baton.telemetry.log_histogram import BucketCounts
from baton.telemetry.transfer_report import (
    HandoffTransfers,
    LinkDrift,
    LinkSegments,
    LinkTransfers,
    SegmentCounts,
    TransferReport,
    TransportMismatch,
)
from baton.telemetry.transfers import MIB

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.gateway.workers import Worker

MOST_LISTED: Final = 1000
"""Of pairs, those with the most bytes in the last minute, then since the start."""


class Quantiles(msgspec.Struct, frozen=True):
    """Null where there is no value. Of `bytes_per_s`, 99 % have at least `p99`."""

    p50: float | None
    p99: float | None


class HandoffFigures(msgspec.Struct, frozen=True):
    """Handoffs whose KV landed. `exposed_s` is a sum: the time that they added to prefill.

    `transfer_s`: first layer computed to last one landed. `s_per_mib` and `bytes_per_s` are that
    time and the bytes. `exposed_share`: the part of that time after prefill's end.
    """

    num: int
    num_bytes: int
    exposed_s: float
    transfer_s: Quantiles
    s_per_mib: Quantiles
    bytes_per_s: Quantiles
    exposed_share: Quantiles


class LinkFigures(msgspec.Struct, frozen=True):
    """Periods in which a link was in use; sums of what was predicted and observed.

    `observed_ratio`: time observed over time predicted, where the link was measured.
    """

    num: int
    num_bytes: int
    predicted_s: float
    observed_s: float
    transfer_s: Quantiles
    s_per_mib: Quantiles
    bytes_per_s: Quantiles
    observed_ratio: Quantiles


class PairHandoffs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one prefill and one decode worker. `total` is since the decode worker's start.

    `recent`: of the last `window_s`.
    """

    prefill: str
    decode: str
    distance: str
    transport: str
    mode: str
    operation: str
    total: HandoffFigures
    recent: HandoffFigures
    num_mismatches: int
    last_mismatch: TransportMismatch | None


class PairLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What `worker` wrote to `peer` (WRITE), or read from it (READ).

    Between `num_rank_pairs` pairs of their ranks; `drift` is that of the worst.
    """

    worker: str
    peer: str
    distance: str
    transport: str
    operation: str
    total: LinkFigures
    recent: LinkFigures
    drift: LinkDrift | None
    num_rank_pairs: int


class SegmentFigures(msgspec.Struct, frozen=True):
    """See `SegmentCounts`. `lost_share`: retransmitted less duplicates, of all; null if none."""

    num: int
    num_bytes: int
    num_retransmitted: int
    num_duplicates: int
    lost_share: float | None


class PairSegments(msgspec.Struct, frozen=True, kw_only=True):
    """TCP segments that `sender` sent to `receiver`; entries only where the kernel counts them."""

    sender: str
    receiver: str
    distance: str
    transport: str
    total: SegmentFigures
    recent: SegmentFigures


class Histograms(msgspec.Struct, frozen=True):
    """Buckets as in `telemetry/log_histogram.py`: numbers of buckets, then their counts."""

    transfer_s: BucketCounts
    s_per_mib: BucketCounts


class DistanceHandoffs(msgspec.Struct, frozen=True, kw_only=True):
    """Of all pairs at one distance over one transport, whatever the mode and operation."""

    distance: str
    transport: str
    num_pairs: int
    total: HandoffFigures
    recent: HandoffFigures
    total_histograms: Histograms
    recent_histograms: Histograms


class DistanceLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Of all links at one distance over one transport, in one operation."""

    distance: str
    transport: str
    operation: str
    num_links: int
    total: LinkFigures
    recent: LinkFigures
    total_histograms: Histograms
    recent_histograms: Histograms


class TransferPageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/debug/transfers`.

    `num_left_out`: pairs beyond `MOST_LISTED` of each kind; they count in the distances.
    """

    window_s: float
    handoffs: tuple[PairHandoffs, ...]
    links: tuple[PairLinks, ...]
    segments: tuple[PairSegments, ...]
    handoffs_by_distance: tuple[DistanceHandoffs, ...]
    links_by_distance: tuple[DistanceLinks, ...]
    store: FleetStore
    num_workers: int
    num_left_out: int


class _OfWorker:
    """What one worker's reports come to, until it reports again or the window moves."""

    def __init__(self, name: str, latest: TransferReport, baseline: TransferReport) -> None:
        self.name, self.latest, self.baseline = name, latest, baseline
        self.handoffs = subtract_handoffs(latest, baseline)
        self.links = subtract_links(latest, baseline)
        self.segments = subtract_segments(latest, baseline)
        self.store = WorkerStore(name, latest, baseline)


class TransferPage:
    """Shows what the feed has read; computed when somebody asks. Owner: the event loop's thread."""

    def __init__(self, feed: TransferFeed, clock: Clock) -> None:
        self._feed, self._clock = feed, clock
        self._workers: dict[Worker, _OfWorker] = {}

    def show(self) -> TransferPageReply:
        """All workers that have reported and are up."""
        workers = self._look()
        handoffs = [
            _pair_handoffs(each.name, total, recent)
            for each in workers
            for total, recent in each.handoffs
        ]
        links = [
            _pair_links(each.name, total, recent)
            for each in workers
            for total, recent in each.links
        ]
        segments = [
            _pair_segments(each.name, total, recent)
            for each in workers
            for total, recent in each.segments
        ]
        listed: tuple[list[PairHandoffs], list[PairLinks], list[PairSegments]]
        listed = handoffs, links, segments
        for pairs in listed:
            pairs.sort(key=_weight, reverse=True)
        return TransferPageReply(
            window_s=WINDOW_S,
            handoffs=tuple(handoffs[:MOST_LISTED]),
            links=tuple(links[:MOST_LISTED]),
            segments=tuple(segments[:MOST_LISTED]),
            handoffs_by_distance=_handoffs_by_distance(workers),
            links_by_distance=_links_by_distance(workers),
            store=add_stores([each.store for each in workers]),
            num_workers=len(workers),
            num_left_out=sum(max(0, len(pairs) - MOST_LISTED) for pairs in listed),
        )

    def _look(self) -> list[_OfWorker]:
        before, self._workers = self._workers, {}
        for worker, history in self._feed.histories.items():
            if worker.info is not None:
                self._workers[worker] = self._of(worker.info.worker, history, before.get(worker))
        return list(self._workers.values())

    def _of(self, name: str, history: ReportHistory, known: _OfWorker | None) -> _OfWorker:
        baseline = history.find_baseline(self._clock.now())
        if known is not None and known.latest is history.latest and known.baseline is baseline:
            return known
        return _OfWorker(name, history.latest, baseline)


def _weight(pair: PairHandoffs | PairLinks | PairSegments) -> tuple[int, int]:
    return pair.recent.num_bytes, pair.total.num_bytes


def _pair_handoffs(decode: str, total: HandoffTransfers, recent: HandoffTransfers) -> PairHandoffs:
    return PairHandoffs(
        prefill=total.peer,
        decode=decode,
        distance=total.distance,
        transport=total.transport,
        mode=total.mode,
        operation=total.operation,
        total=_handoff_figures(total),
        recent=_handoff_figures(recent),
        num_mismatches=total.num_mismatches,
        last_mismatch=total.last_mismatch,
    )


def _pair_links(worker: str, total: LinkTransfers, recent: LinkTransfers) -> PairLinks:
    return PairLinks(
        worker=worker,
        peer=total.peer,
        distance=total.distance,
        transport=total.transport,
        operation=total.operation,
        total=_link_figures(total),
        recent=_link_figures(recent),
        drift=total.drift,
        num_rank_pairs=total.num_rank_pairs,
    )


def _pair_segments(sender: str, total: LinkSegments, recent: LinkSegments) -> PairSegments:
    return PairSegments(
        sender=sender,
        receiver=total.peer,
        distance=total.distance,
        transport=total.transport,
        total=_segment_figures(total.sent),
        recent=_segment_figures(recent.sent),
    )


def _segment_figures(counts: SegmentCounts) -> SegmentFigures:
    return SegmentFigures(
        counts.num,
        counts.num_bytes,
        counts.num_retransmitted,
        counts.num_duplicates,
        counts.lost_share,
    )


def _handoffs_by_distance(workers: list[_OfWorker]) -> tuple[DistanceHandoffs, ...]:
    alike: dict[tuple[str, str], list[tuple[HandoffTransfers, HandoffTransfers]]] = {}
    for each in chain.from_iterable(worker.handoffs for worker in workers):
        alike.setdefault((each[0].distance, each[0].transport), []).append(each)
    found = []
    for (distance, transport), pairs in sorted(alike.items()):
        total = add_handoffs([pair[0] for pair in pairs])
        recent = add_handoffs([pair[1] for pair in pairs])
        found.append(
            DistanceHandoffs(
                distance=distance,
                transport=transport,
                num_pairs=len(pairs),
                total=_handoff_figures(total),
                recent=_handoff_figures(recent),
                total_histograms=Histograms(total.transfer_s, total.s_per_mib),
                recent_histograms=Histograms(recent.transfer_s, recent.s_per_mib),
            )
        )
    return tuple(found)


def _links_by_distance(workers: list[_OfWorker]) -> tuple[DistanceLinks, ...]:
    alike: dict[tuple[str, str, str], list[tuple[LinkTransfers, LinkTransfers]]] = {}
    for each in chain.from_iterable(worker.links for worker in workers):
        key = each[0].distance, each[0].transport, each[0].operation
        alike.setdefault(key, []).append(each)
    found = []
    for (distance, transport, operation), links in sorted(alike.items()):
        total = add_links([link[0] for link in links])
        recent = add_links([link[1] for link in links])
        found.append(
            DistanceLinks(
                distance=distance,
                transport=transport,
                operation=operation,
                num_links=len(links),
                total=_link_figures(total),
                recent=_link_figures(recent),
                total_histograms=Histograms(total.transfer_s, total.s_per_mib),
                recent_histograms=Histograms(recent.transfer_s, recent.s_per_mib),
            )
        )
    return tuple(found)


def _handoff_figures(sums: HandoffTransfers) -> HandoffFigures:
    per_mib = _quantiles(sums.s_per_mib)
    return HandoffFigures(
        sums.num,
        sums.num_bytes,
        sums.exposed_s,
        _quantiles(sums.transfer_s),
        per_mib,
        _bandwidths(per_mib),
        _quantiles(sums.exposed_share),
    )


def _link_figures(sums: LinkTransfers) -> LinkFigures:
    per_mib = _quantiles(sums.s_per_mib)
    return LinkFigures(
        sums.num,
        sums.num_bytes,
        sums.predicted_s,
        sums.observed_s,
        _quantiles(sums.transfer_s),
        per_mib,
        _bandwidths(per_mib),
        _quantiles(sums.observed_ratio),
    )


def _quantiles(counts: BucketCounts) -> Quantiles:
    return Quantiles(counts.quantile(0.5), counts.quantile(0.99))


def _bandwidths(s_per_mib: Quantiles) -> Quantiles:
    return Quantiles(
        MIB / s_per_mib.p50 if s_per_mib.p50 else None,
        MIB / s_per_mib.p99 if s_per_mib.p99 else None,
    )
