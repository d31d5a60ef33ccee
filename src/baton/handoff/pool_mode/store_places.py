"""The places of a store: its tiers, and of a tier on several servers each server by itself.

Each has an identity of its own, an entry of random bytes. Workers that read the same ones find each
other's entries there, by whatever paths, mounts and addresses they reach it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.handoff.pool_mode.side_entries import StoreIdentity, keep_identity
from baton.ids import StoreId
from baton.store.interface import EntryName, ServerPlace, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class StorePlace:
    """One of them. Owner: the pool's thread. `store_id` is None while it is not known.

    `form` commits to what else makes an entry of use: model, layout, encodings.
    """

    tier: Tier
    form: bytes
    store_id: StoreId | None = None
    _identity: StoreIdentity = field(default_factory=StoreIdentity.new)

    @property
    def is_billed(self) -> bool:
        """Whether each look costs money."""
        return isinstance(self.tier, ServerPlace) and self.tier.is_billed

    @property
    def is_looked_at(self) -> bool:
        """Whether this worker reports what is there; else the process does that puts it there."""
        is_read_only = isinstance(self.tier, ServerPlace) and self.tier.is_read_only
        return self.store_id is not None and not is_read_only

    def identify(self) -> None:
        """Read the identity, which is put there if there is none, and counts as used.

        It may be another one than before: the memory of another process goes with that process.
        A place that cannot be reached keeps the one that it had.
        """
        found = keep_identity(self.tier, self._identity)
        if found is not None:
            self._identity = found
            digest = hashlib.sha256(found.random + self.form)
            self.store_id = StoreId(digest.hexdigest()[:32])

    @property
    def is_away(self) -> bool:
        """Whether what is there cannot be known at present."""
        return isinstance(self.tier, ServerPlace) and not self.tier.is_available()

    def check_each(self, names: Sequence[EntryName]) -> list[bool] | None:
        """Which of these are there; None: it cannot be known at present."""
        found: list[bool] = []
        while len(found) < len(names):
            some = self._check_some(names[len(found) :])
            if some is None:
                return None
            found += some
        return found

    def _check_some(self, names: Sequence[EntryName]) -> Sequence[bool] | None:
        """Of the first ones: up to the first that is missing where others are not looked for."""
        if not isinstance(self.tier, ServerPlace):
            num_found = self.tier.find(names)
            return [True] * num_found + [False] * (num_found < len(names))
        found = self.tier.check_each(names)
        if found is None or not self.is_billed:
            return found
        num_found = len([*takewhile(bool, found)])
        return found[: num_found + 1]
