"""Prefill's half of one handoff through the store. Pure.

offered ──layers ready──► pieces to keep ──kept, and finished──► left a note, over
   └──failed, aborted, too late──────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.session.deadline import extend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Instant
    from baton.handoff.interface import SampledToken, SendOrder
    from baton.handoff.pool_mode.token_segments import TokenSegment


class StoreWrite:
    """What of one prompt is computed, and what of that is kept. `segments` cover the prompt."""

    def __init__(
        self,
        order: SendOrder,
        segments: Sequence[TokenSegment],
        *,
        num_layers: int,
        deadline: Instant,
    ) -> None:
        self.order, self.deadline = order, deadline
        self.first_token: SampledToken | None = None
        self._segments = segments
        self._ready = np.full(num_layers, order.num_ready_tokens, dtype=np.int64)
        self._num_stored = 0
        self._is_prefill_done = False

    @property
    def num_stored_tokens(self) -> int:
        """Tokens `[0, n)` that are in the store."""
        return self._segments[self._num_stored - 1].stop if self._num_stored else 0

    @property
    def is_done(self) -> bool:
        """Whether prefill is over and all of it is kept."""
        return self._is_prefill_done and self._num_stored == len(self._segments)

    def mark_layer_ready(self, layer: int, stop: int) -> None:
        """Tokens `[0, stop)` of a layer are in place."""
        self._ready[layer] = max(self._ready[layer], stop)

    def mark_prefill_done(self, first_token: SampledToken | None) -> None:
        """Nothing more will be computed."""
        self._is_prefill_done, self.first_token = True, first_token

    def extend_deadline(self, instant: Instant) -> None:
        """The engine works on it: wait for longer, but not beyond the request's deadline."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def pending_segments(self) -> Sequence[TokenSegment]:
        """What is complete in all layers and not kept yet, in order."""
        ready = int(self._ready.min())
        stop = self._num_stored
        while stop < len(self._segments) and self._segments[stop].stop <= ready:
            stop += 1
        return self._segments[self._num_stored : stop]

    def add_stored(self, num_segments: int) -> None:
        """So many of those are in the store."""
        self._num_stored += num_segments

    def check_invariants(self) -> None:
        """Raise AssertionError where more is kept than was computed."""
        if not 0 <= self._num_stored <= len(self._segments):
            raise AssertionError("more pieces are kept than there are")
        if self.num_stored_tokens > int(self._ready.min()):
            raise AssertionError("tokens are kept that were not computed")
