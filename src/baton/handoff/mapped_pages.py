"""The pages of a KV view that one handoff has, and the engine's blocks behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.handoff.staging import make_staging_pool
from baton.kv.copies import BlockTable, PagedSequence

if TYPE_CHECKING:
    from baton.handoff.kv_views import KVView
    from baton.handoff.staging import Holder, StagingPool


@dataclass(frozen=True, slots=True)
class MappedPages:
    """Page `pages.blocks[i]` of the view's region stands for `blocks.blocks[i]` of the engine's.

    Without staging both are the same, and `gather` and `scatter` have nothing to do. Both tables
    have the same `first`.
    """

    view: KVView
    pages: BlockTable
    blocks: BlockTable

    @property
    def sequence(self) -> PagedSequence:
        """The handoff's KV as it lies in the view's region."""
        return PagedSequence(self.view.layout, self.pages)

    def gather(self, layer: int, start: int, stop: int) -> None:
        """The engine's blocks of tokens `[start, stop)` → pages of the view."""
        if self.view.staging is not None:
            some = self._between(start, stop)
            self.view.staging.gather(layer, self.blocks.blocks[some], self.pages.blocks[some])

    def scatter(self, layer: int, start: int, stop: int) -> None:
        """Pages of the view that hold tokens `[start, stop)` → the engine's blocks."""
        if self.view.staging is not None:
            some = self._between(start, stop)
            self.view.staging.scatter(layer, self.pages.blocks[some], self.blocks.blocks[some])

    def pages_of(self, start: int, stop: int) -> BlockTable:
        """The pages that hold tokens `[start, stop)`."""
        some = self._between(start, stop)
        return BlockTable(self.pages.first + some.start, self.pages.blocks[some])

    def _between(self, start: int, stop: int) -> slice:
        size, first = self.view.layout.block_size, self.pages.first
        return slice(start // size - first, -(-stop // size) - first)


@dataclass(frozen=True, slots=True)
class RegisteredView:
    """A KV view as the agent works with it, with its staging pool if it has one."""

    view: KVView
    staging_pool: StagingPool | None

    @classmethod
    def open(cls, view: KVView) -> RegisteredView:
        """At first, no handoff holds a page of it."""
        return cls(view, make_staging_pool(view))

    @property
    def is_staged(self) -> bool:
        """Whether its pages are not the engine's own."""
        return self.staging_pool is not None

    @property
    def page_tokens(self) -> int:
        """KV moves in multiples of that many tokens: whole pages, where only those make sense."""
        moves_whole_pages = self.is_staged or self.view.layout.order == "opaque"
        return self.view.layout.block_size if moves_whole_pages else 1

    def try_map_pages(self, holder: Holder, blocks: BlockTable) -> MappedPages | None:
        """Pages for all of these blocks of the engine's; None while none are free.

        Raises:
            HandoffError: there will never be so many.
        """
        if self.staging_pool is None:
            return MappedPages(self.view, blocks, blocks)
        pages = self.staging_pool.try_reserve(holder, len(blocks.blocks))
        if pages is None:
            return None
        return MappedPages(self.view, BlockTable(blocks.first, pages), blocks)

    def release(self, holder: Holder) -> None:
        """A handoff is over. Idempotent."""
        if self.staging_pool is not None:
            self.staging_pool.release(holder)

    def take_granted(self) -> list[Holder]:
        """Whose turn has come since the last call."""
        return [] if self.staging_pool is None else self.staging_pool.take_granted()
