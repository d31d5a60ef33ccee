"""What the store holds, as far as this worker knows: for gateways, by way of the worker's journal.

    kept, or found present ──► reported as stored ──not there any more──► reported as removed

Any process may evict an entry, and none reports that: names of entries do not show their tokens. So
each worker looks again and again for the entries that it has reported itself, all of them within
`ROUND_S` where that takes at most `BUSY_SHARE` of its thread's time; a batch in `BILLED_WAIT_S`
where looking costs money. What a restarted worker does not report is reported again when a request
finds it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.events.blocks import STORE_MEDIUM
from baton.handoff.pool_mode.side_entries import keep_identity, open_identity
from baton.ids import StoreId
from baton.kv.identity import BlockHash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.events.journal import CacheJournal
    from baton.handoff.pool_mode.block_copier import TokenSegment
    from baton.handoff.pool_mode.side_entries import StoreIdentity
    from baton.store.entry_format import EntryFormat
    from baton.store.interface import Tier

MAX_REPORTED: Final = 1 << 16
"""Entries; about 750 bytes for each, with its tokens. Beyond that the ones unused for longest are
not reported."""
ROUND_S: Final = 2.0
"""In which every reported entry is looked for once."""
BATCH_ENTRIES: Final = 64
BUSY_SHARE: Final = 0.02
"""Of the thread's time, at most, for that."""
BILLED_WAIT_S: Final = 60.0
"""Between two batches where an object store answers them: some million requests a year."""


@dataclass(slots=True)
class StoreJournal:
    """Owner: the pool's thread. `store_id` does not change: any thread reads it.

    `tier` is the store's first one, where its identity is. `is_billed`: a look costs money.
    """

    journal: CacheJournal
    tier: Tier
    identity: StoreIdentity
    store_id: StoreId
    clock: Clock
    is_billed: bool = False
    _reported: OrderedDict[BlockHash, TokenSegment] = field(default_factory=OrderedDict)
    _to_check: list[TokenSegment] = field(default_factory=list)
    _checks_at: Instant = field(init=False)

    def __post_init__(self) -> None:
        self._checks_at = Instant(self.clock.now() + ROUND_S)

    def add_present(
        self,
        segments: Sequence[TokenSegment],
        parent: TokenSegment | None,
        token_ids: NDArray[np.int32],
        tenant_salt: str,
    ) -> None:
        """The store has these full blocks of a sequence, which follow `parent`.

        `token_ids` are the sequence's, from its first token on.
        """
        if not segments:
            return
        ids = token_ids[segments[0].start : segments[-1].stop]
        after = None if parent is None else parent.block_hash
        hashes = [each.block_hash for each in segments]
        self.journal.add_stored(hashes, after, ids, tenant_salt, medium=STORE_MEDIUM)
        for segment in reversed(segments):  # a sequence's end is forgotten before its beginning
            self._reported[segment.block_hash] = segment
            self._reported.move_to_end(segment.block_hash)
        while len(self._reported) > MAX_REPORTED:
            self._remove(next(iter(self._reported)))

    def note_missing(self, segment: TokenSegment) -> None:
        """The store was asked for it, and does not have it any more."""
        self._remove(segment.block_hash)

    def step(self, count_present: Callable[[Sequence[TokenSegment]], int]) -> float:
        """Look for the identity, and for some of what was reported, if it is time.

        `count_present` gives how many leading segments the store has. Returns in how many seconds
        there is more to look for.
        """
        began_at = self.clock.now()
        if began_at < self._checks_at:
            return self._checks_at - began_at
        self._checks_at = Instant(began_at + ROUND_S)  # also where the store cannot be looked at
        if not self._to_check:
            self._to_check = [*self._reported.values()]
            keep_identity(self.tier, self.identity)
        batch = self._to_check[-BATCH_ENTRIES:]
        del self._to_check[-BATCH_ENTRIES:]
        num_checked = 0
        while num_checked < len(batch):
            num_checked += count_present(batch[num_checked:])
            for missing in batch[num_checked : num_checked + 1]:
                self._remove(missing.block_hash)
            num_checked += 1
        took_s = self.clock.now() - began_at
        share = len(batch) / max(len(batch), len(self._reported)) if batch else 1.0
        wait_s = max(share * ROUND_S, took_s / BUSY_SHARE, BILLED_WAIT_S * self.is_billed)
        self._checks_at = Instant(began_at + wait_s)
        return wait_s

    def _remove(self, block_hash: BlockHash) -> None:
        if self._reported.pop(block_hash, None) is not None:
            self.journal.add_removed(block_hash, STORE_MEDIUM)


def open_store_journal(
    tier: Tier,
    entry_format: EntryFormat,
    journal: CacheJournal,
    *,
    fingerprint: str,
    clock: Clock,
    is_billed: bool = False,
) -> StoreJournal | None:
    """Report to `journal` what a store holds for models of `fingerprint`; None: it has no identity.

    Workers of other models, or with entries of another form, may have the same store, but find
    nothing of each other's there: it has another `store_id` for them.
    """
    identity = open_identity(tier)
    if identity is None:
        return None
    form = entry_format.name(BlockHash(b""), 0)  # commits to all but model and tokens
    digest = hashlib.sha256(identity.random + form + fingerprint.encode())
    store_id = StoreId(digest.hexdigest()[:32])
    return StoreJournal(journal, tier, identity, store_id, clock, is_billed)
