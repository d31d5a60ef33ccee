"""What a worker takes part in mode pool with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.pool_mode.entry_counts import EntryCounts

if TYPE_CHECKING:
    from baton.handoff.kv_views import KVView
    from baton.store.entry_format import EntryFormat
    from baton.store.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The store belongs to the pool's thread, which closes it; so do the staging pages of `view`.

    The KV view shows the engine's blocks in an order that can be divided into tokens and heads.
    """

    store: TieredStore
    entry_format: EntryFormat
    view: KVView
    counts: EntryCounts = field(default_factory=EntryCounts)
