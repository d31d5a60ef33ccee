"""Worker side: prompts whose KV is on its way, and the blocks it goes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.engines.vllm.step_orders import StartReceive, VllmRequestId
    from baton.errors import HandoffError
    from baton.ids import TicketId
    from baton.telemetry.trace import RequestSpan


@dataclass(slots=True)
class LoadInProgress:
    """One expected prompt. `live` are the tickets whose handoff may still touch its blocks.

    Where only tokens `[0, num_landed)` came, `missing` are the blocks that lack some of theirs.
    """

    expect: StartReceive
    tickets: tuple[Ticket, ...]
    traces: dict[TicketId, RequestSpan]
    live: set[TicketId]
    failure: HandoffError | None = None
    is_aborted: bool = False
    num_landed: int | None = None
    missing: tuple[int, ...] = ()


@dataclass(slots=True)
class LoadTable:
    """All of them, found by request and by ticket. Owned by vLLM's worker thread.

    vLLM keeps a request's blocks until it is told, once, that its load is over; what failed must be
    named in the same step.
    """

    _loads: dict[VllmRequestId, LoadInProgress] = field(default_factory=dict)
    _request_of: dict[TicketId, VllmRequestId] = field(default_factory=dict)
    _finished: set[VllmRequestId] = field(default_factory=set)
    _invalid_blocks: set[int] = field(default_factory=set)

    @property
    def num_open(self) -> int:
        """Loads that are not over."""
        return len(self._loads)

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something."""
        return bool(self._finished)

    def add(self, load: LoadInProgress) -> None:
        """Follow a load."""
        request = load.expect.request
        self._loads[request] = load
        for ticket in load.live:
            self._request_of[ticket] = request

    def find(self, request: VllmRequestId) -> LoadInProgress | None:
        """The load of a request, unless it is over."""
        return self._loads.get(request)

    def find_by_ticket(self, ticket: TicketId) -> LoadInProgress | None:
        """The load to which a ticket belongs, unless it is over."""
        request = self._request_of.get(ticket)
        return None if request is None else self._loads[request]

    def settle(self, ticket: TicketId) -> LoadInProgress | None:
        """Nothing of this ticket touches the blocks any more: the load, if it is over with that."""
        request = self._request_of.pop(ticket, None)
        if request is None:
            return None
        load = self._loads[request]
        load.live.discard(ticket)
        if load.live:
            return None
        del self._loads[request]
        self._finished.add(request)
        if not load.is_aborted:
            invalid = load.missing if load.failure is None else load.expect.blocks
            self._invalid_blocks.update(invalid)
        return load

    def settle_all(self, error: HandoffError) -> list[LoadInProgress]:
        """The agent is gone: every load has failed."""
        for load in self._loads.values():
            load.failure = load.failure or error
        settled = (self.settle(ticket) for ticket in tuple(self._request_of))
        return [load for load in settled if load is not None]

    def take_finished(self) -> set[VllmRequestId]:
        """Loads that are over, each returned once, however it went."""
        finished, self._finished = self._finished, set()
        return finished

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that failed: vLLM computes their tokens itself, or fails the request."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks
