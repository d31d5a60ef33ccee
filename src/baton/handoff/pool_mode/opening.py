"""From `[store]` to what a worker takes part in mode pool with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.handoff.pool_mode.store_access import StoreAccess
from baton.store.entry_format import EntryFormat
from baton.store.tiered import open_store

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.clock import Clock
    from baton.config.sections import StoreSection
    from baton.handoff.kv_views import KVView

_PURPOSE: Final = "store"
_NAME_BYTES: Final = 8


def open_store_access(
    section: StoreSection, view: KVView, *, key: ClusterKey, clock: Clock
) -> StoreAccess | None:
    """Open the store; None where no tier is configured.

    Raises:
        ConfigError: a tier cannot be opened, or this worker's heads cannot be divided so.
    """
    if not section.tiers:
        return None
    entry_format = EntryFormat.of(
        view.layout, block_size=section.block_size, num_parts=section.num_parts
    )
    cluster = key.sign(_PURPOSE, b"name")[:_NAME_BYTES].hex()
    store = open_store(section.tiers, section.options, cluster=cluster, clock=clock)
    return StoreAccess(store, entry_format, view)
