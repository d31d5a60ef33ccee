"""The worker's side, one tensor-parallel rank: vLLM's steps → the handoff agent, and back.

Each step, in the order in which vLLM calls: `prepare` (before blocks may be
overwritten), `begin_step` (before the forward), `layer_done` in the middle of it, `end_step` after
it, then `get_finished`. All on the worker's main thread; `abort_from_peer` and `occupancy` alone
come from the control server's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import numpy as np

from baton.auth.ticket import CLOCK_SKEW_S
from baton.clock import Instant
from baton.engines.stall_detector import STALL_REASON
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
from baton.engines.vllm.step_orders import StepOrders, StepReport
from baton.engines.vllm.tickets import (
    compute_receiving_subtickets,
    compute_subtickets,
)
from baton.errors import HandoffError
from baton.handoff.interface import (
    DECLINED_STAGE,
    BlocksQuiescent,
    ExportReleased,
    HandoffPort,
    ImportRevoked,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    ReceiveOrder,
    SendFailed,
    SendOrder,
)
from baton.kv.copies import BlockTable
from baton.telemetry.trace import RequestSpan, Stamp

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from baton.auth.ticket import Ticket
    from baton.clock import Clock
    from baton.engines.vllm.rank_observer import HandoffRecord, RankObserver
    from baton.engines.vllm.step_orders import (
        Abort,
        Occupancy,
        Progress,
        Prompt,
        StartReceive,
        StartSend,
        VllmRequestId,
        Withdraw,
    )
    from baton.handoff.interface import HandoffEvent
    from baton.ids import Epoch, TicketId, WorkerId
    from baton.kv.layout import KVLayout

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S: Final = 5.0
"""How long a step waits for the handoffs of preempted requests to leave their blocks alone."""


class RankPort(HandoffPort, Protocol):
    """What a rank sees of its agent, besides the engine's contract."""

    @property
    def is_alive(self) -> bool:
        """Whether the agent's thread runs."""
        ...

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """This ticket's other half failed."""
        ...


@dataclass(frozen=True, slots=True)
class RankSetting:
    """What one rank works with. `layers` is the face's number of each of vLLM's layer names."""

    worker: WorkerId
    epoch: Epoch
    rank: int
    layout: KVLayout
    layers: Mapping[str, int]


