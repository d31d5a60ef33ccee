"""The pool's half: the production handler without its thread, and its copies watched."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from baton.auth.key import ClusterKey
from baton.handoff.pool_mode.block_copier import BlockCopier, EntryBodies, TokenSegment
from baton.handoff.pool_mode.store_access import StoreAccess, label_tenant
from baton.sim.handoff.store import KEY
from baton.store.counted_tier import CountedTier
from baton.store.entry_format import EntryFormat
from baton.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.interface import StreamPosition
    from baton.handoff.kv_views import KVView
    from baton.handoff.pool_mode.store_handoff import StoreHandoff
    from baton.kv.copies import BlockTable
    from baton.sim.handoff.process import SimProcess

STEP_S: Final = 0.001
"""At most: a batch of a simulated prompt is all of it."""


def make_store_access(process: SimProcess, view: KVView) -> StoreAccess | None:
    """What a worker takes part in mode pool with; None in a cluster without a store."""
    world = process.world
    if world.store is None or world.schedule.store is None:
        return None
    size = world.schedule.store.block_size
    store = TieredStore([CountedTier("store", world.store)])
    entry_format = EntryFormat.of(view.layout, block_size=size, num_parts=1)
    label = partial(label_tenant, ClusterKey(KEY))
    return StoreAccess(store, entry_format, view, label, keeps_prefixes=True)


class StoreHandoffDriver:
    """Has the store handoff take its steps: soon after each command, and as long as it is busy."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._steps_soon = False

    def wake(self) -> None:
        """Something was asked of it."""
        self._in(STEP_S * self._process.world.rng.random())

    def _in(self, delay_s: float) -> None:
        if not self._steps_soon:
            self._steps_soon = True
            process = self._process
            process.world.timeline.after(delay_s, lambda: process.when_running(self._step))

    def _step(self) -> None:
        self._steps_soon = False
        handoff = self._process.handoffs.store
        if handoff is not None:
            delay_s = handoff.step(0.0)
            if delay_s is not None:
                self._in(delay_s + STEP_S * self._process.world.rng.random())


class CheckedBlockCopier(BlockCopier):
    """A `BlockCopier` whose copies from and into the engine's blocks are looked at."""

    def __init__(self, process: SimProcess, pool: StoreAccess) -> None:
        super().__init__(pool.view, pool.entry_format)
        self._process = process

    def gather(
        self,
        batch: Sequence[TokenSegment],
        table: BlockTable,
        after: StreamPosition | None = None,
    ) -> list[EntryBodies]:
        """See `BlockCopier`."""
        process = self._process
        process.checker.pooling.check_gather(process, self._blocks(batch, table, batch[0].start))
        return super().gather(batch, table, after)

    def scatter(
        self,
        found: Sequence[EntryBodies],
        batch: Sequence[TokenSegment],
        *,
        start: int,
        table: BlockTable,
        after: StreamPosition | None = None,
    ) -> None:
        """See `BlockCopier`."""
        process = self._process
        blocks = self._blocks(batch, table, max(start, batch[0].start))
        process.checker.pooling.check_scatter(process, blocks)
        super().scatter(found, batch, start=start, table=table, after=after)

    def _blocks(self, batch: Sequence[TokenSegment], table: BlockTable, start: int) -> set[int]:
        held = table.slice_tokens(start, batch[-1].stop, self._layout.block_size)
        return set(held.blocks.tolist())


def watch(handoff: StoreHandoff, process: SimProcess, pool: StoreAccess) -> None:
    """Have a store handoff's copies looked at. Before `open`."""
    handoff._copier = CheckedBlockCopier(process, pool)  # noqa: SLF001 -- no one else replaces it
