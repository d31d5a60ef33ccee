"""One report of a server of what its tensor-parallel ranks report. Pure.

    rank 0 of prefill ───► rank 0 of decode ┐
    rank 1 of prefill ───► rank 1 of decode ┘ one link from prefill to decode, of two rank pairs

KV moves between pairs of ranks. Each pair is measured, and compared with its reference, by itself:
the figures of a link are sums over its pairs, and it has drifted as soon as one of them has.
A handoff is the work of all ranks at the same time: it is counted once, its bytes are those of all
ranks, and its histograms have a value of each.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Final

import msgspec

from baton.gateway.transfer_sums import add_handoffs, add_links
from baton.protocol.worker_http import MeasuredLink, MeasuredLinks
from baton.telemetry.transfer_report import SegmentCounts, StoreReport

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from baton.telemetry.transfer_report import (
        HandoffTransfers,
        LinkDrift,
        LinkSegments,
        LinkTransfers,
        StoreTier,
        TransferReport,
    )

RANK: Final = re.compile(r"/\d+\Z")
"""The end of the name by which peers know a rank of several (`auth.ticket.rank_name`)."""
TYPICAL_BYTES: Final = 4 << 20
"""Of the transfer by which the slowest pair of a link is chosen."""
SOLE_PAIR: Final = "0 to 0"
"""Between two workers of one rank each: it needs no name."""
_SEVERITY: Final = {"learning": 0, "steady": 1, "drifted": 2}


def worker_of(peer: str, names: Collection[str]) -> str:
    """The worker of a peer's name: that of a rank ends with its number. `names`: all workers'."""
    return peer if peer in names else RANK.sub("", peer)


def merge_transfers(
    reports: Mapping[int, TransferReport], names: Collection[str]
) -> TransferReport:
    """One report of a worker, with workers as peers, of the reports of its ranks.

    Its epoch names the incarnations of all ranks that have reported: the difference of two merged
    reports is known as long as that stays the same.

    Raises:
        StopIteration: there is none.
    """
    handoffs: dict[tuple[str, ...], list[HandoffTransfers]] = {}
    links: dict[tuple[str, ...], list[tuple[str, LinkTransfers]]] = {}
    segments: dict[tuple[str, ...], list[LinkSegments]] = {}
    for rank, report in reports.items():
        for each in report.handoffs:
            peer = worker_of(each.peer, names)
            key = peer, each.distance, each.transport, each.mode, each.operation
            handoffs.setdefault(key, []).append(each)
        for link in report.links:
            peer = worker_of(link.peer, names)
            links_key = peer, link.distance, link.transport, link.operation
            links.setdefault(links_key, []).append((_name_pair(rank, link, peer), link))
        for sent in report.segments:
            peer = worker_of(sent.peer, names)
            segments.setdefault((peer, sent.transport), []).append(sent)
    of_ranks = reports.values()
    return msgspec.structs.replace(
        next(iter(of_ranks)),
        epoch=" ".join(report.epoch for report in of_ranks),
        handoffs=tuple(_merge_handoffs(key[0], parts) for key, parts in handoffs.items()),
        links=tuple(_merge_rank_pairs(key[0], pairs) for key, pairs in links.items()),
        segments=tuple(_add_segments(key[0], parts) for key, parts in segments.items()),
        num_forgotten=sum(report.num_forgotten for report in of_ranks),
        num_digest_failures=sum(report.num_digest_failures for report in of_ranks),
        # Each rank holds its part of a prompt under a lease.
        num_lapsed_leases=max(report.num_lapsed_leases for report in of_ranks),
        store=_merge_stores([each.store for each in of_ranks if each.store is not None]),
    )


def merge_links(reports: Mapping[int, MeasuredLinks], names: Collection[str]) -> MeasuredLinks:
    """One report of a worker: of each link the slowest pair of ranks, for which a handoff waits."""
    slowest: dict[tuple[str, str], MeasuredLink] = {}
    for report in reports.values():
        for link in report.links:
            key = worker_of(link.peer, names), link.direction
            known = slowest.get(key)
            if known is None or _typical_s(link) > _typical_s(known):
                slowest[key] = msgspec.structs.replace(link, peer=key[0])
    return MeasuredLinks(tuple(slowest.values()))


def _typical_s(link: MeasuredLink) -> float:
    return link.latency_s + TYPICAL_BYTES * link.byte_s


def _name_pair(rank: int, link: LinkTransfers, peer: str) -> str:
    """The sender's and the receiver's rank."""
    other = link.peer.removeprefix(peer).removeprefix("/") or "0"
    return f"{rank} to {other}" if link.operation == "WRITE" else f"{other} to {rank}"


def _merge_handoffs(peer: str, parts: list[HandoffTransfers]) -> HandoffTransfers:
    """Of ranks that take part in the same handoffs: counts and times are not those of all added."""
    if len(parts) == 1:
        return msgspec.structs.replace(parts[0], peer=peer)
    mismatches = [part.last_mismatch for part in parts if part.last_mismatch is not None]
    return msgspec.structs.replace(
        add_handoffs(parts),
        peer=peer,
        num=max(part.num for part in parts),
        seconds=max(part.seconds for part in parts),
        exposed_s=max(part.exposed_s for part in parts),
        num_mismatches=max(part.num_mismatches for part in parts),
        last_mismatch=min(mismatches, key=lambda each: each.s_ago, default=None),
    )


def _merge_rank_pairs(peer: str, pairs: list[tuple[str, LinkTransfers]]) -> LinkTransfers:
    added = pairs[0][1] if len(pairs) == 1 else add_links([link for _, link in pairs])
    drifts = [(ranks, link.drift) for ranks, link in pairs if link.drift is not None]
    worst = max(drifts, key=lambda each: _rank_drift(each[1]), default=None)
    if worst is None or (len(pairs) == 1 and worst[0] == SOLE_PAIR):
        return msgspec.structs.replace(added, peer=peer, num_rank_pairs=len(pairs))
    drift = msgspec.structs.replace(worst[1], ranks=worst[0])
    return msgspec.structs.replace(added, peer=peer, num_rank_pairs=len(pairs), drift=drift)


def _add_segments(peer: str, parts: list[LinkSegments]) -> LinkSegments:
    sent = functools.reduce(SegmentCounts.plus, (part.sent for part in parts))
    return msgspec.structs.replace(parts[0], peer=peer, sent=sent)


def _merge_stores(reports: list[StoreReport]) -> StoreReport | None:
    """Of ranks that look for the same prompts; each has entries of its own in the same tiers."""
    if not reports:
        return None
    tiers: dict[str, list[StoreTier]] = {}
    for tier in itertools.chain.from_iterable(report.tiers for report in reports):
        tiers.setdefault(tier.tier, []).append(tier)
    return StoreReport(
        tiers=tuple(_merge_tiers(parts) for parts in tiers.values()),
        num_prompts_found=max(report.num_prompts_found for report in reports),
        num_prompts_missing=max(report.num_prompts_missing for report in reports),
    )


def _merge_tiers(parts: list[StoreTier]) -> StoreTier:
    fullest = max(parts, key=lambda part: part.used_bytes)
    return msgspec.structs.replace(
        fullest,
        num_hits=sum(part.num_hits for part in parts),
        num_misses=sum(part.num_misses for part in parts),
        read_bytes=sum(part.read_bytes for part in parts),
        written_bytes=sum(part.written_bytes for part in parts),
        is_available=all(part.is_available for part in parts),
    )


def _rank_drift(drift: LinkDrift) -> tuple[int, float]:
    return _SEVERITY[drift.state], drift.ratio or 0.0
