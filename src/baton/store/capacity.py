"""How full a tier is, and which entries go first. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from baton.store.interface import NO_TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.store.interface import EntryName, TenantLabel

SLACK_ENTRIES: Final = 8
"""Room for so many entries like the one that needs it is made besides: for other writers, too."""
MAX_SLACK_PARTS: Final = 16
"""At most one part in so many of the capacity."""
MAX_USES: Final = 3
"""Uses of an entry are counted up to this: S3-FIFO needs no more, and it fits two bits."""
MAX_PINNED_SHARE: Final = 0.5
"""Of the capacity: what is pinned must leave room for what is not."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry: the bytes that it takes up, and when it was used last (seconds, any zero).

    The rest is for eviction: since `queued_at` it has been in its queue, the protected one or the
    other, and it was used `num_uses` times meanwhile (as far as is counted). A pinned entry stays.
    """

    name: EntryName
    num_bytes: int
    used_at: float
    queued_at: float = 0.0
    num_uses: int = 0
    is_protected: bool = False
    is_pinned: bool = False
    tenant: TenantLabel = NO_TENANT


def count_use(num_uses: int) -> int:
    """Uses of an entry after one more."""
    return min(num_uses + 1, MAX_USES)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be kept; what is, and what is about to be.

        try_reserve ──► reserved ──commit──► committed ──remove──► gone

    Never below nothing: what a killed process has counted may be too high, and is set right later.
    """

    capacity_bytes: int
    committed_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What may be taken."""
        return max(0, self._left_bytes)

    @property
    def _left_bytes(self) -> int:
        """Below 0 where more is kept than may be: the capacity was larger before."""
        return self.capacity_bytes - self.committed_bytes - self.reserved_bytes

    def try_reserve(self, num_bytes: int) -> Self | None:
        """So much is about to be kept; None for want of room, for 0 too if too much is kept."""
        if num_bytes > self._left_bytes:
            return None
        reserved_bytes = self.reserved_bytes + num_bytes
        return self._with(self.committed_bytes, reserved_bytes)

    def commit(self, num_bytes: int) -> Self:
        """Pending bytes have become stored bytes."""
        return self._with(self.committed_bytes + num_bytes, self.reserved_bytes - num_bytes)

    def remove(self, num_bytes: int) -> Self:
        """Bytes were removed."""
        return self._with(self.committed_bytes - num_bytes, self.reserved_bytes)

    def _with(self, committed_bytes: int, reserved_bytes: int) -> Self:
        return type(self)(self.capacity_bytes, max(0, committed_bytes), max(0, reserved_bytes))

    def shortage(self, num_bytes: int, slack_entries: int = SLACK_ENTRIES) -> int:
        """Bytes that must go before so much may be taken, with some slack; 0 for none."""
        missing = num_bytes - self._left_bytes
        slack = min(slack_entries * num_bytes, self.capacity_bytes // MAX_SLACK_PARTS)
        return missing + slack if missing > 0 else 0

    def excess_bytes(self, high_mark: float, low_mark: float) -> int:
        """Bytes above the low mark, once the high mark is exceeded; 0 below.

        Marks are shares of the capacity.
        """
        used_bytes = self.committed_bytes + self.reserved_bytes
        if used_bytes <= high_mark * self.capacity_bytes:
            return 0
        return used_bytes - int(low_mark * self.capacity_bytes)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes that must go before an entry may be kept: of one tenant's entries, or of all."""

    num_bytes: int
    tenant: TenantLabel = NO_TENANT


@dataclass(frozen=True, slots=True)
class TenantCount:
    """Bytes that the entries of a tenant take up in a tier."""

    tenant: TenantLabel
    num_bytes: int


def choose_place(counts: Sequence[TenantCount], tenant: TenantLabel) -> int | None:
    """Where a tenant is counted: in its own place, else in the first that counts nothing."""
    own = (at for at, count in enumerate(counts) if count.tenant == tenant)
    free = (at for at, count in enumerate(counts) if count.num_bytes == 0)
    return next(own, next(free, None))


def choose_victims(entries: Iterable[StoredEntry], num_bytes: int) -> list[StoredEntry]:
    """The least recently used entries that take up `num_bytes` together, in that order.

    No more than are needed; all that are not pinned, where they are too few.
    """
    victims: list[StoredEntry] = []
    freed = 0
    evictable = (entry for entry in entries if not entry.is_pinned)
    for entry in sorted(evictable, key=lambda entry: (entry.used_at, entry.name)):
        if freed >= num_bytes:
            break
        victims.append(entry)
        freed += entry.num_bytes
    return victims
