"""The block pool: who holds which block, and which blocks are known by hash.

A ready block has references; a *cached* one also has a hash, and is found again by it. A cached
block without references is evictable: it keeps its contents until room is needed, the least
recently used one first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from baton.errors import BlockStateError, ConfigError
from baton.kv.blocks import BlockLedger, BlockState, ReservedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.kv.identity import BlockHash


class BlockPool:
    """The blocks of one engine, ids `[0, num_blocks)`. Owned by the engine's thread.

    `on_evict` is called with each hash by which a block can no longer be found.

    Raises:
        ConfigError: `num_blocks` is below 1.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[BlockHash], None] | None = None
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool of {num_blocks} blocks")
        self._ledger = BlockLedger(num_blocks)
        self._num_references = [0] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._ledger.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `try_allocate` and `try_reserve` can hand out: free or evictable."""
        return self._ledger.count(BlockState.FREE) + self._ledger.count(BlockState.EVICTABLE)

    @property
    def num_reserved(self) -> int:
        """Blocks set aside for handoffs that were not granted yet."""
        return self._ledger.count(BlockState.RESERVED)

    @property
    def num_in_flight(self) -> int:
        """Blocks that a peer may be writing for a live handoff."""
        return self._ledger.count(BlockState.IN_FLIGHT)

    @property
    def num_quarantined(self) -> int:
        """Blocks of aborted handoffs into which a posted write may still land."""
        return self._ledger.count(BlockState.QUARANTINED)

    @property
    def num_cached(self) -> int:
        """Blocks that are known by hash, referenced or not."""
        return len(self._block_of)

    def find_cached(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are cached: stops at the first miss, takes no reference."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return index
        return len(hashes)

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Take a reference on the block of each leading cached hash; the blocks, in order."""
        blocks = [self._block_of[known] for known in hashes[: self.find_cached(hashes)]]
        for block in blocks:
            if self._num_references[block] == 0:
                del self._evictable[block]
                self._ledger.move((block,), BlockState.EVICTABLE, BlockState.READY)
            self._num_references[block] += 1
        return blocks

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """Ready blocks with undefined contents, one reference each; None for want of room."""
        blocks = self._try_take(num_blocks, BlockState.READY)
        if blocks is not None:
            self._adopt(blocks)
        return blocks

    def try_reserve(self, num_blocks: int) -> ReservedBlocks | None:
        """Set blocks aside for a handoff; None for want of room."""
        blocks = self._try_take(num_blocks, BlockState.RESERVED)
        return None if blocks is None else ReservedBlocks(blocks, self._ledger, self._adopt)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """From now on a full ready block can be found by its hash.

        Where another block already has this hash, that one keeps it and nothing changes.

        Raises:
            BlockStateError: `block` is not ready, or is known by another hash.
        """
        if self._ledger.state(block) is not BlockState.READY:
            raise BlockStateError(f"block {block} is not ready: it cannot be published")
        if self._hash_of.get(block, block_hash) != block_hash:
            raise BlockStateError(f"block {block} is already known by another hash")
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block. `blocks` are in the order of their tokens.

        They are released last first, so that a prefix outlives its tails in the cache.

        Raises:
            BlockStateError: a block has no reference to drop; the ones after it were released.
        """
        for block in reversed(blocks):
            if self._ledger.state(block) is not BlockState.READY:
                raise BlockStateError(f"block {block} has no reference to drop")
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._retire(block)

    def check_invariants(self) -> None:
        """Raise AssertionError where two views of one fact disagree."""
        self._ledger.check_invariants()
        for block in range(self.num_blocks):
            ready = self._ledger.state(block) is BlockState.READY
            if ready != (self._num_references[block] >= 1) or self._num_references[block] < 0:
                raise AssertionError(f"block {block}: {self._num_references[block]} references")
            if (block in self._evictable) != (self._ledger.state(block) is BlockState.EVICTABLE):
                raise AssertionError(f"block {block}: the LRU disagrees with its state")
        if self._block_of != {known: block for block, known in self._hash_of.items()}:
            raise AssertionError("hashes and blocks are not one to one")
        for block in self._hash_of:
            if self._ledger.state(block) not in {BlockState.READY, BlockState.EVICTABLE}:
                raise AssertionError(f"block {block} is cached but not ready")
        if not self._hash_of.keys() >= self._evictable.keys():
            raise AssertionError("an evictable block has no hash")

    def _try_take(self, num_blocks: int, target: BlockState) -> list[int] | None:
        if not 0 <= num_blocks <= self.num_free:
            return None
        for _ in range(num_blocks - self._ledger.count(BlockState.FREE)):
            self._evict()
        return self._ledger.take_free(num_blocks, target)

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        # The hash goes before the block does: no lookup may find it once its contents can change.
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._on_evict is not None:
            self._on_evict(block_hash)
        self._ledger.move((block,), BlockState.EVICTABLE, BlockState.FREE)

    def _adopt(self, blocks: list[int]) -> None:
        for block in blocks:
            self._num_references[block] = 1

    def _retire(self, block: int) -> None:
        if block in self._hash_of:
            self._ledger.move((block,), BlockState.READY, BlockState.EVICTABLE)
            self._evictable[block] = None
        else:
            self._ledger.move((block,), BlockState.READY, BlockState.FREE)
