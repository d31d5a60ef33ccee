"""From `[store]` to what a worker takes part in mode pool with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.handoff.pooling.pool import Pool
from baton.store.form import EntryForm
from baton.store.tiered import open_store

if TYPE_CHECKING:
    from baton.authority.key import ClusterKey
    from baton.clock import Clock
    from baton.config.sections import StoreSection
    from baton.handoff.faces import Face

_PURPOSE: Final = "store"
_NAME_BYTES: Final = 8


def open_pool(section: StoreSection, face: Face, *, key: ClusterKey, clock: Clock) -> Pool | None:
    """Open the store; None where no tier is configured.

    Raises:
        ConfigError: a tier cannot be opened, or this worker's heads cannot be divided so.
    """
    if not section.tiers:
        return None
    form = EntryForm.of(face.layout, block_size=section.block_size, num_parts=section.num_parts)
    cluster = key.sign(_PURPOSE, b"name")[:_NAME_BYTES].hex()
    store = open_store(section.tiers, section.options, cluster=cluster, clock=clock)
    return Pool(store, form, face)
