"""How full a tier is, and which entries go first. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.store.interface import EntryName

EVICTION_SLACK_PARTS: Final = 16
"""One part in so many of the capacity is freed beyond need: a look at all entries serves many."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry: the bytes that it takes up, and when it was used last (seconds, any zero)."""

    name: EntryName
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be kept; what is, and what is about to be.

        try_reserve ──► reserved ──commit──► committed ──remove──► gone
                    └──release──► gone

    Never below nothing: what a killed process has counted may be too high, and is set right later.
    """

    capacity_bytes: int
    committed_bytes: int = 0
    reserved_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What may be taken."""
        return max(0, self.capacity_bytes - self.committed_bytes - self.reserved_bytes)

    def try_reserve(self, num_bytes: int) -> Self | None:
        """So much is about to be kept; None for want of room."""
        if num_bytes > self.free_bytes:
            return None
        reserved_bytes = self.reserved_bytes + num_bytes
        return self._with(self.committed_bytes, reserved_bytes)

    def release(self, num_bytes: int) -> Self:
        """So much of what was pending is not kept."""
        return self._with(self.committed_bytes, self.reserved_bytes - num_bytes)

    def commit(self, num_bytes: int) -> Self:
        """Pending bytes have become stored bytes."""
        return self._with(self.committed_bytes + num_bytes, self.reserved_bytes - num_bytes)

    def remove(self, num_bytes: int) -> Self:
        """Bytes were removed."""
        return self._with(self.committed_bytes - num_bytes, self.reserved_bytes)

    def _with(self, committed_bytes: int, reserved_bytes: int) -> Self:
        return type(self)(self.capacity_bytes, max(0, committed_bytes), max(0, reserved_bytes))

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must go before so much may be taken, with some slack; 0 for none."""
        missing = num_bytes - self.free_bytes
        return missing + self.capacity_bytes // EVICTION_SLACK_PARTS if missing > 0 else 0


def choose_victims(entries: Iterable[StoredEntry], num_bytes: int) -> list[StoredEntry]:
    """The least recently used entries that take up `num_bytes` together, in that order.

    No more than are needed; all of them, where they are too few.
    """
    victims: list[StoredEntry] = []
    freed = 0
    for entry in sorted(entries, key=lambda entry: (entry.used_at, entry.name)):
        if freed >= num_bytes:
            break
        victims.append(entry)
        freed += entry.num_bytes
    return victims
