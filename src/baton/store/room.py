"""How full a tier is, and which entries go first. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.store.interface import EntryName

SLACK_PARTS: Final = 16
"""One part in so many of the capacity is freed beyond need: a look at all entries serves many."""


@dataclass(frozen=True, slots=True)
class Held:
    """One entry: the bytes that it takes up, and when it was used last (seconds, any zero)."""

    name: EntryName
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Room:
    """What may be kept; what is, and what is about to be.

        take ──► pending ──keep──► kept ──remove──► gone
                    └──give_back──► gone

    Never below nothing: what a killed process has counted may be too high, and is set right later.
    """

    capacity_bytes: int
    kept_bytes: int = 0
    pending_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What may be taken."""
        return max(0, self.capacity_bytes - self.kept_bytes - self.pending_bytes)

    def try_take(self, num_bytes: int) -> Self | None:
        """So much is about to be kept; None for want of room."""
        if num_bytes > self.free_bytes:
            return None
        return replace(self, pending_bytes=self.pending_bytes + num_bytes)

    def give_back(self, num_bytes: int) -> Self:
        """So much of what was pending is not kept."""
        return replace(self, pending_bytes=max(0, self.pending_bytes - num_bytes))

    def keep(self, num_bytes: int) -> Self:
        """So much of what was pending is kept."""
        return replace(self.give_back(num_bytes), kept_bytes=self.kept_bytes + num_bytes)

    def remove(self, num_bytes: int) -> Self:
        """So much is kept no longer."""
        return replace(self, kept_bytes=max(0, self.kept_bytes - num_bytes))

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must go before so much may be taken, with some slack; 0 for none."""
        missing = num_bytes - self.free_bytes
        return missing + self.capacity_bytes // SLACK_PARTS if missing > 0 else 0


def choose_victims(held: Iterable[Held], num_bytes: int) -> list[Held]:
    """The least recently used entries that take up `num_bytes` together, in that order.

    No more than are needed; all of them, where they are too few.
    """
    victims: list[Held] = []
    freed = 0
    for entry in sorted(held, key=lambda entry: (entry.used_at, entry.name)):
        if freed >= num_bytes:
            break
        victims.append(entry)
        freed += entry.num_bytes
    return victims
