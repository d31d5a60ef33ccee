"""Decode's half of one handoff through the store. Pure.

waiting ──entries appear──► pieces in place ──all of them──► landed
   └──the marker is there, aborted, too late──► landed in part, or failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded
from baton.handoff.session.deadline import extend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Instant
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SampledToken
    from baton.handoff.pool_mode.completion_marker import CompletionMarker
    from baton.handoff.pool_mode.token_segments import TokenSegment
    from baton.handoff.tombstones import Tombstone


class StoreRead:
    """What of one prompt has come. `segments` cover the prompt; those before `start` are not read.

    `tombstone` states why nothing more will come, once that was reported; `marker` is the prefill
    worker's completion marker, once it was seen: it may be evicted before the entries are read.
    """

    def __init__(
        self, order: ReceiveOrder, segments: Sequence[TokenSegment], *, deadline: Instant
    ) -> None:
        self.order, self.deadline = order, deadline
        self.tombstone: Tombstone | None = None
        self.marker: CompletionMarker | None = None
        self._segments = tuple(segment for segment in segments if segment.stop > order.start)
        self._num_landed = 0

    @property
    def pending_segments(self) -> Sequence[TokenSegment]:
        """What is missing, in order."""
        return self._segments[self._num_landed :]

    @property
    def num_tokens(self) -> int:
        """Tokens `[0, n)` that are in place here."""
        if self._num_landed == 0:
            return self.order.start
        return self._segments[self._num_landed - 1].stop

    def extend_deadline(self, instant: Instant) -> None:
        """Its engine works on it: wait for longer, but not beyond the request's deadline."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def add_landed(self, num_segments: int) -> None:
        """So many of the missing pieces are in place, and are what was put."""
        self._num_landed += num_segments

    def complete(self, first_token: SampledToken | None) -> list[HandoffEvent]:
        """Everything is in place."""
        return [KVLanded(self.order.ticket.id, first_token)]

    def end_early(self, reason: str, stage: str) -> list[HandoffEvent]:
        """Nothing more will come: what is in place is of use, if it is anything."""
        ticket = self.order.ticket
        if self._num_landed:
            return [KVLanded(ticket.id, None, self.num_tokens)]
        error = HandoffError(reason, stage=stage, peer=ticket.prefill.worker)
        return [KVFailed(ticket.id, error), BlocksQuiescent(ticket.id)]
