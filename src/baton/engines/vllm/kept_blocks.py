"""Blocks of finished requests that are being copied into the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.engines.vllm.step_orders import VllmRequestId

VllmBlock = TypeVar("VllmBlock")

FEW_OF_MOST: Final = 4
"""A quarter of the most is held even where no block is free."""


class CountedBlocks(Protocol[VllmBlock]):
    """What is used of vLLM's `BlockPool`: it counts the references to each block.

    A block that is only cached is free.
    """

    blocks: Sequence[VllmBlock]

    def get_num_free_blocks(self) -> int:
        """Blocks that the next request may have."""
        ...

    def touch(self, blocks: Sequence[VllmBlock]) -> None:
        """Add a reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[VllmBlock]) -> None:
        """Drop a reference to each; those without one are the next requests', the first first."""
        ...


@dataclass(slots=True)
class _Kept:
    blocks: list[object]
    num_left: int


class KeptBlocks:
    """Owned by the scheduler's thread.

    Each has a reference of its own in vLLM's pool, so that vLLM ends the request as any other and
    need not make steps until the copy is done: an idle server stays idle. What was copied meanwhile
    is released in the next step. They are never more than are free besides, or a few, unless vLLM
    waits for the copies: a pool that requests fill is where most is evicted, and so where a store
    is needed.
    """

    def __init__(self, max_blocks: int, num_ranks: int) -> None:
        self._max_blocks, self._num_ranks = max_blocks, num_ranks
        self._pool: CountedBlocks[object] | None = None
        self._kept: dict[VllmRequestId, _Kept] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request: VllmRequestId) -> bool:
        return request in self._kept

    def bind(self, pool: CountedBlocks[object]) -> None:
        """The blocks of vLLM are known from now on."""
        self._pool = pool

    @property
    def is_crowded(self) -> bool:
        """Whether fewer blocks are free than may be held: requests wait for room, or will soon."""
        return self._pool is not None and self._pool.get_num_free_blocks() < self._max_blocks

    def count_room(self, *, is_brief: bool = False) -> int:
        """How many blocks can be held now: of a longer prompt the beginning is kept.

        `is_brief`: they are vLLM's again before it looks for blocks.
        """
        if self._pool is None:
            return 0
        few = self._max_blocks if is_brief else self._max_blocks // FEW_OF_MOST
        num_free = self._pool.get_num_free_blocks()
        return max(0, min(self._max_blocks, max(num_free, few)) - self._num_blocks)

    def hold(self, request: VllmRequestId, blocks: Sequence[int]) -> None:
        """Hold a finished request's blocks until every rank reports it.

        There is room for them, and none are held under its id.
        """
        if self._pool is None:
            raise AssertionError("vLLM's blocks are not known")
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)
        self._kept[request] = _Kept(held, self._num_ranks)
        self._num_blocks += len(held)

    def kept(self, request: VllmRequestId) -> None:
        """A rank reports that it has copied them, or will not."""
        kept = self._kept.get(request)
        if kept is None or self._pool is None:
            return
        kept.num_left -= 1
        if not kept.num_left:
            del self._kept[request]
            self._num_blocks -= len(kept.blocks)
            self._pool.free_blocks(reversed(kept.blocks))  # as vLLM does: the beginning stays
