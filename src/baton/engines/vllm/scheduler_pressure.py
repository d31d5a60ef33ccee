"""How full vLLM is, as its scheduler sees it, and whether nothing goes on for want of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from baton.engines.stall_detector import StallDetector
from baton.engines.vllm.kept_blocks import CountedBlocks
from baton.engines.vllm.step_orders import Occupancy, VllmRequestId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Instant


class VllmBlockPool(CountedBlocks[object], Protocol):
    """What is used of vLLM's `BlockPool`."""

    num_gpu_blocks: int


NUM_OWN_BLOCKS: Final = 1
"""Of vLLM's, never free: it stands for those that a window has left behind."""
TOLERATED_PART: Final = 32
"""A report of free blocks may be wrong by this part of all blocks, while vLLM is idle."""


class SchedulerPressure:
    """Owned by the scheduler's thread."""

    def __init__(self, block_size: int, max_running: int | None = None) -> None:
        self._block_size, self._max_running = block_size, max_running
        self._pool: VllmBlockPool | None = None
        self._waiting: set[VllmRequestId] = set()
        self._blocked: set[VllmRequestId] = set()
        self._held: set[VllmRequestId] = set()
        self._stall_detector = StallDetector()
        self._last_reported: Occupancy | None = None
        self._why_no_handoffs: str | None = None

    def bind(self, pool: VllmBlockPool) -> None:
        """The blocks of vLLM are known from now on."""
        self._pool = pool

    def refuse_handoffs(self, reason: str) -> None:
        """They are refused from now on, which is reported with the next step that vLLM makes.

        `is_report_outdated` asks for none: while a connector does, vLLM does not release the
        memory of its KV after a pause.
        """
        self._why_no_handoffs = reason

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
        no_progress = bool(self._blocked and self._held) and not is_busy
        self._blocked.clear()
        return self._stall_detector.should_cancel(now, no_progress=no_progress)

    def take_news(self) -> Occupancy | None:
        """How full it is; None where that was reported, and while vLLM's blocks are not known."""
        pool, reported = self._pool, self._last_reported
        if pool is None:
            return None
        num_waiting, num_free = len(self._waiting), pool.get_num_free_blocks()
        why_no_handoffs = self._why_no_handoffs
        if reported is not None and (
            (reported.num_waiting, reported.num_free_blocks) == (num_waiting, num_free)
            and reported.why_no_handoffs is why_no_handoffs
        ):
            return None
        self._last_reported = Occupancy(
            num_waiting,
            pool.num_gpu_blocks - NUM_OWN_BLOCKS,
            num_free,
            self._block_size,
            self._max_running,
            why_no_handoffs,
        )
        return self._last_reported

    @property
    def is_report_outdated(self) -> bool:
        """Whether the last report is so wrong that it is worth a step of its own."""
        pool, reported = self._pool, self._last_reported
        if pool is None or reported is None:
            return False
        num_off = abs(pool.get_num_free_blocks() - reported.num_free_blocks)
        is_far_off = num_off * TOLERATED_PART > reported.num_blocks
        return is_far_off or reported.num_waiting != len(self._waiting)

    @property
    def has_used_blocks(self) -> bool:
        """Whether requests or copies hold blocks of vLLM's; False while these are not known."""
        pool = self._pool
        if pool is None:
            return False
        return pool.get_num_free_blocks() < pool.num_gpu_blocks - NUM_OWN_BLOCKS

    def _leave(self, request: VllmRequestId) -> None:
        self._waiting.discard(request)
        self._blocked.discard(request)
