"""The store from outside: its entries are listed, checked and removed, beside running workers."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.clock import MachineClock
from baton.errors import StoreError
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.store.capacity import StoredEntry, choose_victims
from baton.store.interface import (
    NO_TENANT,
    EntryName,
    HasPlaces,
    PeerAccess,
    PinsEntries,
    TenantLabel,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from baton.auth.key import ClusterKey
    from baton.store.counted_tier import CountedTier

logger = logging.getLogger(__name__)

HOUR_S: Final = 3600.0
MIB: Final = 1 << 20
NUM_LOOKS: Final = 3
"""At an entry that seems damaged."""
NUM_TENANTS: Final = 5
"""Of each tier, that are printed."""


class TenantStats(msgspec.Struct, frozen=True):
    """What one tenant's entries take up in a tier; `tenant` is its label, in hex."""

    tenant: str
    num_entries: int
    used_bytes: int


class TierStats(msgspec.Struct, frozen=True):
    """One tier at this moment. Ages: since an entry was used last; None where there is none.

    `direct_io`, `copied_by`: see `Usage`. `tenants`: the largest first; listings of servers show
    none.
    """

    tier: str
    num_entries: int
    used_bytes: int
    capacity_bytes: int
    newest_s: float | None
    oldest_s: float | None
    pinned_bytes: int = 0
    direct_io: bool | None = None
    copied_by: str | None = None
    tenants: tuple[TenantStats, ...] = ()


class ListedEntry(msgspec.Struct, frozen=True):
    """One entry of a tier; `num_uses` since it was put or requeued, as far as is counted."""

    tier: str
    name: str
    num_bytes: int
    last_used_s: float
    num_uses: int
    is_pinned: bool


class TierCheck(msgspec.Struct, frozen=True):
    """What was found in one tier; `num_removed` of the damaged ones.

    `num_unreadable`: entries that the disk failed to read (EIO), a server refused, or that are
    larger than `max_entry_bytes`. They stay. `num_whole`: those that are what was put; what is none
    of all these was evicted meanwhile.
    """

    tier: str
    num_entries: int
    num_damaged: int
    num_removed: int
    num_unreadable: int = 0
    num_whole: int = 0


class TierEviction(msgspec.Struct, frozen=True):
    """What was removed from one tier; `num_left` entries that were to go are there still."""

    tier: str
    num_removed: int
    removed_bytes: int
    num_left: int = 0


@contextmanager
def open_tiers(
    kinds: Sequence[str],
    options: Mapping[str, Mapping[str, object]],
    key: ClusterKey,
    *,
    may_create: bool,
    peers: PeerAccess,
) -> Generator[Sequence[CountedTier]]:
    """The tiers of these kinds, as workers with this key have them.

    Raises:
        ConfigError: one cannot be opened, or is not there and may not be made.
    """
    clock = MachineClock()
    store = open_keyed_store(
        kinds, options, key=key, clock=clock, may_create=may_create, peers=peers
    )
    try:
        yield store.tiers
    finally:
        store.close()


def look_at(tiers: Sequence[CountedTier]) -> list[TierStats]:
    """How full each tier is.

    Raises:
        StoreError: a tier cannot be looked at.
    """
    now = MachineClock().unix_now()
    return [_look_at(tier, now) for tier in tiers]


def print_stats(found: Sequence[TierStats]) -> None:
    """For people."""
    sizes_and_ages = "used, MiB", "of", "pinned", "newest, s", "oldest, s"
    table = Table("tier", "entries", *sizes_and_ages, "large entries", padding=0)
    for each in found:
        sizes = (
            f"{each.used_bytes / MIB:,.1f}",
            f"{each.capacity_bytes / MIB:,.0f}",
            f"{each.pinned_bytes / MIB:,.1f}",
        )
        ages = ("" if age is None else f"{age:,.0f}" for age in (each.newest_s, each.oldest_s))
        large = {None: each.copied_by or "", True: "direct", False: "cached"}[each.direct_io]
        table.add_row(each.tier, f"{each.num_entries:,}", *sizes, *ages, large)
    Console().print(table)
    if any(each.tenants for each in found):
        _print_tenants(found)


def _print_tenants(found: Sequence[TierStats]) -> None:
    table = Table("tier", "tenant", "entries", "MiB")
    for each in found:
        for tenant in each.tenants[:NUM_TENANTS]:
            used = f"{tenant.used_bytes / MIB:,.1f}"
            table.add_row(each.tier, tenant.tenant, f"{tenant.num_entries:,}", used)
        if len(each.tenants) > NUM_TENANTS:
            table.add_row(each.tier, f"({len(each.tenants) - NUM_TENANTS:,} more)", "", "")
    Console().print(table)


