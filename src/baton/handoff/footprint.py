"""The pages that one handoff has on a face, and the engine's blocks behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.handoff.staging import make_staging_pages
from baton.kv.copies import BlockTable, PagedSequence

if TYPE_CHECKING:
    from baton.handoff.faces import Face
    from baton.handoff.staging import Holder, StagingPages


@dataclass(frozen=True, slots=True)
class Footprint:
    """Page `pages.blocks[i]` of the face's region stands for `blocks.blocks[i]` of the engine's.

    Without staging both are the same, and `gather` and `scatter` have nothing to do. Both tables
    have the same `first`.
    """

    face: Face
    pages: BlockTable
    blocks: BlockTable

    @property
    def sequence(self) -> PagedSequence:
        """The handoff's KV as it lies in the face's region."""
        return PagedSequence(self.face.layout, self.pages)

    def gather(self, layer: int, start: int, stop: int) -> None:
        """The engine's blocks of tokens `[start, stop)` → pages of the face."""
        if self.face.staging is not None:
            some = self._between(start, stop)
            self.face.staging.gather(layer, self.blocks.blocks[some], self.pages.blocks[some])

    def scatter(self, layer: int, start: int, stop: int) -> None:
        """Pages of the face that hold tokens `[start, stop)` → the engine's blocks."""
        if self.face.staging is not None:
            some = self._between(start, stop)
            self.face.staging.scatter(layer, self.pages.blocks[some], self.blocks.blocks[some])

    def pages_of(self, start: int, stop: int) -> BlockTable:
        """The pages that hold tokens `[start, stop)`."""
        some = self._between(start, stop)
        return BlockTable(self.pages.first + some.start, self.pages.blocks[some])

    def _between(self, start: int, stop: int) -> slice:
        size, first = self.face.layout.block_size, self.pages.first
        return slice(start // size - first, -(-stop // size) - first)


@dataclass(frozen=True, slots=True)
class ServedFace:
    """A face as the agent works with it: with the pages that it may give away, if it has some."""

    face: Face
    staging_pages: StagingPages | None

    @classmethod
    def open(cls, face: Face) -> ServedFace:
        """At first, nobody holds a page of it."""
        return cls(face, make_staging_pages(face))

    @property
    def is_staged(self) -> bool:
        """Whether its pages are not the engine's own."""
        return self.staging_pages is not None

    @property
    def page_tokens(self) -> int:
        """KV moves in multiples of that many tokens: whole pages, where only those make sense."""
        moves_whole_pages = self.is_staged or self.face.layout.order == "opaque"
        return self.face.layout.block_size if moves_whole_pages else 1

    def try_lay(self, holder: Holder, blocks: BlockTable) -> Footprint | None:
        """Pages for all of these blocks of the engine's; None while none are free.

        Raises:
            HandoffError: there will never be so many.
        """
        if self.staging_pages is None:
            return Footprint(self.face, blocks, blocks)
        pages = self.staging_pages.ask(holder, len(blocks.blocks))
        if pages is None:
            return None
        return Footprint(self.face, BlockTable(blocks.first, pages), blocks)

    def give_back(self, holder: Holder) -> None:
        """A handoff is over. Idempotent."""
        if self.staging_pages is not None:
            self.staging_pages.give_back(holder)

    def take_served(self) -> list[Holder]:
        """Whose turn has come since the last call."""
        return [] if self.staging_pages is None else self.staging_pages.take_served()
