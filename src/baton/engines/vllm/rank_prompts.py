"""One rank's prompts: those that it sends and those that it loads, as orders for the agent."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from baton.clock import Instant
from baton.engines.vllm.in_flight import (
    AbortFanout,
    LoadInProgress,
    LoadTable,
    SendInProgress,
    SendTable,
    UncomputedPrefills,
    empty_table,
)
from baton.engines.vllm.rank_observer import open_partial_trace, open_trace
from baton.engines.vllm.tickets import compute_receiving_subtickets, compute_subtickets
from baton.handoff.interface import DECLINED_STAGE, HandoffPort, ReceiveOrder, SendOrder
from baton.kv.copies import BlockTable, count_blocks
from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from baton.auth.ticket import Ticket
    from baton.clock import Clock
    from baton.engines.vllm.rank_observer import RankObserver
    from baton.engines.vllm.step_orders import (
        Progress,
        Prompt,
        StartReceive,
        StartSend,
        StepOrders,
        VllmRequestId,
        Withdraw,
    )
    from baton.errors import HandoffError
    from baton.handoff.interface import StreamPosition
    from baton.handoff.read_prefixes import ReadsPrefixes
    from baton.ids import Epoch, TicketId, WorkerId
    from baton.kv.layout import KVLayout

logger = logging.getLogger(__name__)


def on_host() -> None:
    """The position of work that is done when it is reported."""


class RankPort(HandoffPort, Protocol):
    """The agent's methods that a rank uses, beyond an engine's."""

    @property
    def prefixes(self) -> ReadsPrefixes | None:
        """See `HandoffPort`."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the agent's thread runs."""
        ...

    def cut_writes(self, ticket: TicketId) -> None:
        """See `HandoffAgent.cut_writes`; in mode pool `StoreHandoff.cut_writes`."""
        ...

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The decode or prefill request of the other worker failed."""
        ...


@dataclass(frozen=True, slots=True)
class RankSetting:
    """One rank's identity and layout. `layers`: vLLM's layer name → index in the KV view.

    `record_position`, called on vLLM's thread, names all that it has given the GPU until now.
    """

    worker: WorkerId
    epoch: Epoch
    rank: int
    layout: KVLayout
    layers: Mapping[str, int]
    record_position: Callable[[], StreamPosition | None] = on_host

    def open_trace(self, prompt: Prompt, role: str) -> RequestSpan:
        """The trace of a request in role `prefill` or `decode`."""
        return open_trace(prompt, role, self.worker, self.epoch)

    def sending_tickets(self, prompt: Prompt) -> tuple[Ticket, ...]:
        """The tickets under which this rank sends a prompt."""
        return compute_subtickets(prompt.ticket, self.layout, sender=self.rank)

    def receiving_tickets(self, prompt: Prompt) -> tuple[Ticket, ...]:
        """The tickets under which this rank receives a prompt."""
        return compute_receiving_subtickets(prompt.ticket, self.layout, receiver=self.rank)


class RankSends:
    """Prompts that this rank sends. Owned by vLLM's worker thread."""

    def __init__(
        self,
        setting: RankSetting,
        port: RankPort,
        abort_fanout: AbortFanout,
        *,
        clock: Clock,
        observer: RankObserver,
    ) -> None:
        self._setting, self._port, self._abort_fanout = setting, port, abort_fanout
        self._clock, self._observer = clock, observer
        self._uncomputed = UncomputedPrefills()
        self._failed: list[tuple[VllmRequestId, str]] = []
        self.table = SendTable()

    @property
    def uncomputed(self) -> tuple[Ticket, ...]:
        """The tickets of prompts that are not computed yet."""
        return self._uncomputed.tickets

    def take_failed(self) -> tuple[tuple[VllmRequestId, str], ...]:
        """Requests whose sending failed since the last call, and why."""
        if not self._failed:
            return ()
        failed, self._failed = tuple(self._failed), []
        return failed

    def begin(self, orders: StepOrders) -> None:
        """Register prompts that arrived, and offer those whose prefill begins."""
        for prompt in orders.arrived:
            self._uncomputed.add(prompt.ticket.id, self._setting.sending_tickets(prompt))
        for offer in orders.offers:
            self._start(offer, orders.progress)

    def _start(self, offer: StartSend, steps: tuple[Progress, ...]) -> None:
        setting, prompt = self._setting, offer.prompt
        tickets = self._setting.sending_tickets(prompt)
        self._uncomputed.add(prompt.ticket.id, tickets)
        span = self._setting.open_trace(prompt, "prefill")
        span.num_cached_tokens = offer.num_cached_tokens
        span.num_loaded_tokens = offer.num_loaded_tokens
        num_blocks = count_blocks(prompt.num_tokens, setting.layout.block_size)
        send = SendInProgress(
            offer,
            tickets,
            empty_table(num_blocks),
            _open_partial_traces(span, tickets),
            {ticket.id for ticket in tickets},
        )
        self.table.add(send)
        span.stamp(Stamp.ADMITTED, self._clock.now())
        span.stamp(Stamp.PREFILL_STARTED, self._clock.now())
        if not tickets:  # other ranks have the same heads, and send them
            self._observer.computes(span)
            return
        # An order's table must have its first blocks before it is given away.
        for progress in steps:
            if progress.request == offer.request:
                send.extend(progress)
        for ticket in tickets:
            self._port.start_send(self._send_order(prompt, ticket, send))
        self._abort_fanout.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(offer.request, span, send.traces)
        self._observer.offered(offer.request, prompt.ticket.mode, self._clock.now())

    def _send_order(self, prompt: Prompt, ticket: Ticket, send: SendInProgress) -> SendOrder:
        return SendOrder(
            ticket=ticket,
            prompt_hash=prompt.prompt_hash,
            num_tokens=prompt.num_tokens,
            num_ready_tokens=0,
            blocks=BlockTable(0, send.table),
            deadline=_deadline_of(prompt.ticket, self._clock),
            trace=send.traces[ticket.id],
            prompt_ids=prompt.token_ids,
            num_cached_tokens=send.offer.num_cached_tokens,
            adapter=prompt.adapter,
        )

    def withdraw(self, withdraw: Withdraw) -> None:
        """Offer a prompt and abort it at once, which notifies its decode worker."""
        prompt = withdraw.prompt
        self._uncomputed.drop(prompt.ticket.id)
        for ticket in self._setting.sending_tickets(prompt):
            span = self._setting.open_trace(prompt, "prefill")
            self._port.start_send(
                SendOrder(
                    ticket=ticket,
                    prompt_hash=prompt.prompt_hash,
                    num_tokens=prompt.num_tokens,
                    num_ready_tokens=0,
                    blocks=BlockTable(0, empty_table(0)),
                    deadline=_deadline_of(prompt.ticket, self._clock),
                    trace=span,
                    prompt_ids=prompt.token_ids,
                    adapter=prompt.adapter,
                )
            )
            self._port.abort(ticket.id, withdraw.reason)

    def extend(self, steps: tuple[Progress, ...]) -> Iterable[tuple[TicketId, int]]:
        """Add this step's blocks; yields each ticket with the tokens that a layer makes ready."""
        for progress in steps:
            send = self.table.find(progress.request)
            if send is None:
                continue
            send.extend(progress)
            num_blocks = progress.first_block + len(progress.blocks)
            self._observer.grew(progress.request, num_blocks, self._clock.now())
            yield from ((ticket.id, progress.stop) for ticket in send.tickets)

    def complete(self, steps: tuple[Progress, ...], computed_at: Instant | None) -> None:
        """The last layer of this step is reported: prompts that end here are complete.

        `computed_at`: None where a GPU has yet to compute it.
        """
        for progress in steps:
            send = self.table.find(progress.request) if progress.is_last else None
            if send is None:
                continue
            self._uncomputed.drop(send.offer.prompt.ticket.id)
            if computed_at is None:
                self._observer.launched(progress.request, self._clock.now())
            else:
                self._observer.stamp(progress.request, Stamp.PREFILL_DONE, computed_at)
            for ticket in send.tickets:
                self._port.prefill_done(ticket.id, None)

    def stamp(self, steps: tuple[Progress, ...], stamp: Stamp) -> None:
        """Record an instant of all prompts that this step computes."""
        now = self._clock.now()
        for progress in steps:
            self._observer.stamp(progress.request, stamp, now)

    def drop_uncomputed(self, send: SendInProgress) -> None:
        """A prompt was preempted: this rank will not compute it under its tickets."""
        self._uncomputed.drop(send.offer.prompt.ticket.id)

    def drop(self, request: VllmRequestId, error: HandoffError) -> None:
        """Forget an offer; `error` ends the handoffs of its tickets that have not ended."""
        send = self.table.find(request)
        for ticket in () if send is None else tuple(send.live):
            self.settle(ticket, error)
        self.table.drop(request)

    def settle(self, ticket: TicketId, error: HandoffError | None) -> None:
        """One ticket's handoff has ended, with `error` if it failed."""
        send = self.table.settle(ticket, error)
        if send is not None and not send.live:
            self._finished(send)

    def fail_all(self, error: HandoffError) -> None:
        """The agent has ended: every handoff fails."""
        for send in self.table.settle_all(error):
            self._finished(send)

    def _finished(self, send: SendInProgress) -> None:
        self._uncomputed.drop(send.offer.prompt.ticket.id)
        self._abort_fanout.forget(send.offer.prompt.ticket.id)
        self._observer.sent(send.offer.request, send.failure, self._clock.now())
        if send.failure is not None and send.failure.stage != DECLINED_STAGE:
            self._failed.append((send.offer.request, str(send.failure)))


