"""What leaves the engine loop: updates for the worker, counts, the log of local recomputation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engines.interface import (
    EngineStats,
    FinishReason,
    NewToken,
    RequestFailed,
    TokensComputed,
)

if TYPE_CHECKING:
    from baton.engines.interface import EngineUpdate, UpdateSink
    from baton.engines.transformers.scheduler import Scheduler
    from baton.engines.transformers.sequence import Sequence
    from baton.errors import BatonError
    from baton.handoff.interface import SampledToken
    from baton.ids import RequestId
    from baton.protocol.worker_http import StoreLoads
    from baton.telemetry.metrics import HeldBlockSeconds

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenCounts:
    """Tokens counted since the start: see `EngineStats`."""

    computed: int = 0
    cached: int = 0
    received: int = 0
    output: int = 0


class UpdateQueue:
    """Updates since the last delivery. Owned by the engine's thread."""

    def __init__(self, sink: UpdateSink) -> None:
        self._sink = sink
        self._updates: list[EngineUpdate] = []
        self._degraded: set[str] = set()

    def add_token(
        self, sequence: Sequence, token: SampledToken, finish: FinishReason | None
    ) -> None:
        """Report a request's next token; `finish` if it is the last."""
        self._updates.append(
            NewToken(
                sequence.request.id,
                token,
                sequence.num_cached_tokens,
                finish,
                hidden=finish is FinishReason.STOP,
            )
        )

    def add_computed(self, sequence: Sequence) -> None:
        """Report that a standby request has the KV of all its tokens."""
        self._updates.append(TokensComputed(sequence.request.id, sequence.num_computed))

    def add_failure(self, request: RequestId, error: BatonError) -> None:
        """Report that a request has failed."""
        self._updates.append(RequestFailed(request, error))

    def deliver(self) -> None:
        """Pass the updates to the sink in one call, if there are any."""
        if self._updates:
            updates, self._updates = self._updates, []
            self._sink(updates)

    def log_degraded(self, error: BatonError) -> None:
        """Log, once per cause, that KV was not received and is computed here."""
        cause = f"{type(error).__name__} {getattr(error, 'stage', '')}"
        if cause not in self._degraded:
            self._degraded.add(cause)
            _log.warning("KV did not come and is computed here (logged once): %s", error)


def make_stats(
    scheduler: Scheduler,
    counts: TokenCounts,
    held_s: HeldBlockSeconds,
    store_loads: StoreLoads | None,
) -> EngineStats:
    """Counts of this moment."""
    pool, pinned_blocks = scheduler.pool, scheduler.pinned_blocks
    return EngineStats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_awaiting_kv=pinned_blocks.num_incoming,
        num_exported_blocks=scheduler.shared_blocks.num_exported_blocks,
        num_imported_blocks=scheduler.shared_blocks.num_imported_blocks,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_reserved_blocks=pool.num_reserved + pool.num_in_flight,
        num_quarantined_blocks=pool.num_quarantined,
        num_cached_blocks=pool.num_cached,
        num_preemptions=scheduler.num_preemptions,
        computed_prompt_tokens=counts.computed,
        cached_prompt_tokens=counts.cached,
        received_prompt_tokens=counts.received,
        output_tokens=counts.output,
        num_held_blocks=pinned_blocks.num_held_blocks,
        num_sending=pinned_blocks.num_sending,
        held_block_s=held_s,
        store_loads=store_loads,
    )
