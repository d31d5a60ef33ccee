"""The worker's side, one tensor-parallel rank: vLLM's steps → the handoff agent, and back.

Each step, in the order in which vLLM calls: `prepare` (before blocks may be overwritten), `begin`
(before the forward), `layer_done` in the middle of it, `end` after it, then `poll`. All on the
worker's main thread; `give_up` and `occupancy` alone come from the control server's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import numpy as np

from baton.authority.ticket import CLOCK_SKEW_S
from baton.clock import Instant
from baton.engines.stalls import STALLED
from baton.engines.vllm.backlog import Backlog
from baton.engines.vllm.fates import Fates
from baton.engines.vllm.legs import open_leg, open_part
from baton.engines.vllm.loads import LoadBook, LoadInProgress
from baton.engines.vllm.meta import StepOrders, StepReport
from baton.engines.vllm.sends import SendBook, SendInProgress, empty_table
from baton.engines.vllm.subtickets import (
    compute_receiving_subtickets,
    compute_subtickets,
)
from baton.errors import HandoffError
from baton.handoff.interface import (
    DECLINED_STAGE,
    BlocksQuiescent,
    HandoffPort,
    KVFailed,
    KVLanded,
    KVLent,
    KVSent,
    LoanEnded,
    LoanRecalled,
    ReceiveOrder,
    SendFailed,
    SendOrder,
)
from baton.kv.copies import BlockTable
from baton.telemetry.trace import LegTrace, Stamp

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping

    from baton.authority.ticket import Ticket
    from baton.clock import Clock
    from baton.engines.vllm.congestion import Occupancy
    from baton.engines.vllm.meta import (
        Abort,
        Expect,
        Offer,
        Progress,
        Prompt,
        VllmRequestId,
        Withdraw,
    )
    from baton.engines.vllm.observing import RankObserver
    from baton.engines.vllm.records import HandoffRecord
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

    def give_up(self, ticket: TicketId, reason: str) -> None:
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
    """All handoffs of one rank. `bell` is rung by the agent when `poll` has something."""

    def __init__(
        self,
        setting: RankSetting,
        port: RankPort,
        *,
        bell: threading.Event,
        clock: Clock,
        observer: RankObserver,
    ) -> None:
        self._setting, self._port = setting, port
        self._bell, self._clock, self._observer = bell, clock, observer
        self._sends, self._loads = SendBook(), LoadBook()
        self._backlog = Backlog()
        self._fates = Fates(port.give_up)
        self._orders = StepOrders()
        self._ready: tuple[tuple[TicketId, int], ...] = ()
        self._hooked: set[int] = set()
        self._is_computing = False
        self._failed_sends: list[tuple[VllmRequestId, str]] = []
        self._occupancy: Occupancy | None = None

    def prepare(self, orders: StepOrders) -> None:
        """End the handoffs of preempted requests: their blocks are about to be overwritten.

        Waits until nothing reads them, or `RELEASE_TIMEOUT_S`: what is read later than that has
        another digest than it should, and the decode worker computes the prompt itself.
        """
        named = (*orders.preempted, *orders.stripped)
        robbed = [send for send in map(self._sends.find, named) if send is not None]
        for send in robbed:
            self._abort_all(send.live, "the prefill was preempted for want of KV blocks")
        deadline = self._clock.now() + RELEASE_TIMEOUT_S
        while any(send.live for send in robbed) and self._clock.now() < deadline:
            self._collect(deadline - self._clock.now())
        for send in robbed:
            if send.live:
                logger.error("%s: its blocks are still being read", send.offer.request)
            self._backlog.drop(send.offer.prompt.ticket.id)
        for request in orders.preempted:  # vLLM still waits to hear of those that are stripped
            self._sends.drop(request)

    def begin(self, orders: StepOrders) -> None:
        """Carry out a step's orders as early as vLLM tells them."""
        self._orders, self._hooked, self._is_computing = orders, set(), False
        self._occupancy = orders.occupancy
        self._begin_prefills(orders)
        for prompt in orders.queued:
            self._keep(prompt)
        for expect in orders.expected:
            self._expect(expect)
        for decline in orders.declined:
            self._decline(decline.prompt, decline.reason)
        for withdraw in orders.withdrawn:
            self._withdraw(withdraw)
        for abort in orders.aborted:
            self._abort(abort)
        if orders.is_stalled:
            self._port.withdraw_oldest(self._sends.held, STALLED)
        self._ready = tuple(self._announce(orders.progress))
        self._observer.step_begins(orders, self._clock.now())

    def layer_done(self, layer_name: str) -> None:
        """A layer's KV of this step's tokens is in its blocks: vLLM computes. Only queues.

        With the last layer's, prompts that end here are complete: their decode workers need not
        wait for the rest of the step (that layer's MLP, the sampling).
        """
        if not self._is_computing:  # once a step: the layers that are ready say so by themselves
            self._is_computing = True
            self._port.computing(self._backlog.tickets)
        if not self._ready:
            return
        layer = self._setting.layers.get(layer_name)
        if layer is None:
            return
        if not self._hooked:
            self._stamp_progress(Stamp.FIRST_LAYER_READY)
        self._ready_in(layer)

    def end(self) -> None:
        """The step's forward is over; layers whose hook vLLM skipped are done as well."""
        if self._ready:
            for layer in sorted(set(self._setting.layers.values()) - self._hooked):
                self._ready_in(layer)
            for send in self._complete():
                self._observer.stamp(send.offer.request, Stamp.PREFILL_DONE, self._clock.now())
        self._observer.step_ended(self._clock.now())
        self._ready = ()
        self._orders = StepOrders()

    def poll(
        self, finished: set[VllmRequestId], wait_s: float
    ) -> tuple[set[VllmRequestId], set[VllmRequestId]]:
        """Requests whose blocks are vLLM's again: `(sent, received)`, each returned once.

        `finished` are requests that vLLM's scheduler finished. Waits at most `wait_s`, where
        handoffs are all that could happen, for their next event.
        """
        self._sends.finish(finished)
        idle = not self._loads.has_news and (self._loads.num_open or self._sends.num_held)
        self._collect(wait_s if idle else 0.0)
        return self._sends.take_released(), self._loads.take_over()

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

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The gateway says that a ticket's other half failed. Thread-safe."""
        self._fates.give_up(ticket, reason)

    def _begin_prefills(self, orders: StepOrders) -> None:
        for prompt in orders.arrived:
            self._backlog.add(prompt.ticket.id, self._sending_tickets(prompt))
        for offer in orders.offers:
            self._offer(offer)

    def _offer(self, offer: Offer) -> None:
        setting, prompt = self._setting, offer.prompt
        tickets = self._sending_tickets(prompt)
        self._backlog.add(prompt.ticket.id, tickets)
        leg = self._open(prompt, "prefill")
        leg.num_cached_tokens = offer.num_ready_tokens
        num_blocks = -(-prompt.num_tokens // setting.layout.block_size)
        send = SendInProgress(
            offer,
            tickets,
            empty_table(num_blocks),
            self._open_parts(leg, tickets),
            {ticket.id for ticket in tickets},
        )
        self._sends.add(send)
        # An order's table must have its first blocks before it is given away.
        for progress in self._orders.progress:
            if progress.request == offer.request:
                send.extend(progress)
        for ticket in tickets:
            self._port.offer(
                self._send_order(prompt, ticket, send, num_ready_tokens=offer.num_ready_tokens)
            )
        self._fates.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(offer.request, leg, send.traces)
        self._observer.offered(offer.request, prompt.ticket.mode, self._clock.now())
        leg.stamp(Stamp.ADMITTED, self._clock.now())
        leg.stamp(Stamp.PREFILL_STARTED, self._clock.now())

    def _keep(self, prompt: Prompt) -> None:
        for ticket in self._receiving_tickets(prompt):
            self._port.keep(ticket)

    def _expect(self, expect: Expect) -> None:
        prompt = expect.prompt
        tickets = self._receiving_tickets(prompt)
        leg = self._open(prompt, "decode")
        leg.num_cached_tokens = expect.start
        leg.stamp(Stamp.PAGES_RESERVED, self._clock.now())
        load = LoadInProgress(
            expect, tickets, self._open_parts(leg, tickets), {ticket.id for ticket in tickets}
        )
        self._loads.add(load)
        table = BlockTable(expect.first_block, np.array(expect.blocks, dtype=np.int64))
        for ticket in tickets:
            self._port.expect(
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
        self._fates.known(prompt.ticket.id, [ticket.id for ticket in tickets])
        self._observer.opened(expect.request, leg, load.traces)

    def _decline(self, prompt: Prompt, reason: str) -> None:
        for ticket in self._receiving_tickets(prompt):
            self._port.decline(ticket, reason)

    def _withdraw(self, withdraw: Withdraw) -> None:
        """An offer that ends at once tells the decode worker, even if its grant is yet to come."""
        setting, prompt = self._setting, withdraw.prompt
        self._backlog.drop(prompt.ticket.id)
        for ticket in self._sending_tickets(prompt):
            leg = open_leg(prompt, "prefill", setting.worker, setting.epoch)
            self._port.offer(
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

    def _announce(self, steps: tuple[Progress, ...]) -> Iterable[tuple[TicketId, int]]:
        """What each layer of this step makes ready."""
        for progress in steps:
            send = self._sends.find(progress.request)
            if send is None:
                continue
            send.extend(progress)
            num_blocks = progress.first_block + len(progress.blocks)
            self._observer.grew(progress.request, num_blocks, self._clock.now())
            yield from ((ticket.id, progress.stop) for ticket in send.tickets)

    def _ready_in(self, layer: int) -> None:
        is_first_time = layer not in self._hooked
        self._hooked.add(layer)
        self._port.layer_ready(self._ready, layer)
        if is_first_time and len(self._hooked) == len(set(self._setting.layers.values())):
            for send in self._complete():
                self._backlog.drop(send.offer.prompt.ticket.id)
                for ticket in send.tickets:
                    send.traces[ticket.id].stamp(Stamp.PREFILL_DONE, self._clock.now())
                    self._port.finish(ticket.id, None)

    def _complete(self) -> list[SendInProgress]:
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

    def _collect(self, wait_s: float) -> None:
        """Take what the agent has; wait for it at most `wait_s`.

        The bell is silenced before the look: what rings it afterwards is seen next time.
        """
        if wait_s > 0:
            self._bell.wait(wait_s)
        self._bell.clear()
        for event in self._port.poll():
            self._take(event)
        if not self._port.is_alive:
            self._lose_agent()

    def _take(self, event: HandoffEvent) -> None:
        match event:
            case KVLanded(ticket, _, num_tokens):
                self._note_missing(ticket, num_tokens)
                self._settle_load(ticket)
            case KVFailed(ticket, error):
                self._fail_load(ticket, error)
            case BlocksQuiescent(ticket):
                self._settle_load(ticket)
            case KVSent(ticket):
                self._settle_send(ticket, None)
            case SendFailed(ticket, error):
                self._settle_send(ticket, error)
            case KVLent() | LoanEnded() | LoanRecalled():
                raise AssertionError("vLLM's faces have no annexes: nothing is lent or borrowed")
            case _:
                assert_never(event)

    def _fail_load(self, ticket: TicketId, error: HandoffError) -> None:
        load = self._loads.find_by_ticket(ticket)
        if load is None or load.failure is not None:
            return
        load.failure = error
        # One rank's part is of no use without the others'.
        self._abort_all(load.live - {ticket}, str(error))

    def _note_missing(self, ticket: TicketId, num_tokens: int | None) -> None:
        """Blocks from token `num_tokens` on are to be computed here."""
        load = self._loads.find_by_ticket(ticket)
        if load is not None and num_tokens is not None:
            first = num_tokens // self._setting.layout.block_size - load.expect.first_block
            load.num_landed = num_tokens
            load.missing = load.expect.blocks[max(0, first) :]

    def _settle_load(self, ticket: TicketId) -> None:
        load = self._loads.settle(ticket)
        if load is not None:
            self._load_over(load)

    def _load_over(self, load: LoadInProgress) -> None:
        self._fates.forget(load.expect.prompt.ticket.id)
        self._observer.received(load, self._clock.now())

    def _settle_send(self, ticket: TicketId, error: HandoffError | None) -> None:
        send = self._sends.settle(ticket, error)
        if send is not None and not send.live:
            self._send_over(send)

    def _send_over(self, send: SendInProgress) -> None:
        self._backlog.drop(send.offer.prompt.ticket.id)
        self._fates.forget(send.offer.prompt.ticket.id)
        self._observer.sent(send.offer.request, send.failure, self._clock.now())
        if send.failure is not None and send.failure.stage != DECLINED_STAGE:
            self._failed_sends.append((send.offer.request, str(send.failure)))

    def _lose_agent(self) -> None:
        error = HandoffError("the handoff agent's thread has ended", stage="agent")
        for load in self._loads.settle_all(error):
            self._load_over(load)
        for send in self._sends.settle_all(error):
            self._send_over(send)

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

    def _open(self, prompt: Prompt, leg: str) -> LegTrace:
        return open_leg(prompt, leg, self._setting.worker, self._setting.epoch)

    def _open_parts(self, leg: LegTrace, tickets: tuple[Ticket, ...]) -> dict[TicketId, LegTrace]:
        if len(tickets) == 1:
            return {tickets[0].id: leg}
        return {ticket.id: open_part(leg) for ticket in tickets}

    def _deadline_of(self, ticket: Ticket) -> Instant:
        """The request's: vLLM has none of its own. The agent's patience ends sooner, as a rule."""
        left_s = ticket.expires_at + CLOCK_SKEW_S - self._clock.unix_now()
        return Instant(self._clock.now() + max(0.0, left_s))