class RankLoads:
    """Prompts that this rank receives. Owned by vLLM's worker thread."""

    def __init__(
        self,
        setting: RankSetting,
        port: RankPort,
        abort_fanout: AbortFanout,
        *,
        clock: Clock,
        observer: RankObserver,
    ) -> None:
        self._setting, self._port, self._abort_fanout = setting, port, abort_fanout
        self._clock, self._observer = clock, observer
        self.table = LoadTable()

    def renew_leases(self, prompt: Prompt) -> None:
        """Keep the prefill worker from releasing a prompt that is queued here."""
        for ticket in self._setting.receiving_tickets(prompt):
            self._port.renew_lease(ticket)

    def start(self, expect: StartReceive) -> None:
        """Give the agent a load's blocks to receive into."""
        prompt = expect.prompt
        tickets = self._setting.receiving_tickets(prompt)
        span = self._setting.open_trace(prompt, "decode")
        span.num_cached_tokens = expect.start
        span.stamp(Stamp.PAGES_RESERVED, self._clock.now())
        load = LoadInProgress(
            expect,
            tickets,
            _open_partial_traces(span, tickets),
            {ticket.id for ticket in tickets},
        )
        self.table.add(load)
        table = BlockTable(expect.first_block, np.array(expect.blocks, dtype=np.int64))
        # Steps that were given to a GPU before may still use these blocks, for another request.
        after = self._setting.record_position()
        for ticket in tickets:
            self._port.start_receive(
                ReceiveOrder(
                    ticket=ticket,
                    prompt_hash=prompt.prompt_hash,
                    start=expect.start,
                    num_tokens=prompt.num_tokens,
                    blocks=table,
                    deadline=_deadline_of(prompt.ticket, self._clock),
                    trace=load.traces[ticket.id],
                    prompt_ids=prompt.token_ids,
                    after=after,
                    adapter=prompt.adapter,
                )
            )
        self._abort_fanout.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(expect.request, span, load.traces)

    def decline(self, prompt: Prompt, reason: str) -> None:
        """Refuse a prompt's KV: it is not needed here."""
        for ticket in self._setting.receiving_tickets(prompt):
            self._port.decline(ticket, reason)

    def landed(self, ticket: TicketId, num_tokens: int | None) -> None:
        """A ticket's KV has landed; blocks from token `num_tokens` on are to be computed here."""
        load = self.table.find_by_ticket(ticket)
        if load is not None and num_tokens is not None:
            first = num_tokens // self._setting.layout.block_size - load.expect.first_block
            load.num_landed = num_tokens
            load.missing = load.expect.blocks[max(0, first) :]
        self.settle(ticket)

    def fail(self, ticket: TicketId, error: HandoffError) -> None:
        """A ticket's KV will not arrive. Its blocks stay in use until `settle`."""
        load = self.table.find_by_ticket(ticket)
        if load is None or load.failure is not None:
            return
        load.failure = error
        # One rank's part is of no use without the others'.
        for other in load.live - {ticket}:
            self._port.abort(other, str(error))

    def settle(self, ticket: TicketId) -> None:
        """No transfer of this ticket writes to the blocks any more."""
        load = self.table.settle(ticket)
        if load is not None:
            self._finished(load)

    def fail_all(self, error: HandoffError) -> None:
        """The agent has ended: every load fails."""
        for load in self.table.settle_all(error):
            self._finished(load)

    def _finished(self, load: LoadInProgress) -> None:
        self._abort_fanout.forget(load.expect.prompt.ticket.id)
        self._observer.received(load, self._clock.now())


def _open_partial_traces(
    span: RequestSpan, tickets: tuple[Ticket, ...]
) -> dict[TicketId, RequestSpan]:
    if len(tickets) == 1:
        return {tickets[0].id: span}
    return {ticket.id: open_partial_trace(span) for ticket in tickets}


def _deadline_of(ticket: Ticket, clock: Clock) -> Instant:
    """The ticket's lifetime, as vLLM has no deadlines. The agent's own timeouts are shorter."""
    return Instant(clock.now() + ticket.issue.lifetime_s)
