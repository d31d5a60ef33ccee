"""The block pool against a model that keeps a plain record of each block."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from baton.errors import BlockStateError
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes
from baton.kv.pool import BlockPool
from tests.examples import examples

if TYPE_CHECKING:
    from baton.kv.blocks import InFlightBlocks, QuarantinedBlocks, QuiescentBlocks, ReservedBlocks

NUM_BLOCKS = 9
CHAIN = compute_block_hashes(HashDomain("m", "", 1), np.arange(6, dtype=np.int32))


class PoolMachine(RuleBasedStateMachine):
    """`held` counts references, `contents` names what is in a block, `away` is with guards."""

    reserved = Bundle("reserved")
    in_flight = Bundle("in_flight")
    quiescent = Bundle("quiescent")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: Counter[int] = Counter()
        self.contents: dict[int, BlockHash] = {}
        self.published: dict[BlockHash, int] = {}
        self.lru: list[int] = []
        self.away: dict[str, set[int]] = {
            "reserved": set(),
            "in_flight": set(),
            "quarantined": set(),
        }

    def num_available(self) -> int:
        busy = set(self.held) | set().union(*self.away.values())
        return NUM_BLOCKS - len(busy)

    def taken(self, blocks: list[int]) -> None:
        """These were handed out: nobody held them, and they were evicted in order of age."""
        assert not set(blocks) & (set(self.held) | set().union(*self.away.values()))
        evicted = [block for block in self.lru if block in blocks]
        assert evicted == self.lru[: len(evicted)]
        for block in evicted:
            self.lru.remove(block)
            del self.published[self.contents[block]]
        for block in blocks:
            self.contents.pop(block, None)

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks: int) -> None:
        blocks = self.pool.try_allocate(num_blocks)
        if num_blocks > self.num_available():
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == num_blocks
        self.taken(blocks)
        self.held.update(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        block_hash = data.draw(st.sampled_from(CHAIN))
        known = self.contents.get(block)
        if known is not None and known != block_hash:
            with pytest.raises(BlockStateError):
                self.pool.publish(block, block_hash)
            return
        self.pool.publish(block, block_hash)
        if block_hash not in self.published:
            self.published[block_hash] = block
            self.contents[block] = block_hash

    @rule(num_hashes=st.integers(0, len(CHAIN)))
    def acquire(self, num_hashes: int) -> None:
        expected = []
        for block_hash in CHAIN[:num_hashes]:
            if block_hash not in self.published:
                break
            expected.append(self.published[block_hash])
        assert self.pool.find_cached(CHAIN[:num_hashes]) == len(expected)
        assert self.pool.acquire_cached(CHAIN[:num_hashes]) == expected
        self.held.update(expected)
        self.lru = [block for block in self.lru if block not in expected]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self.contents:
                    self.lru.append(block)

    @rule(data=st.data())
    def release_what_nobody_holds(self, data: st.DataObject) -> None:
        loose = sorted(set(range(NUM_BLOCKS)) - set(self.held))
        if loose:
            with pytest.raises(BlockStateError):
                self.pool.release([data.draw(st.sampled_from(loose))])

    @rule(target=reserved, num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def reserve(self, num_blocks: int) -> object:
        guard = self.pool.try_reserve(num_blocks)
        if num_blocks > self.num_available():
            assert guard is None
            return multiple()
        assert guard is not None
        self.taken(list(guard.blocks))
        self.away["reserved"].update(guard.blocks)
        return guard

    @rule(guard=consumes(reserved))
    def leave(self, guard: ReservedBlocks) -> None:
        self.away["reserved"].difference_update(guard.blocks)
        with guard:
            pass
        with pytest.raises(BlockStateError):
            guard.grant()

    @rule(target=in_flight, guard=consumes(reserved))
    def grant(self, guard: ReservedBlocks) -> InFlightBlocks:
        blocks = guard.blocks
        with guard:
            flying = guard.grant()
        self.away["reserved"].difference_update(blocks)
        self.away["in_flight"].update(blocks)
        assert flying.blocks == blocks
        with pytest.raises(BlockStateError):
            guard.release()
        return flying

    @rule(target=quiescent, guard=consumes(in_flight))
    def settle(self, guard: InFlightBlocks) -> QuiescentBlocks:
        still = guard.settle()
        with pytest.raises(BlockStateError):
            guard.quarantine()
        return still

    @rule(target=quarantined, guard=consumes(in_flight))
    def quarantine(self, guard: InFlightBlocks) -> QuarantinedBlocks:
        self.away["in_flight"].difference_update(guard.blocks)
        self.away["quarantined"].update(guard.blocks)
        return guard.quarantine()

    @rule(guard=consumes(quiescent))
    def accept(self, guard: QuiescentBlocks) -> None:
        blocks = guard.accept()
        self.away["in_flight"].difference_update(blocks)
        self.held.update(blocks)
        with pytest.raises(BlockStateError):
            guard.accept()

    @rule(guard=consumes(quarantined))
    def end_quarantine(self, guard: QuarantinedBlocks) -> None:
        self.away["quarantined"].difference_update(guard.blocks)
        guard.release()
        with pytest.raises(BlockStateError):
            guard.release()

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == self.num_available()
        assert self.pool.num_cached == len(self.published)
        assert self.pool.num_reserved == len(self.away["reserved"])
        assert self.pool.num_quarantined == len(self.away["quarantined"])
        assert self.pool.num_in_flight <= len(self.away["in_flight"])

    def teardown(self) -> None:
        """Whatever happened, releasing everything held leaves nothing behind."""
        self.pool.release([block for block, count in self.held.items() for _ in range(count)])
        busy = set().union(*self.away.values())
        assert self.pool.num_free == NUM_BLOCKS - len(busy)


PoolMachine.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=40, deadline=None
)
TestPool = PoolMachine.TestCase
