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
    from baton.handoff.pooling.pieces import Piece


class Deposit:
    """What of one prompt is computed, and what of that is kept. `pieces` cover the prompt."""

    def __init__(
        self, order: SendOrder, pieces: Sequence[Piece], *, num_layers: int, deadline: Instant
    ) -> None:
        self.order, self.deadline = order, deadline
        self.first_token: SampledToken | None = None
        self._pieces = pieces
        self._ready = np.full(num_layers, order.num_ready_tokens, dtype=np.int64)
        self._num_kept = 0
        self._is_finished = False

    @property
    def num_kept_tokens(self) -> int:
        """Tokens `[0, n)` that are in the store."""
        return self._pieces[self._num_kept - 1].stop if self._num_kept else 0

    @property
    def is_done(self) -> bool:
        """Whether prefill is over and all of it is kept."""
        return self._is_finished and self._num_kept == len(self._pieces)

    def layer_ready(self, layer: int, stop: int) -> None:
        """Tokens `[0, stop)` of a layer are in place."""
        self._ready[layer] = max(self._ready[layer], stop)

    def finish(self, first_token: SampledToken | None) -> None:
        """Nothing more will be computed."""
        self._is_finished, self.first_token = True, first_token

    def wait_until(self, instant: Instant) -> None:
        """The engine works on it: wait for longer, but not beyond the request's deadline."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def next_pieces(self) -> Sequence[Piece]:
        """What is complete in all layers and not kept yet, in order."""
        ready = int(self._ready.min())
        stop = self._num_kept
        while stop < len(self._pieces) and self._pieces[stop].stop <= ready:
            stop += 1
        return self._pieces[self._num_kept : stop]

    def kept(self, num_pieces: int) -> None:
        """So many of those are in the store."""
        self._num_kept += num_pieces

    def check_invariants(self) -> None:
        """Raise AssertionError where more is kept than was computed."""
        if not 0 <= self._num_kept <= len(self._pieces):
            raise AssertionError("more pieces are kept than there are")
        if self.num_kept_tokens > int(self._ready.min()):
            raise AssertionError("tokens are kept that were not computed")
