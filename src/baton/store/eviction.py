"""Which entries make room for others: the contract, and the registry of policies. Pure.

A policy sees all entries of a tier each time, and keeps nothing in between: several processes evict
from one tier, and each of them may die. What it needs to know of an entry is kept with the entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.store.capacity import StoredEntry


@dataclass(frozen=True, slots=True)
class Eviction:
    """Entries to remove, in this order, and entries that stay in another place of their queue."""

    victims: Sequence[StoredEntry]
    requeued: Sequence[StoredEntry] = ()


class EvictionPolicy(Protocol):
    """Stateless. From any thread."""

    @property
    def remembers(self) -> bool:
        """Whether an entry that returns soon after its eviction is to be protected at once.

        The names of victims that were not protected are remembered then.
        """
        ...

    @property
    def lookahead_share(self) -> float:
        """Of the capacity: so many victims are chosen at once, and wait (`store.victims`).

        The more, the less often all entries are listed, and the older is what the choice was
        based on.
        """
        ...

    def choose(self, entries: Iterable[StoredEntry], num_bytes: int, now: float) -> Eviction:
        """Entries that take up `num_bytes` together, and no more than are needed for that.

        All that are not pinned, where they are too few. `now` is on the entries' clock.
        """
        ...


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy without options."""


EVICTIONS: Final[Registry[EvictionPolicy]] = Registry("baton.evictions", "store.options")