def list_entries(
    tiers: Sequence[CountedTier], *, oldest_first: bool, limit: int
) -> list[ListedEntry]:
    """Entries of each tier by their last use, at most `limit` of each; 0: all.

    Raises:
        StoreError: a tier cannot be looked at.
    """
    now = MachineClock().unix_now()
    listed: list[ListedEntry] = []
    for tier in tiers:
        entries = sorted(tier.entries(), key=lambda e: e.used_at, reverse=not oldest_first)
        listed += (
            ListedEntry(
                tier.kind,
                entry.name.hex(),
                entry.num_bytes,
                round(max(0.0, now - entry.used_at), 3),
                entry.num_uses,
                entry.is_pinned,
            )
            for entry in (entries[:limit] if limit else entries)
        )
    return listed


def print_entries(listed: Sequence[ListedEntry]) -> None:
    """For people: a line for each, which is not wrapped."""
    lines = [f"{'tier':8} {'name':64} {'KiB':>10} {'used, s ago':>12} {'uses':>4}"]
    lines += (
        f"{each.tier:8} {each.name} {each.num_bytes / 1024:10,.0f} {each.last_used_s:12,.0f}"
        f" {each.num_uses:4}{'  pinned' if each.is_pinned else ''}"
        for each in listed
    )
    Console(soft_wrap=True, highlight=False, markup=False).print("\n".join(lines))


def verify(tiers: Sequence[CountedTier], *, remove: bool) -> list[TierCheck]:
    """Read all entries; progress goes to standard error.

    Of a tier in which all are damaged none is removed: it is the key that is wrong, most likely.

    Raises:
        StoreError: a tier cannot be looked at.
    """
    return [_check(tier, remove=remove) for tier in tiers]


def print_checks(found: Sequence[TierCheck]) -> None:
    """For people."""
    table = Table("tier", "entries", "damaged", "removed", "unreadable")
    for each in found:
        numbers = each.num_entries, each.num_damaged, each.num_removed, each.num_unreadable
        table.add_row(each.tier, *(f"{number:,}" for number in numbers))
    Console().print(table)


def evict(
    tiers: Sequence[CountedTier],
    *,
    num_bytes: int | None = None,
    older_than_hours: float | None = None,
    tenant: TenantLabel | None = None,
) -> list[TierEviction]:
    """Of each tier: so many bytes, or what was not used for so long, but nothing that is pinned.

    Or what is a tenant's; without any of these: all of it.

    Raises:
        StoreError: a tier cannot be looked at.
    """
    done = []
    for tier in tiers:
        victims, num_unknown = tier.entries(), 0
        if num_bytes is not None:
            victims = choose_victims(victims, num_bytes)
        elif older_than_hours is not None:
            latest = MachineClock().unix_now() - older_than_hours * HOUR_S
            victims = [e for e in victims if e.used_at < latest and not e.is_pinned]
        elif tenant is not None:
            owners = {entry.name: _find_tenant(tier, entry) for entry in victims}
            victims = [entry for entry in victims if owners[entry.name] == tenant]
            if None in owners.values():  # evicted meanwhile, or there and not to be read
                num_unknown = sum(owners.get(each.name, tenant) is None for each in tier.entries())
        removed = _remove(tier, victims)
        num_left = len(victims) - len(removed) + num_unknown
        done.append(TierEviction(tier.kind, len(removed), _sum_bytes(removed), num_left))
    return done


def _remove(tier: CountedTier, entries: Sequence[StoredEntry]) -> Sequence[StoredEntry]:
    """Remove entries; those that are gone then. A tier does not report what it could not remove."""
    for entry in entries:
        tier.discard(entry.name)
    left = {entry.name for entry in tier.entries()} if entries else set()
    return [entry for entry in entries if entry.name not in left]


def change_pins(
    tiers: Sequence[CountedTier], names: Sequence[EntryName], change: Literal["pin", "unpin"]
) -> list[EntryName]:
    """Pin or unpin entries in each tier that has them; those that none has.

    Raises:
        StoreFullError: too large a share of a tier is pinned already.
        StoreError: an entry's file cannot be changed.
    """
    inner = [tier.inner for tier in tiers if isinstance(tier.inner, PinsEntries)]
    missing = []
    for name in names:
        found = [tier.pin(name) if change == "pin" else tier.unpin(name) for tier in inner]
        if not any(found):
            missing.append(name)
    return missing


