"""Worker side: prompts in flight (uncomputed, sent or loaded), by request and by ticket."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.grants import Tombstone, Tombstones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from baton.auth.ticket import Ticket
    from baton.engines.vllm.step_orders import Progress, StartReceive, StartSend, VllmRequestId
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
    def is_empty(self) -> bool:
        """Whether there is none."""
        return not self._sends

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
        """The agent is gone: all its handoffs have ended. The pool's thread ends its own."""
        tickets = _tickets_of_agent(send.tickets for send in self._sends.values())
        settled = (self.settle(ticket, error) for ticket in tickets)
        return [send for send in settled if send is not None and not send.live]

    def finish(self, requests: set[VllmRequestId]) -> None:
        """The scheduler holds these requests' blocks, as far as they are offered."""
        self._is_generated |= requests & self._sends.keys()

    def take_released(self) -> set[VllmRequestId]:
        """Finished requests whose handoffs have all ended: each is returned once."""
        if not self._is_generated:
            return set()
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

    vLLM keeps a request's blocks until its load is reported, once, as over; what failed must be
    named in the same step.
    """

    _loads: dict[VllmRequestId, LoadInProgress] = field(default_factory=dict)
    _request_of: dict[TicketId, VllmRequestId] = field(default_factory=dict)
    _finished: set[VllmRequestId] = field(default_factory=set)
    _invalid_blocks: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether there is none, nor anything to take."""
        return not (self._loads or self._finished)

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
        """The agent is gone: all its loads have failed. The pool's thread ends its own."""
        tickets = _tickets_of_agent(load.tickets for load in self._loads.values())
        for load in filter(None, map(self.find_by_ticket, tickets)):
            load.failure = load.failure or error
        settled = (self.settle(ticket) for ticket in tickets)
        return [load for load in settled if load is not None]

    def take_finished(self) -> set[VllmRequestId]:
        """Loads that are over, each returned once, however it went."""
        finished, self._finished = self._finished, set()
        return finished

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that failed: vLLM computes their tokens itself, or fails the request."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks


def _tickets_of_agent(tickets: Iterable[tuple[Ticket, ...]]) -> list[TicketId]:
    """Those whose blocks no other thread reads or writes."""
    return [each.id for each in chain.from_iterable(tickets) if each.mode != "pool"]


class UncomputedPrefills:
    """By the gateway's ticket. Owned by vLLM's worker thread."""

    def __init__(self) -> None:
        self._derived: dict[TicketId, tuple[Ticket, ...]] = {}
        self._tickets: tuple[Ticket, ...] | None = ()

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Those under which this rank will send them, or does."""
        if self._tickets is None:
            self._tickets = tuple(chain.from_iterable(self._derived.values()))
        return self._tickets

    def add(self, ticket: TicketId, derived: tuple[Ticket, ...]) -> None:
        """It is to be computed, to be sent from here if any is `derived`; again changes nothing."""
        if derived:
            self._derived[ticket] = derived
            self._tickets = None

    def drop(self, ticket: TicketId) -> None:
        """It is computed, or will never be; again changes nothing."""
        self._derived.pop(ticket, None)
        self._tickets = None


class AbortFanout:
    """Tickets whose other request failed, before or after this rank started them. Thread-safe."""

    def __init__(self, abort_from_peer: Callable[[TicketId, str], None]) -> None:
        self._abort_from_peer = abort_from_peer
        self._lock = threading.Lock()
        self._derived: dict[TicketId, Sequence[TicketId]] = {}
        self._early = Tombstones()

    def known(self, ticket: TicketId, derived: Sequence[TicketId]) -> None:
        """This rank works on a ticket, under those derived from it."""
        with self._lock:
            self._derived[ticket] = derived
            tombstone = self._early.take(ticket)
        if tombstone is not None:
            self._abort_all(derived, tombstone.reason)

    def forget(self, ticket: TicketId) -> None:
        """This rank is done with a ticket."""
        with self._lock:
            self._derived.pop(ticket, None)

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The other worker's request of a ticket has failed."""
        with self._lock:
            derived = self._derived.get(ticket)
            if derived is None:
                self._early.add(ticket, Tombstone(reason, "gateway"))
                return
        self._abort_all(derived, reason)

    def _abort_all(self, derived: Sequence[TicketId], reason: str) -> None:
        for ticket in derived:
            self._abort_from_peer(ticket, reason)
