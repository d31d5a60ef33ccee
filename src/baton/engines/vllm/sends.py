"""Worker side: prompts whose KV is offered, and the blocks that vLLM must not reuse until then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.auth.ticket import Ticket
    from baton.engines.vllm.step_orders import Progress, StartSend, VllmRequestId
    from baton.errors import HandoffError
    from baton.ids import TicketId
    from baton.telemetry.trace import RequestSpan

UNALLOCATED = -1
"""Stands for a block that vLLM has not allocated yet: no transport accepts it as a page."""


@dataclass(slots=True)
class SendInProgress:
    """One offered prompt. `table`, int64, one entry a block, grows into place chunk by chunk.

    `live` are the tickets whose handoff has not ended. The agent reads an entry of `table` only
    once a layer of its block was announced as ready.
    """

    offer: StartSend
    tickets: tuple[Ticket, ...]
    table: NDArray[np.int64]
    traces: dict[TicketId, RequestSpan]
    live: set[TicketId]
    failure: HandoffError | None = None

    def extend(self, progress: Progress) -> None:
        """Enter the blocks that joined the table."""
        first = progress.first_block
        self.table[first : first + len(progress.blocks)] = progress.blocks


@dataclass(slots=True)
class SendTable:
    """All of them, found by request and by ticket. Owned by vLLM's worker thread."""

    _sends: dict[VllmRequestId, SendInProgress] = field(default_factory=dict)
    _request_of: dict[TicketId, VllmRequestId] = field(default_factory=dict)
    _is_generated: set[VllmRequestId] = field(default_factory=set)

    @property
    def num_held(self) -> int:
        """Finished requests whose blocks are held for a handoff."""
        return len(self._is_generated)

    @property
    def held(self) -> tuple[TicketId, ...]:
        """Tickets for which finished requests' blocks are held, the oldest first."""
        generated = (s for r, s in self._sends.items() if r in self._is_generated)
        return tuple(t.id for send in generated for t in send.tickets if t.id in send.live)

    def add(self, send: SendInProgress) -> None:
        """Follow an offer."""
        request = send.offer.request
        self._sends[request] = send
        for ticket in send.live:
            self._request_of[ticket] = request

    def find(self, request: VllmRequestId) -> SendInProgress | None:
        """The offer of a request."""
        return self._sends.get(request)

    def settle(self, ticket: TicketId, error: HandoffError | None) -> SendInProgress | None:
        """One ticket's handoff has ended, `error` if not well. Its offer, or None if unknown."""
        request = self._request_of.pop(ticket, None)
        if request is None:
            return None
        send = self._sends[request]
        send.live.discard(ticket)
        send.failure = send.failure or error
        return send

    def settle_all(self, error: HandoffError) -> list[SendInProgress]:
        """The agent is gone: every handoff has ended."""
        settled = (self.settle(ticket, error) for ticket in tuple(self._request_of))
        return [send for send in settled if send is not None and not send.live]

    def finish(self, requests: set[VllmRequestId]) -> None:
        """The scheduler holds these requests' blocks, as far as they are offered."""
        self._is_generated |= requests & self._sends.keys()

    def take_released(self) -> set[VllmRequestId]:
        """Finished requests whose handoffs have all ended: each is returned once."""
        released = {request for request in self._is_generated if not self._sends[request].live}
        for request in released:
            self.drop(request)
        return released

    def drop(self, request: VllmRequestId) -> None:
        """Forget an offer."""
        send = self._sends.pop(request, None)
        self._is_generated.discard(request)
        for ticket in send.live if send is not None else ():
            self._request_of.pop(ticket, None)


def empty_table(num_blocks: int) -> NDArray[np.int64]:
    """A table of blocks that are not allocated yet."""
    return np.full(num_blocks, UNALLOCATED, dtype=np.int64)


def stamp_sent(trace: RequestSpan, outcome: str) -> None:
    """Note how a prefill request's handoff ended."""
    if trace.outcome is None:
        trace.outcome = outcome if Stamp.PREFILL_DONE in trace.stamps else "failed"
