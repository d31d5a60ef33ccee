"""The store as workers report it, as a part of `/debug/transfers`: tiers, and prompts found there.

Counts are each worker's own. `used_bytes` and `capacity_bytes` are those of the place where the
entries are, which several workers may share (a folder, a server): they are never added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.telemetry.transfer_report import StoreReport, StoreTier, TransferReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_WORKER_TIERS: Final = 1000


class PromptFigures(msgspec.Struct, frozen=True):
    """Prompts that were looked for in the store. `found_share`: 0 to 1; None where none was."""

    num_found: int
    num_missing: int
    found_share: float | None


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


class FleetStore(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers in the order in which workers list them; `MOST_WORKER_TIERS` of single workers."""

    tiers: tuple[FleetTier, ...] = ()
    worker_tiers: tuple[WorkerTier, ...] = ()
    total_prompts: PromptFigures
    recent_prompts: PromptFigures


class WorkerStore:
    """One worker's store: the latest report, and what was added since the baseline."""

    def __init__(self, worker: str, latest: TransferReport, baseline: TransferReport) -> None:
        self.total = latest.store or StoreReport()
        before = self._before = baseline.store or StoreReport()
        earlier = {each.tier: each for each in before.tiers}
        self.tiers = [_compare(worker, each, earlier.get(each.tier)) for each in self.total.tiers]

    @property
    def num_recent_prompts(self) -> tuple[int, int]:
        """Found and missing."""
        total, before = self.total, self._before
        return (
            total.num_prompts_found - before.num_prompts_found,
            total.num_prompts_missing - before.num_prompts_missing,
        )


def add_stores(stores: Sequence[WorkerStore]) -> FleetStore:
    """All workers together."""
    tiers = [tier for each in stores for tier in each.tiers]
    return FleetStore(
        tiers=_add_tiers(tiers),
        worker_tiers=tuple(tiers[:MOST_WORKER_TIERS]),
        total_prompts=_prompts(
            (each.total.num_prompts_found, each.total.num_prompts_missing) for each in stores
        ),
        recent_prompts=_prompts(each.num_recent_prompts for each in stores),
    )


def _prompts(counts: Iterable[tuple[int, int]]) -> PromptFigures:
    num_found = num_missing = 0
    for found, missing in counts:
        num_found += found
        num_missing += missing
    return PromptFigures(num_found, num_missing, _share(num_found, num_missing))


def _add_tiers(tiers: Iterable[WorkerTier]) -> tuple[FleetTier, ...]:
    alike: dict[str, list[WorkerTier]] = {}
    for each in tiers:
        alike.setdefault(each.tier, []).append(each)
    return tuple(map(_merge, alike.values()))


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


def _compare(worker: str, tier: StoreTier, before: StoreTier | None) -> WorkerTier:
    """`before`: the same tier at the beginning of the window, if it was there."""
    total = _figures(tier.num_hits, tier.num_misses, tier.read_bytes, tier.written_bytes)
    recent = total
    if before is not None:
        recent = _figures(
            tier.num_hits - before.num_hits,
            tier.num_misses - before.num_misses,
            tier.read_bytes - before.read_bytes,
            tier.written_bytes - before.written_bytes,
        )
    return WorkerTier(
        worker=worker,
        tier=tier.tier,
        used_bytes=tier.used_bytes,
        capacity_bytes=tier.capacity_bytes,
        is_available=tier.is_available,
        total=total,
        recent=recent,
    )


def _add(figures: Sequence[TierFigures]) -> TierFigures:
    return _figures(
        sum(each.num_hits for each in figures),
        sum(each.num_misses for each in figures),
        sum(each.read_bytes for each in figures),
        sum(each.written_bytes for each in figures),
    )


def _figures(num_hits: int, num_misses: int, read_bytes: int, written_bytes: int) -> TierFigures:
    share = _share(num_hits, num_misses)
    return TierFigures(num_hits, num_misses, share, read_bytes, written_bytes)


def _share(num: int, num_others: int) -> float | None:
    return num / (num + num_others) if num + num_others > 0 else None
