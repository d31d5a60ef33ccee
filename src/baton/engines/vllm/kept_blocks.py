"""Blocks of finished requests that are being copied into the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.engines.vllm.step_orders import VllmRequestId

VllmBlock = TypeVar("VllmBlock")


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
    is released in the next step. They are never more than are free besides.
    """

    def __init__(self, max_blocks: int, num_ranks: int) -> None:
        self._max_blocks, self._num_ranks = max_blocks, num_ranks
        self._pool: CountedBlocks[object] | None = None
        self._kept: dict[VllmRequestId, _Kept] = {}
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._kept)

    def bind(self, pool: CountedBlocks[object]) -> None:
        """The blocks of vLLM are known from now on."""
        self._pool = pool

    @property
    def max_blocks(self) -> int:
        """How many are held at most: of a longer prompt the beginning is kept."""
        return self._max_blocks

    def try_hold(self, request: VllmRequestId, blocks: Sequence[int]) -> bool:
        """Hold a finished request's blocks until every rank reports it, if there is room for it."""
        num_held = self._num_blocks + len(blocks)
        if self._pool is None or num_held > self._max_blocks:
            return False
        if num_held > self._pool.get_num_free_blocks():  # others wait for room, or will soon
            return False
        held = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(held)
        self._kept[request] = _Kept(held, self._num_ranks)
        self._num_blocks += len(held)
        return True

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
