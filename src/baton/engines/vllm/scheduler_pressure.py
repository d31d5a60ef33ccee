"""Who waits for room in vLLM's scheduler, what is held meanwhile, and how many blocks are free.

    arrived ─► waiting ─ asked about ─► wanting ─ admitted ─► (vLLM's) ─ preempted ─► waiting
                                           └ the step is planned: there was no room for it

vLLM asks a connector about the requests that it is about to admit, and about no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.engines.stall_detector import StallDetector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.clock import Instant
    from baton.engines.vllm.step_orders import VllmRequestId


class VllmBlockPool(Protocol):
    """What is used of vLLM's `BlockPool`. A block that is only cached is free."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Blocks that the next request may have."""
        ...


@dataclass(frozen=True, slots=True)
class Occupancy:
    """vLLM's queue and KV blocks, of `block_size` tokens each."""

    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int


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
