"""Prompts that vLLM keeps for decode workers to pull: how many blocks they may have together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.engines.vllm.step_orders import VllmRequestId


class HeldPrompts:
    """Owned by the scheduler's thread. A prompt counts from its arrival on."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[VllmRequestId, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that they have, or will."""
        return sum(self._blocks.values())

    def try_add(self, request: VllmRequestId, num_blocks: int) -> bool:
        """Take a prompt in, if there is room for it beside the others."""
        if self.num_blocks + num_blocks > self._max_blocks:
            return False
        self._blocks[request] = num_blocks
        return True

    def drop(self, requests: Iterable[VllmRequestId]) -> None:
        """Their blocks are vLLM's again. Others are ignored."""
        for request in requests:
            self._blocks.pop(request, None)