class RankHandoffs:
    """All handoffs of one rank. The agent sets `wake_event` when there are events."""

    def __init__(
        self,
        setting: RankSetting,
        port: RankPort,
        *,
        wake_event: threading.Event,
        clock: Clock,
        observer: RankObserver,
    ) -> None:
        self._setting, self._port = setting, port
        self._wake_event, self._clock, self._observer = wake_event, clock, observer
        self._sends, self._loads = SendTable(), LoadTable()
        self._uncomputed = UncomputedPrefills()
        self._abort_fanout = AbortFanout(port.abort_from_peer)
        self._orders = StepOrders()
        self._ready: tuple[tuple[TicketId, int], ...] = ()
        self._done_layers: set[int] = set()
        self._is_computing = False
        self._failed_sends: list[tuple[VllmRequestId, str]] = []
        self._occupancy: Occupancy | None = None

    def prepare(self, orders: StepOrders) -> None:
        """End the handoffs of preempted requests: their blocks are about to be overwritten.

        Waits until nothing reads them, or `RELEASE_TIMEOUT_S`: what is read later than that has
        another digest than it should, and the decode worker computes the prompt itself.
        """
        named = (*orders.preempted, *orders.preempted_while_held)
        preempted = [send for send in map(self._sends.find, named) if send is not None]
        for send in preempted:
            self._abort_all(send.live, "the prefill was preempted for want of KV blocks")
        deadline = self._clock.now() + RELEASE_TIMEOUT_S
        while any(send.live for send in preempted) and self._clock.now() < deadline:
            self._poll_agent(deadline - self._clock.now())
        for send in preempted:
            if send.live:
                logger.error("%s: its blocks are still being read", send.offer.request)
            self._uncomputed.drop(send.offer.prompt.ticket.id)
        for request in orders.preempted:  # vLLM still waits for the others
            self._sends.drop(request)

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out a step's orders as early as vLLM tells them."""
        self._orders, self._done_layers, self._is_computing = orders, set(), False
        self._occupancy = orders.occupancy
        self._begin_prefills(orders)
        for prompt in orders.queued:
            self._renew_leases(prompt)
        for expect in orders.expected:
            self._start_receive(expect)
        for decline in orders.declined:
            self._decline(decline.prompt, decline.reason)
        for withdraw in orders.withdrawn:
            self._withdraw(withdraw)
        for abort in orders.aborted:
            self._abort(abort)
        if orders.is_stalled:
            self._port.cancel_oldest_ungranted(self._sends.held, STALL_REASON)
        self._ready = tuple(self._extend_sends(orders.progress))
        self._observer.step_begins(orders, self._clock.now())

    def layer_done(self, layer_name: str) -> None:
        """A layer's KV of this step's tokens is in its blocks: vLLM computes. Only queues.

        With the last layer's, prompts that end here are complete: their decode workers need not
        wait for the rest of the step (that layer's MLP, the sampling).
        """
        if not self._is_computing:  # once a step: the layers that are ready say so by themselves
            self._is_computing = True
            self._port.report_progress(self._uncomputed.tickets)
        if not self._ready:
            return
        layer = self._setting.layers.get(layer_name)
        if layer is None:
            return
        if not self._done_layers:
            self._stamp_progress(Stamp.FIRST_LAYER_READY)
        self._report_layer_ready(layer)

    def end_step(self) -> None:
        """The step's forward is over; layers whose hook vLLM skipped are done as well."""
        if self._ready:
            for layer in sorted(set(self._setting.layers.values()) - self._done_layers):
                self._report_layer_ready(layer)
            for send in self._completed_sends():
                self._observer.stamp(send.offer.request, Stamp.PREFILL_DONE, self._clock.now())
        self._observer.step_ended(self._clock.now())
        self._ready = ()
        self._orders = StepOrders()

    def get_finished(
        self, finished: set[VllmRequestId], wait_s: float
    ) -> tuple[set[VllmRequestId], set[VllmRequestId]]:
        """Requests whose blocks are vLLM's again: `(sent, received)`, each returned once.

        `finished` are requests that vLLM's scheduler finished. Waits at most `wait_s`, where
        handoffs are all that could happen, for their next event.
        """
        self._sends.finish(finished)
        idle = not self._loads.has_finished and (self._loads.num_open or self._sends.num_held)
        self._poll_agent(wait_s if idle else 0.0)
        return self._sends.take_released(), self._loads.take_finished()

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that failed, reported together with the loads themselves."""
        return self._loads.take_invalid_blocks()

    def take_report(self) -> StepReport | None:
        """What the scheduler should know besides."""
        failed, self._failed_sends = tuple(self._failed_sends), []
        return StepReport(failed) if failed else None

    def take_records(self) -> list[HandoffRecord]:
        """Handoffs that ended since the last call."""
        return self._observer.take_records()

    @property
    def occupancy(self) -> Occupancy | None:
        """How full vLLM was at the last step; None before the first. Thread-safe."""
        return self._occupancy

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway says that a ticket's other half failed. Thread-safe."""
        self._abort_fanout.abort_from_peer(ticket, reason)

    def _begin_prefills(self, orders: StepOrders) -> None:
        for prompt in orders.arrived:
            self._uncomputed.add(prompt.ticket.id, self._sending_tickets(prompt))
        for offer in orders.offers:
            self._start_send(offer)

    def _start_send(self, offer: StartSend) -> None:
        setting, prompt = self._setting, offer.prompt
        tickets = self._sending_tickets(prompt)
        self._uncomputed.add(prompt.ticket.id, tickets)
        leg = self._open_trace(prompt, "prefill")
        leg.num_cached_tokens = offer.num_ready_tokens
        num_blocks = -(-prompt.num_tokens // setting.layout.block_size)
        send = SendInProgress(
            offer,
            tickets,
            empty_table(num_blocks),
            self._open_partial_traces(leg, tickets),
            {ticket.id for ticket in tickets},
        )
        self._sends.add(send)
        # An order's table must have its first blocks before it is given away.
        for progress in self._orders.progress:
            if progress.request == offer.request:
                send.extend(progress)
        for ticket in tickets:
            self._port.start_send(
                self._send_order(prompt, ticket, send, num_ready_tokens=offer.num_ready_tokens)
            )
        self._abort_fanout.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(offer.request, leg, send.traces)
        self._observer.offered(offer.request, prompt.ticket.mode, self._clock.now())
        leg.stamp(Stamp.ADMITTED, self._clock.now())
        leg.stamp(Stamp.PREFILL_STARTED, self._clock.now())

    def _renew_leases(self, prompt: Prompt) -> None:
        for ticket in self._receiving_tickets(prompt):
            self._port.renew_lease(ticket)

    def _start_receive(self, expect: StartReceive) -> None:
        prompt = expect.prompt
        tickets = self._receiving_tickets(prompt)
        leg = self._open_trace(prompt, "decode")
        leg.num_cached_tokens = expect.start
        leg.stamp(Stamp.PAGES_RESERVED, self._clock.now())
        load = LoadInProgress(
            expect,
            tickets,
            self._open_partial_traces(leg, tickets),
            {ticket.id for ticket in tickets},
        )
        self._loads.add(load)
        table = BlockTable(expect.first_block, np.array(expect.blocks, dtype=np.int64))
        for ticket in tickets:
            self._port.start_receive(
                ReceiveOrder(
                    ticket=ticket,
                    prompt_hash=prompt.prompt_hash,
                    start=expect.start,
                    num_tokens=prompt.num_tokens,
                    blocks=table,
                    deadline=self._deadline_of(prompt.ticket),
                    trace=load.traces[ticket.id],
                    prompt_ids=prompt.token_ids,
                )
            )
        self._abort_fanout.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(expect.request, leg, load.traces)

    def _decline(self, prompt: Prompt, reason: str) -> None:
        for ticket in self._receiving_tickets(prompt):
            self._port.decline(ticket, reason)

    def _withdraw(self, withdraw: Withdraw) -> None:
        """An offer that ends at once tells the decode worker, even if its grant is yet to come."""
        setting, prompt = self._setting, withdraw.prompt
        self._uncomputed.drop(prompt.ticket.id)
        for ticket in self._sending_tickets(prompt):
            leg = open_trace(prompt, "prefill", setting.worker, setting.epoch)
            self._port.start_send(
                SendOrder(
                    ticket=ticket,
                    prompt_hash=prompt.prompt_hash,
                    num_tokens=prompt.num_tokens,
                    num_ready_tokens=0,
                    blocks=BlockTable(0, empty_table(0)),
                    deadline=self._deadline_of(prompt.ticket),
                    trace=leg,
                )
            )
            self._port.abort(ticket.id, withdraw.reason)

    def _abort(self, abort: Abort) -> None:
        load = self._loads.find(abort.request)
        if load is not None:
            load.is_aborted = True
            self._abort_all(load.live, abort.reason)
        send = self._sends.find(abort.request)
        if send is not None:
            self._abort_all(send.live, abort.reason)

    def _abort_all(self, tickets: Iterable[TicketId], reason: str) -> None:
        for ticket in tickets:
            self._port.abort(ticket, reason)

    def _extend_sends(self, steps: tuple[Progress, ...]) -> Iterable[tuple[TicketId, int]]:
        """What each layer of this step makes ready."""
        for progress in steps:
            send = self._sends.find(progress.request)
            if send is None:
                continue
            send.extend(progress)
            num_blocks = progress.first_block + len(progress.blocks)
            self._observer.grew(progress.request, num_blocks, self._clock.now())
            yield from ((ticket.id, progress.stop) for ticket in send.tickets)

    def _report_layer_ready(self, layer: int) -> None:
        is_first_time = layer not in self._done_layers
        self._done_layers.add(layer)
        self._port.layer_ready(self._ready, layer)
        if is_first_time and len(self._done_layers) == len(set(self._setting.layers.values())):
            for send in self._completed_sends():
                self._uncomputed.drop(send.offer.prompt.ticket.id)
                for ticket in send.tickets:
                    send.traces[ticket.id].stamp(Stamp.PREFILL_DONE, self._clock.now())
                    self._port.prefill_done(ticket.id, None)

    def _completed_sends(self) -> list[SendInProgress]:
        """Prompts whose last tokens are computed in this step."""
        ending = (p.request for p in self._orders.progress if p.is_last)
        return [send for send in map(self._sends.find, ending) if send is not None]

    def _stamp_progress(self, stamp: Stamp) -> None:
        now = self._clock.now()
        for progress in self._orders.progress:
            self._observer.stamp(progress.request, stamp, now)
            send = self._sends.find(progress.request)
            for trace in () if send is None else send.traces.values():
                trace.stamp(stamp, now)

    def _poll_agent(self, wait_s: float) -> None:
        """Take what the agent has; wait for it at most `wait_s`.

        The event is cleared before the look: what sets it afterwards is seen next time.
        """
        if wait_s > 0:
            self._wake_event.wait(wait_s)
        self._wake_event.clear()
        for event in self._port.poll():
            self._handle_event(event)
        if not self._port.is_alive:
            self._fail_all()

    def _handle_event(self, event: HandoffEvent) -> None:
        match event:
            case KVLanded(ticket, _, num_tokens):
                self._record_missing(ticket, num_tokens)
                self._settle_load(ticket)
            case KVFailed(ticket, error):
                self._fail_load(ticket, error)
            case BlocksQuiescent(ticket):
                self._settle_load(ticket)
            case KVSent(ticket):
                self._settle_send(ticket, None)
            case SendFailed(ticket, error):
                self._settle_send(ticket, error)
            case KVExported() | ExportReleased() | ImportRevoked():
                raise AssertionError(
                    "vLLM's faces have no peer_mappings: nothing is lent or borrowed"
                )
            case _:
                assert_never(event)

    def _fail_load(self, ticket: TicketId, error: HandoffError) -> None:
        load = self._loads.find_by_ticket(ticket)
        if load is None or load.failure is not None:
            return
        load.failure = error
        # One rank's part is of no use without the others'.
        self._abort_all(load.live - {ticket}, str(error))

    def _record_missing(self, ticket: TicketId, num_tokens: int | None) -> None:
        """Blocks from token `num_tokens` on are to be computed here."""
        load = self._loads.find_by_ticket(ticket)
        if load is not None and num_tokens is not None:
            first = num_tokens // self._setting.layout.block_size - load.expect.first_block
            load.num_landed = num_tokens
            load.missing = load.expect.blocks[max(0, first) :]

    def _settle_load(self, ticket: TicketId) -> None:
        load = self._loads.settle(ticket)
        if load is not None:
            self._load_finished(load)

    def _load_finished(self, load: LoadInProgress) -> None:
        self._abort_fanout.forget(load.expect.prompt.ticket.id)
        self._observer.received(load, self._clock.now())

    def _settle_send(self, ticket: TicketId, error: HandoffError | None) -> None:
        send = self._sends.settle(ticket, error)
        if send is not None and not send.live:
            self._send_finished(send)

    def _send_finished(self, send: SendInProgress) -> None:
        self._uncomputed.drop(send.offer.prompt.ticket.id)
        self._abort_fanout.forget(send.offer.prompt.ticket.id)
        self._observer.sent(send.offer.request, send.failure, self._clock.now())
        if send.failure is not None and send.failure.stage != DECLINED_STAGE:
            self._failed_sends.append((send.offer.request, str(send.failure)))

    def _fail_all(self) -> None:
        error = HandoffError("the handoff agent's thread has ended", stage="agent")
        for load in self._loads.settle_all(error):
            self._load_finished(load)
        for send in self._sends.settle_all(error):
            self._send_finished(send)

    def _send_order(
        self, prompt: Prompt, ticket: Ticket, send: SendInProgress, *, num_ready_tokens: int
    ) -> SendOrder:
        return SendOrder(
            ticket=ticket,
            prompt_hash=prompt.prompt_hash,
            num_tokens=prompt.num_tokens,
            num_ready_tokens=num_ready_tokens,
            blocks=BlockTable(0, send.table),
            deadline=self._deadline_of(prompt.ticket),
            trace=send.traces[ticket.id],
            prompt_ids=prompt.token_ids,
        )

    def _sending_tickets(self, prompt: Prompt) -> tuple[Ticket, ...]:
        setting = self._setting
        return compute_subtickets(prompt.ticket, setting.layout, sender=setting.rank)

    def _receiving_tickets(self, prompt: Prompt) -> tuple[Ticket, ...]:
        setting = self._setting
        return compute_receiving_subtickets(prompt.ticket, setting.layout, receiver=setting.rank)

    def _open_trace(self, prompt: Prompt, leg: str) -> RequestSpan:
        return open_trace(prompt, leg, self._setting.worker, self._setting.epoch)

    def _open_partial_traces(
        self, leg: RequestSpan, tickets: tuple[Ticket, ...]
    ) -> dict[TicketId, RequestSpan]:
        if len(tickets) == 1:
            return {tickets[0].id: leg}
        return {ticket.id: open_partial_trace(leg) for ticket in tickets}

    def _deadline_of(self, ticket: Ticket) -> Instant:
        """The request's: vLLM has none of its own. The agent's patience ends sooner, as a rule."""
        left_s = ticket.expires_at + CLOCK_SKEW_S - self._clock.unix_now()
        return Instant(self._clock.now() + max(0.0, left_s))
