"""The store's tiers as workers report them: of each worker, and of all workers by tier.

Part of `/debug/transfers`. Figures are a worker's own; `used_bytes` and `capacity_bytes` are those
of the place where the entries are, which several workers may share (a folder, a server), so that
they are never added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.telemetry.transfer_report import StoreTier, TransferReport


class TierFigures(msgspec.Struct, frozen=True):
    """Entries asked for and found, or not; bytes of entries read and written.

    `hit_share`: of those asked for, 0 to 1; None where none was.
    """

    num_hits: int
    num_misses: int
    hit_share: float | None
    read_bytes: int
    written_bytes: int


class WorkerTier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one worker's store. `total` is since its start, `recent` of the last minute.

    `capacity_bytes` is 0 where nothing is known to limit the tier.
    """

    worker: str
    tier: str
    used_bytes: int
    capacity_bytes: int
    is_available: bool
    total: TierFigures
    recent: TierFigures


class FleetTier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of all workers that have it: sums, but for the bytes that it holds.

    `used_bytes` and `capacity_bytes` are those of `fullest`, the worker whose tier is the fullest.
    """

    tier: str
    num_workers: int
    num_unavailable: int
    fullest: str
    used_bytes: int
    capacity_bytes: int
    total: TierFigures
    recent: TierFigures


def subtract_tiers(
    worker: str, latest: TransferReport, baseline: TransferReport
) -> list[WorkerTier]:
    """One worker's tiers, and what they did since the baseline, a report of the same life."""
    before = {each.tier: each for each in baseline.tiers}
    return [
        WorkerTier(
            worker=worker,
            tier=each.tier,
            used_bytes=each.used_bytes,
            capacity_bytes=each.capacity_bytes,
            is_available=each.is_available,
            total=_count(each, None),
            recent=_count(each, before.get(each.tier)),
        )
        for each in latest.tiers
    ]


def add_tiers(tiers: Iterable[WorkerTier]) -> tuple[FleetTier, ...]:
    """By tier, in the order in which workers list them."""
    alike: dict[str, list[WorkerTier]] = {}
    for each in tiers:
        alike.setdefault(each.tier, []).append(each)
    return tuple(_merge(each) for each in alike.values())


def _merge(tiers: Sequence[WorkerTier]) -> FleetTier:
    fullest = max(tiers, key=_fullness)
    return FleetTier(
        tier=fullest.tier,
        num_workers=len(tiers),
        num_unavailable=sum(not each.is_available for each in tiers),
        fullest=fullest.worker,
        used_bytes=fullest.used_bytes,
        capacity_bytes=fullest.capacity_bytes,
        total=_add([each.total for each in tiers]),
        recent=_add([each.recent for each in tiers]),
    )


def _fullness(tier: WorkerTier) -> tuple[float, int]:
    share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
    return share, tier.used_bytes


def _count(tier: StoreTier, before: StoreTier | None) -> TierFigures:
    """What was counted since `before`; None: since the worker's start."""
    if before is None:
        return _figures(tier.num_hits, tier.num_misses, tier.read_bytes, tier.written_bytes)
    return _figures(
        tier.num_hits - before.num_hits,
        tier.num_misses - before.num_misses,
        tier.read_bytes - before.read_bytes,
        tier.written_bytes - before.written_bytes,
    )


def _add(figures: Sequence[TierFigures]) -> TierFigures:
    return _figures(
        sum(each.num_hits for each in figures),
        sum(each.num_misses for each in figures),
        sum(each.read_bytes for each in figures),
        sum(each.written_bytes for each in figures),
    )


def _figures(num_hits: int, num_misses: int, read_bytes: int, written_bytes: int) -> TierFigures:
    num = num_hits + num_misses
    return TierFigures(
        num_hits, num_misses, num_hits / num if num > 0 else None, read_bytes, written_bytes
    )
