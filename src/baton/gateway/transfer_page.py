"""`/debug/transfers`: what handoffs and links took, by pair and by distance; the store.

Quantiles are of the workers' log histograms: within 1 %.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

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
    from collections.abc import Callable, Iterable

    from baton.clock import Clock, Instant
    from baton.gateway.workers import Worker

MOST_LISTED: Final = 1000
"""Of pairs, those with the most bytes in the last minute, then since the start."""
SHOWN_AT_ONCE: Final = 32
"""Pairs, before other tasks run: some milliseconds."""

Sums = TypeVar("Sums", HandoffTransfers, LinkTransfers, LinkSegments)
Shown = TypeVar("Shown")
_HandoffSums: TypeAlias = tuple[int, HandoffTransfers, HandoffTransfers]
_LinkSums: TypeAlias = tuple[int, LinkTransfers, LinkTransfers]


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


@dataclass(frozen=True, slots=True)
class _OfWorker:
    """What one worker's reports come to, until it reports again or the window moves.

    Pairs have the worker's name, their total and what is recent. `handoffs_by` has sums by distance
    and transport, `links_by` also by operation: of how many pairs, in total, recent.
    """

    latest: TransferReport
    baseline_at: Instant
    handoffs: list[tuple[str, HandoffTransfers, HandoffTransfers]]
    links: list[tuple[str, LinkTransfers, LinkTransfers]]
    segments: list[tuple[str, LinkSegments, LinkSegments]]
    store: WorkerStore
    handoffs_by: dict[tuple[str, str], _HandoffSums]
    links_by: dict[tuple[str, str, str], _LinkSums]


async def _examine(name: str, history: ReportHistory, now: Instant) -> _OfWorker:
    """Each step takes some 10 ms with 50 peers: other tasks run in between."""
    latest, baseline_at = history.latest, history.find_baseline_at(now)
    baseline = history.unpack_baseline(now)
    await asyncio.sleep(0)
    handoffs = [(name, *each) for each in subtract_handoffs(latest, baseline)]
    handoffs_by = _sum_handoffs((1, *each[1:]) for each in handoffs)
    await asyncio.sleep(0)
    links = [(name, *each) for each in subtract_links(latest, baseline)]
    links_by = _sum_links((1, *each[1:]) for each in links)
    await asyncio.sleep(0)
    segments = subtract_segments(latest.segments, baseline.segments)
    return _OfWorker(
        latest,
        baseline_at,
        handoffs,
        links,
        [(name, *each) for each in segments],
        WorkerStore(name, latest, baseline),
        handoffs_by,
        links_by,
    )


class TransferPage:
    """Shows what the feed has read; computed when somebody asks. Owner: the event loop's thread."""

    def __init__(self, feed: TransferFeed, clock: Clock) -> None:
        self._feed, self._clock = feed, clock
        self._workers: dict[Worker, _OfWorker] = {}
        self._one_at_a_time = asyncio.Lock()

    async def show(self) -> TransferPageReply:
        """All workers that have reported and are up.

        For the pairs of 50 prefill and 50 decode workers it takes seconds: other tasks run in
        between.
        """
        async with self._one_at_a_time:  # what one has computed the next one finds
            workers = await self._look()
            handoffs = [each for worker in workers for each in worker.handoffs]
            links = [each for worker in workers for each in worker.links]
            segments = [each for worker in workers for each in worker.segments]
            nums = len(handoffs), len(links), len(segments)
            handoffs_by_distance = _handoffs_by_distance(workers)
            await asyncio.sleep(0)
            return TransferPageReply(
                window_s=WINDOW_S,
                handoffs_by_distance=handoffs_by_distance,
                links_by_distance=_links_by_distance(workers),
                handoffs=await _list_busiest(handoffs, _pair_handoffs),
                links=await _list_busiest(links, _pair_links),
                segments=await _list_busiest(segments, _pair_segments),
                store=add_stores([each.store for each in workers]),
                num_workers=len(workers),
                num_left_out=sum(max(0, num - MOST_LISTED) for num in nums),
            )

    async def _look(self) -> list[_OfWorker]:
        found: dict[Worker, _OfWorker] = {}
        for worker, history in tuple(self._feed.histories.items()):
            if worker.info is None:
                continue
            now, known = self._clock.now(), self._workers.get(worker)
            if (
                known is None
                or known.latest is not history.latest
                or known.baseline_at != history.find_baseline_at(now)
            ):
                known = await _examine(worker.info.worker, history, now)
            found[worker] = known
        self._workers = found
        return list(found.values())


async def _list_busiest(
    pairs: list[tuple[str, Sums, Sums]], show: Callable[[str, Sums, Sums], Shown]
) -> tuple[Shown, ...]:
    """Figures of those that are listed alone: quantiles take longer than all else."""
    shown = []
    for number, pair in enumerate(nlargest(MOST_LISTED, pairs, key=_weight)):
        if number % SHOWN_AT_ONCE == 0:
            await asyncio.sleep(0)
        shown.append(show(*pair))
    return tuple(shown)


def _weight(pair: tuple[str, Sums, Sums]) -> tuple[int, int]:
    return _num_bytes(pair[2]), _num_bytes(pair[1])


def _num_bytes(sums: HandoffTransfers | LinkTransfers | LinkSegments) -> int:
    return sums.sent.num_bytes if isinstance(sums, LinkSegments) else sums.num_bytes


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


def _sum_handoffs(parts: Iterable[_HandoffSums]) -> dict[tuple[str, str], _HandoffSums]:
    alike: dict[tuple[str, str], list[_HandoffSums]] = {}
    for part in parts:
        alike.setdefault((part[1].distance, part[1].transport), []).append(part)
    return {
        key: (
            sum(each[0] for each in found),
            add_handoffs([each[1] for each in found]),
            add_handoffs([each[2] for each in found]),
        )
        for key, found in alike.items()
    }


def _sum_links(parts: Iterable[_LinkSums]) -> dict[tuple[str, str, str], _LinkSums]:
    alike: dict[tuple[str, str, str], list[_LinkSums]] = {}
    for part in parts:
        key = part[1].distance, part[1].transport, part[1].operation
        alike.setdefault(key, []).append(part)
    return {
        key: (
            sum(each[0] for each in found),
            add_links([each[1] for each in found]),
            add_links([each[2] for each in found]),
        )
        for key, found in alike.items()
    }


def _handoffs_by_distance(workers: list[_OfWorker]) -> tuple[DistanceHandoffs, ...]:
    sums = _sum_handoffs(each for worker in workers for each in worker.handoffs_by.values())
    return tuple(
        DistanceHandoffs(
            distance=distance,
            transport=transport,
            num_pairs=num,
            total=_handoff_figures(total),
            recent=_handoff_figures(recent),
            total_histograms=Histograms(total.transfer_s, total.s_per_mib),
            recent_histograms=Histograms(recent.transfer_s, recent.s_per_mib),
        )
        for (distance, transport), (num, total, recent) in sorted(sums.items())
    )


def _links_by_distance(workers: list[_OfWorker]) -> tuple[DistanceLinks, ...]:
    sums = _sum_links(each for worker in workers for each in worker.links_by.values())
    return tuple(
        DistanceLinks(
            distance=distance,
            transport=transport,
            operation=operation,
            num_links=num,
            total=_link_figures(total),
            recent=_link_figures(recent),
            total_histograms=Histograms(total.transfer_s, total.s_per_mib),
            recent_histograms=Histograms(recent.transfer_s, recent.s_per_mib),
        )
        for (distance, transport, operation), (num, total, recent) in sorted(sums.items())
    )


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