def print_evictions(done: Sequence[TierEviction]) -> None:
    """For people."""
    table = Table("tier", "removed", "MiB", "left")
    for each in done:
        removed_mib = f"{each.removed_bytes / MIB:,.1f}"
        table.add_row(each.tier, f"{each.num_removed:,}", removed_mib, f"{each.num_left:,}")
    Console().print(table)


def _look_at(tier: CountedTier, now: float) -> TierStats:
    entries, usage = tier.entries(), tier.usage()
    ages = sorted(max(0.0, now - entry.used_at) for entry in entries)
    return TierStats(
        tier=tier.kind,
        num_entries=len(entries),
        used_bytes=_sum_bytes(entries),
        capacity_bytes=usage.capacity_bytes,
        newest_s=ages[0] if ages else None,
        oldest_s=ages[-1] if ages else None,
        pinned_bytes=_sum_bytes([entry for entry in entries if entry.is_pinned]),
        direct_io=usage.direct_io,
        copied_by=usage.copied_by,
        tenants=_group_by_tenant(entries),
    )


def _group_by_tenant(entries: Sequence[StoredEntry]) -> tuple[TenantStats, ...]:
    num_entries, used_bytes = Counter[str](), Counter[str]()
    for entry in entries:
        if entry.tenant != NO_TENANT:
            num_entries[entry.tenant.hex()] += 1
            used_bytes[entry.tenant.hex()] += entry.num_bytes
    return tuple(TenantStats(t, num_entries[t], size) for t, size in used_bytes.most_common())


def _find_tenant(tier: CountedTier, entry: StoredEntry) -> TenantLabel | None:
    """Whose an entry is; where the listing does not show it, its header does.

    None: it cannot be read.

    Raises:
        StoreError: its server does not answer.
    """
    if entry.tenant != NO_TENANT:
        return entry.tenant
    lease = tier.inner.try_lease(entry.name)
    if lease is not None:
        with lease:
            return lease.tenant
    check_answers(tier)
    return None


def check_answers(tier: CountedTier) -> None:
    """Whether what a tier did not find is certainly not there.

    Raises:
        StoreError: it is on a server that does not answer.
    """
    if not _answers(tier):
        raise StoreError(
            f"tier {tier.kind}: its server failed, was late, or refused several entries in a row, "
            "so not all of its entries could be looked at: try again"
        )


def is_unreadable(tier: CountedTier, name: EntryName) -> bool:
    """Whether an entry that was not read is there: too large, refused, or its disk has failed.

    Raises:
        StoreError: it is on a server that does not answer.
    """
    inner = tier.inner
    for place in inner.places if isinstance(inner, HasPlaces) else (inner,):
        try:
            if place.is_whole(name):  # the disk has failed once
                return True
        except StoreError:
            check_answers(tier)
            return True
    return False


def _answers(tier: CountedTier) -> bool:
    """Whether a tier's server is asked now; a tier on none always is."""
    server = None if tier.remote is None else tier.inner.usage().server
    return server is None or server.is_available


def _check(tier: CountedTier, *, remove: bool) -> TierCheck:
    entries, num_unreadable, num_whole = tier.entries(), 0, 0
    damaged: list[StoredEntry] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for entry in progress.track(entries, description=f"reading {tier.kind}"):
            try:
                if tier.is_whole(entry.name):
                    num_whole += 1
                elif is_damaged(tier, entry.name):
                    damaged.append(entry)
            except StoreError as exc:
                if not _answers(tier):
                    raise
                if not num_unreadable:
                    logger.warning("store: tier %s: %s (the first such entry)", tier.kind, exc)
                num_unreadable += 1
    removed = _remove(tier, damaged) if remove and num_whole else []  # none: the key is wrong
    return TierCheck(tier.kind, len(entries), len(damaged), len(removed), num_unreadable, num_whole)


def is_damaged(tier: CountedTier, name: EntryName) -> bool:
    """Whether an entry is there and is not what was put.

    What is evicted while it is looked at is not, nor is what is put again after that: a damaged one
    is so at each look.
    """
    looks = (not tier.is_whole(name) and tier.find((name,)) for _ in range(NUM_LOOKS))
    return all(looks)


def _sum_bytes(entries: Sequence[StoredEntry]) -> int:
    return sum(entry.num_bytes for entry in entries)
