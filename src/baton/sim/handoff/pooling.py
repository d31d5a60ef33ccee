"""The pool's half of one life: the production desk without its thread, and its copies watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.handoff.pooling.carrying import Carrier
from baton.handoff.pooling.pool import Pool
from baton.store.counting import CountedTier
from baton.store.form import EntryForm
from baton.store.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.faces import Face
    from baton.handoff.pooling.carrying import Bodies
    from baton.handoff.pooling.desk import PoolDesk
    from baton.handoff.pooling.pieces import Piece
    from baton.kv.copies import BlockTable
    from baton.sim.handoff.process import SimProcess

STEP_S: Final = 0.001
"""At most: a batch of a simulated prompt is all of it."""


def make_pool(process: SimProcess, face: Face) -> Pool | None:
    """What a worker takes part in mode pool with; None in a cluster without a store."""
    world = process.world
    if world.shelf is None or world.schedule.store is None:
        return None
    size = world.schedule.store.block_size
    store = TieredStore([CountedTier("shelf", world.shelf)])
    return Pool(store, EntryForm.of(face.layout, block_size=size, num_parts=1), face)


class PoolDriver:
    """Has the desk take its steps: soon after each command, and as long as it is busy."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._steps_soon = False

    def wake(self) -> None:
        """Something was asked of it."""
        self._in(STEP_S * self._process.world.noise.random())

    def _in(self, delay_s: float) -> None:
        if not self._steps_soon:
            self._steps_soon = True
            process = self._process
            process.world.timeline.after(delay_s, lambda: process.when_awake(self._step))

    def _step(self) -> None:
        self._steps_soon = False
        desk = self._process.agent.pool_desk
        if desk is not None:
            patience_s = desk.step(0.0)
            if patience_s is not None:
                self._in(patience_s + STEP_S * self._process.world.noise.random())


class WatchedCarrier(Carrier):
    """A `Carrier` whose copies from and into the engine's blocks are looked at."""

    def __init__(self, process: SimProcess, pool: Pool) -> None:
        super().__init__(pool.face, pool.form)
        self._process = process

    def gather(self, batch: Sequence[Piece], table: BlockTable) -> list[Bodies]:
        """See `Carrier`."""
        process = self._process
        process.checker.pooling.gathered(process, self._blocks(batch, table, batch[0].start))
        return super().gather(batch, table)

    def scatter(
        self, found: Sequence[Bodies], batch: Sequence[Piece], *, start: int, table: BlockTable
    ) -> None:
        """See `Carrier`."""
        process = self._process
        blocks = self._blocks(batch, table, max(start, batch[0].start))
        process.checker.pooling.scattered(process, blocks)
        super().scatter(found, batch, start=start, table=table)

    def _blocks(self, batch: Sequence[Piece], table: BlockTable, start: int) -> set[int]:
        size = self._layout.block_size
        first, stop = start // size, -(-batch[-1].stop // size)
        return set(table.blocks[first - table.first : stop - table.first].tolist())


def watch(desk: PoolDesk, process: SimProcess, pool: Pool) -> None:
    """Have a desk's copies looked at. Before `open`."""
    desk._carrier = WatchedCarrier(process, pool)  # noqa: SLF001 -- no one else replaces it
