"""How full vLLM's KV cache is: waiting requests, held prompts, free blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton.engines.stall_detector import StallDetector
from baton.engines.vllm.step_orders import Occupancy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Instant
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


class VllmBlockPool(Protocol):
    """What is used of vLLM's `BlockPool`. A block that is only cached is free."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Blocks that the next request may have."""
        ...


class SchedulerPressure:
    """Owned by the scheduler's thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pool: VllmBlockPool | None = None
        self._waiting: set[VllmRequestId] = set()
        self._blocked: set[VllmRequestId] = set()
        self._held: set[VllmRequestId] = set()
        self._stall_detector = StallDetector()
        self._last_reported: Occupancy | None = None

    def bind(self, pool: VllmBlockPool) -> None:
        """The blocks of vLLM are known from now on."""
        self._pool = pool

    def arrived(self, request: VllmRequestId) -> None:
        """A request has joined the queue."""
        self._waiting.add(request)

    def asked(self, request: VllmRequestId) -> None:
        """A request would be admitted, if there is room for it."""
        self._waiting.add(request)
        self._blocked.add(request)

    def admitted(self, request: VllmRequestId) -> None:
        """A request has the blocks that it wanted."""
        self._leave(request)

    def held(self, request: VllmRequestId) -> None:
        """A finished request's blocks are held for its decode worker."""
        self._held.add(request)

    def ended(self, request: VllmRequestId) -> None:
        """A request is over."""
        self._leave(request)

    def released(self, requests: Iterable[VllmRequestId]) -> None:
        """The blocks of finished requests are vLLM's again."""
        self._held.difference_update(requests)

    def step(self, now: Instant, *, preempted: Iterable[VllmRequestId], is_busy: bool) -> bool:
        """A step is planned: whether an offer is to be withdrawn, for the room that it holds.

        `preempted` lost their blocks to it; `is_busy`: it computes something.
        """
        self._waiting.update(preempted)
        lacks_room, self._blocked = bool(self._blocked), set()
        no_progress = lacks_room and bool(self._held) and not is_busy
        return self._stall_detector.should_cancel(now, no_progress=no_progress)

    def report(self) -> Occupancy | None:
        """How full it is; None while vLLM's blocks are not known."""
        self._last_reported = self._measure()
        return self._last_reported

    @property
    def has_changed(self) -> bool:
        """Whether what was told last is not true any more."""
        return self._last_reported is not None and self._last_reported != self._measure()

    def _measure(self) -> Occupancy | None:
        pool = self._pool
        if pool is None:
            return None
        # One block is vLLM's own: it stands for those that a window has left behind.
        num_blocks = pool.num_gpu_blocks - 1
        num_free = pool.get_num_free_blocks()
        return Occupancy(len(self._waiting), num_blocks, num_free, self._block_size)

    def _leave(self, request: VllmRequestId) -> None:
        self._waiting.discard(request)
        self._blocked.discard(request)
