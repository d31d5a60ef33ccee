"""KV on its way through the store, as an onlooker sees it: I2 and I8 of mode pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kv.blocks import BlockState
from baton.sim.handoff import internals
from baton.sim.handoff.memory import NUM_LAYERS, extend_chain
from baton.sim.handoff.violation import ViolationError

if TYPE_CHECKING:
    from baton.handoff.interface import KVLanded, ReceiveOrder
    from baton.sim.handoff.process import SimProcess


@dataclass(slots=True)
class PoolChecker:
    """All copies between stores and engines."""

    def check_gather(self, process: SimProcess, blocks: set[int]) -> None:
        """I2: blocks are copied into the store: they must be held for a handoff."""
        pinned_blocks = process.scheduler.pinned_blocks
        held = (
            internals.outgoing_blocks(pinned_blocks, ticket)
            for ticket in pinned_blocks.sending_tickets
        )
        if not blocks <= {block for some in held for block in some}:
            raise ViolationError("I2", f"{process.name}: blocks are kept that were given back")

    def check_scatter(self, process: SimProcess, blocks: set[int]) -> None:
        """I2: bytes from the store are about to land in blocks."""
        states = {internals.state_of(process.scheduler, block) for block in blocks}
        if not states <= {BlockState.IN_FLIGHT, BlockState.QUARANTINED}:
            names = ", ".join(sorted(state.value for state in states))
            raise ViolationError("I2", f"{process.name}: entries land in blocks that are {names}")

    def check_landed(self, process: SimProcess, order: ReceiveOrder, landed: KVLanded) -> None:
        """I8: what came out of the store is the prompt's, whoever computed it."""
        if order.prompt_ids is None:
            return
        size, first = process.plan.block_size, order.blocks.first
        stop = order.num_tokens if landed.num_tokens is None else landed.num_tokens
        chain: list[int] = []
        extend_chain(chain, order.prompt_ids.tolist())
        for layer in range(NUM_LAYERS):
            wrong = process.pages.find_wrong(
                layer, order.blocks.blocks.tolist(), chain[first * size :], stop - first * size
            )
            if wrong is not None and wrong + first * size >= order.start:
                at = f"layer {layer}, token {wrong + first * size} of [{order.start}, {stop})"
                raise ViolationError("I8", f"{process.name}: the store gave KV of others: {at}")
