"""The worker's side, one tensor-parallel rank: vLLM's steps → the handoff agent, and back.

Each step, in the order in which vLLM calls: `prepare` (before blocks may be
overwritten), `begin_step` (before the forward), `layer_done` in the middle of it,
`forward_launched` and `end_step` after it, then `get_finished`. All on the worker's main thread;
`abort_from_peer` and `occupancy` alone come from the control server's. A step in which nothing is
handed over takes a call for each of these and no more: vLLM makes hundreds in a second.

`layer_done` comes where vLLM runs attention from Python. A CUDA graph that holds a whole forward
pass runs no Python: its layers are reported by `forward_launched`, which every step that computes
has. Outside of `begin_step` and `end_step` (warm-up, profiling, capture) `follows_layers` is False.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Clock, Instant
from baton.engines.stall_detector import STALL_REASON
from baton.engines.vllm.in_flight import AbortFanout, SendInProgress
from baton.engines.vllm.rank_prefixes import RankPrefixes
from baton.engines.vllm.rank_prompts import RankLoads, RankPort, RankSends, RankSetting
from baton.engines.vllm.step_orders import (
    NO_ORDERS,
    Abort,
    Keep,
    LookUp,
    Occupancy,
    PrefixOrders,
    StepOrders,
    StepReport,
    VllmRequestId,
)
from baton.errors import HandoffError
from baton.handoff.interface import (
    BlocksQuiescent,
    EngineSteps,
    ExportReleased,
    ImportRevoked,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    LayersLanding,
    PrefixFound,
    SendFailed,
)
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Sequence

    from baton.auth.ticket import Ticket
    from baton.engines.vllm.rank_observer import HandoffRecord, RankObserver
    from baton.handoff.interface import HandoffEvent, StreamPosition
    from baton.ids import TicketId
    from baton.protocol.worker_http import StoreLoads

logger = logging.getLogger(__name__)

WRITE_GRACE_S: Final = 0.1
"""How long a step waits for writes of preempted prompts, before it cuts their connections."""
RELEASE_TIMEOUT_S: Final = 5.0
"""The same where a posted write cannot be recalled: see `prepare`."""
PREEMPTED: Final = "the prefill was preempted for want of KV blocks"
MAX_REPORT_DELAY_S: Final = 0.01
"""How long launched layers wait for the end of the launch, before the agent learns of them."""
MIN_WAIT_S: Final = 0.001
WAIT_SHARE: Final = 0.1
"""A step without tokens waits for so much of the time in which nothing has happened.

At least for `MIN_WAIT_S`. vLLM sees new requests between two steps only: while handoffs are short,
these waits are. The store's answer is waited for as long as it usually takes: steps meanwhile take
the interpreter from the thread that reads.
"""


class RankHandoffs:  # noqa: PLR0904 - one for each of vLLM's hooks
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
        self._abort_fanout = AbortFanout(port.abort_from_peer)
        self._sends = RankSends(setting, port, self._abort_fanout, clock=clock, observer=observer)
        self._loads = RankLoads(setting, port, self._abort_fanout, clock=clock, observer=observer)
        self._prefixes = RankPrefixes(
            port.prefixes,
            block_size=setting.layout.block_size,
            clock=clock,
            record_position=setting.record_position,
        )
        self._steps = EngineSteps() if port.prefixes is None else port.prefixes.steps
        self._uses_store = False
        self.follows_layers = False
        """Whether this step wants the next `layer_done`."""
        self._orders = NO_ORDERS
        self._ready: tuple[tuple[TicketId, int], ...] = ()
        self._all_layers = frozenset(setting.layers.values())
        self._done_layers: set[int] = set()
        self._launched: list[tuple[int, StreamPosition | None]] = []
        """Layers of this step that the agent was not notified of yet."""
        self._first_launched_at = Instant(0.0)
        self._is_computing = False
        self._quiet_since: Instant | None = None
        """When a step first waited after the last orders, or the agent's last event."""
        self._has_received = False
        """Whether the last step reported requests whose KV is there."""
        self._reported: tuple[Ticket, ...] = ()
        self._occupancy: Occupancy | None = None

    def prepare(self, orders: StepOrders) -> None:
        """End the handoffs of preempted requests: their blocks are about to be overwritten.

        A peer that reads them is not waited for: it finds another digest than it should. Writes of
        this worker may take `WRITE_GRACE_S`; those that a stalled peer does not take are cut. Only
        transports whose posted writes cannot be recalled (RDMA) are waited for, up to
        `RELEASE_TIMEOUT_S`: what they read later has another digest, too. In mode pool it would be
        kept as KV of the prompt: nothing is read after the cut, and a store that hangs is not
        waited for.
        """
        named = (*orders.preempted, *orders.preempted_while_held)
        if not named:
            return
        preempted = [send for send in map(self._sends.table.find, named) if send is not None]
        for send in preempted:
            self._abort_all(send.live, PREEMPTED)
        began_at = self._clock.now()
        self._wait_for_ends(preempted, Instant(began_at + WRITE_GRACE_S))
        for send in preempted:
            for ticket in tuple(send.live):
                self._port.cut_writes(ticket)
                if send.offer.prompt.ticket.mode == "pool":
                    self._sends.settle(ticket, HandoffError(PREEMPTED, stage="abort"))
        self._wait_for_ends(preempted, Instant(began_at + RELEASE_TIMEOUT_S))
        for send in preempted:
            if send.live:
                logger.error("%s: its blocks are still being read", send.offer.request)
            self._sends.drop_uncomputed(send)
        for request in orders.preempted:  # vLLM still waits for the others
            self._sends.drop(request, HandoffError(PREEMPTED, stage="abort"))

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out a step's orders, as early as vLLM reports them."""
        self._steps.num_begun += 1
        self._is_computing = False
        if orders is not NO_ORDERS:
            self._carry_out(orders)
        uncomputed = self._sends.uncomputed
        self.follows_layers = bool(self._ready or uncomputed or self._reported)

    def _carry_out(self, orders: StepOrders) -> None:
        self._orders = orders
        self._quiet_since = None
        if orders.occupancy is not None:
            self._occupancy = orders.occupancy
        if orders.arrived or orders.offers:
            self._sends.begin(orders)
        for prompt in orders.queued:
            self._loads.renew_leases(prompt)
        for expect in orders.expected:
            self._loads.start(expect)
        for decline in orders.declined:
            self._loads.decline(decline.prompt, decline.reason)
        for withdraw in orders.withdrawn:
            self._sends.withdraw(withdraw)
        for abort in orders.aborted:
            self._abort(abort)
        if orders.is_stalled:
            self._port.cancel_oldest_ungranted(self._sends.table.held, STALL_REASON)
        if orders.prefixes is not None:
            self._prefixes.begin(orders.prefixes)
        if orders.progress:
            self._ready = tuple(self._sends.extend(orders.progress))
        if orders.started or orders.finished:
            self._observer.step_begins(orders, self._clock.now())

    def look_up(self, lookup: LookUp | None, wait_s: float) -> StepReport:
        """Look for a prompt in the store, between two steps, and wait at most `wait_s`.

        None: wait for what was looked for before. Without an answer, a later step reports it. What
        happens to handoffs meanwhile, the next one does.
        """
        prefixes, now = self._prefixes, self._clock.now()
        if lookup is not None:
            prefixes.begin(PrefixOrders(lookups=(lookup,)))
            self._uses_store = True
        until = now + wait_s
        while now < until and not prefixes.has_found:
            self._poll_agent(until - now)
            now = self._clock.now()
        return StepReport(found=prefixes.take_found(), read=prefixes.take_read())

    def keep(self, keep: Keep) -> None:
        """Begin to keep what a request has left, between two steps: `await_kept` follows."""
        self._hurry(is_hurried=True)
        self._prefixes.begin(PrefixOrders(keeps=(keep,)))
        self._uses_store = True

    def await_kept(self, wait_s: float) -> StepReport:
        """Wait at most `wait_s` until some blocks are vLLM's again. A later step has the others."""
        prefixes, now = self._prefixes, self._clock.now()
        if wait_s > 0:
            self._hurry(is_hurried=True)
        until = now + wait_s
        while now < until and not prefixes.has_kept:
            self._poll_agent(until - now)
            now = self._clock.now()
        self._hurry(is_hurried=False)
        return StepReport(kept=prefixes.take_kept())

    def layer_done(self, layer_name: str) -> None:
        """A layer's KV of this step's tokens is computed, or launched: vLLM computes. Only queues.

        On CPUs prompts that end here are complete with the last layer's: their decode workers need
        not wait for the rest of the step (that layer's MLP, the sampling). Not needed where
        `follows_layers` is False.
        """
        if not self._is_computing:
            self._begin_computing()
        if not self._ready:
            self.follows_layers = False
            return
        layer = self._setting.layers.get(layer_name)
        if layer is None or layer in self._done_layers:
            return
        after = self._setting.record_position()
        self._done_layers.add(layer)
        self._launched.append((layer, after))
        if after is None:
            self._report_launched()
            return
        # A GPU computes it later: until all are launched, the agent's Python would mostly slow down
        # the launch. Launches that take long are not waited for.
        now = self._clock.now()
        if len(self._launched) == 1:
            self._first_launched_at = now
        elif now > self._first_launched_at + MAX_REPORT_DELAY_S:
            self._report_launched()

    def forward_launched(self) -> None:
        """All of a step that computes is launched: layers without `layer_done`, too.

        Again for the same step it does nothing.
        """
        if not self._is_computing:
            self._begin_computing()
        if not self._ready:
            return
        skipped = sorted(self._all_layers - self._done_layers)
        if skipped:
            after = self._setting.record_position()
            self._done_layers.update(skipped)
            self._launched += [(layer, after) for layer in skipped]
        self._report_launched()

    def end_step(self) -> None:
        """The step is over."""
        if self._ready:
            self.forward_launched()
        self.follows_layers = False
        if self._orders is not NO_ORDERS:
            self._orders = NO_ORDERS
            self._observer.step_ended(self._clock.now())

    def get_finished(
        self, finished: set[VllmRequestId], wait_s: float
    ) -> tuple[set[VllmRequestId], set[VllmRequestId]]:
        """Requests whose blocks are vLLM's again: `(sent, received)`, each returned once.

        `finished` are requests that vLLM's scheduler finished. Waits at most `wait_s`, where
        handoffs are all that could happen, for their next event; less where one was just now.
        """
        self._steps.num_ended = self._steps.num_begun
        sends, loads, prefixes = self._sends.table, self._loads.table, self._prefixes
        if finished:
            sends.finish(finished)
        uses_store = self._uses_store = not prefixes.is_idle
        is_idle = sends.is_empty and loads.is_empty and not uses_store
        if is_idle and not self._wake_event.is_set():
            return set(), set()
        is_awaited = loads.num_open or sends.num_held or (uses_store and prefixes.is_awaited)
        has_news = loads.has_finished or (uses_store and prefixes.has_news)
        # With asynchronous scheduling vLLM applies what a step reported after the next one only.
        may_wait = is_awaited and not has_news and not self._has_received
        if may_wait and wait_s > 0 and not self._wake_event.is_set():
            is_store = uses_store and prefixes.is_awaited
            self._wait_for_agent(wait_s, prefixes.answer_s if is_store else MIN_WAIT_S)
        self._poll_agent(0.0)
        received = loads.take_finished()
        if uses_store:
            prefixes.check_deadlines()
            received |= prefixes.take_finished()
        self._has_received = bool(received)
        return sends.take_released(), received

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that failed, reported together with the loads themselves."""
        blocks = self._loads.table.take_invalid_blocks()
        return blocks | self._prefixes.take_invalid_blocks() if self._uses_store else blocks

    def take_report(self) -> StepReport | None:
        """Failed sends and the store's answers, for the scheduler."""
        failed = self._sends.take_failed()
        if not self._uses_store:
            return StepReport(failed) if failed else None
        found, kept = self._prefixes.take_found(), self._prefixes.take_kept()
        if not (failed or found or kept):
            return None
        return StepReport(failed, found, kept, self._prefixes.take_read() if found else ())

    def take_records(self) -> list[HandoffRecord]:
        """Handoffs that ended since the last call."""
        return self._observer.take_records()

    @property
    def occupancy(self) -> Occupancy | None:
        """How full vLLM was at the last step; None before the first. Thread-safe."""
        return self._occupancy

    @property
    def store_loads(self) -> StoreLoads | None:
        """What was loaded from the store since the start; None without one. Thread-safe."""
        return self._prefixes.loads

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway reports that a ticket's other request failed. Thread-safe."""
        self._abort_fanout.abort_from_peer(ticket, reason)

    def _hurry(self, *, is_hurried: bool) -> None:
        if self._port.prefixes is not None:
            self._port.prefixes.hurry(is_hurried=is_hurried)

    def _wait_for_ends(self, sends: Sequence[SendInProgress], until: Instant) -> None:
        while any(send.live for send in sends) and self._clock.now() < until:
            self._poll_agent(until - self._clock.now())

    def _abort(self, abort: Abort) -> None:
        load = self._loads.table.find(abort.request)
        if load is not None:
            load.is_aborted = True
            self._abort_all(load.live, abort.reason)
        send = self._sends.table.find(abort.request)
        if send is not None:
            self._abort_all(send.live, abort.reason)

    def _abort_all(self, tickets: Iterable[TicketId], reason: str) -> None:
        for ticket in tickets:
            self._port.abort(ticket, reason)

    def _report_launched(self) -> None:
        """Notify the agent; with the last layer prompts that end in this step are complete.

        On a GPU the agent records when they are computed.
        """
        launched, self._launched = self._launched, []
        is_computed = launched[-1][1] is None
        is_first = len(launched) == len(self._done_layers)
        if is_computed and is_first:
            self._sends.stamp(self._orders.progress, Stamp.FIRST_LAYER_READY)
        for layer, after in launched:
            self._port.layer_ready(self._ready, layer, after)
        if len(self._done_layers) == len(self._all_layers):
            self._sends.complete(self._orders.progress, self._clock.now() if is_computed else None)
            self._ready = ()
            self._done_layers.clear()

    def _begin_computing(self) -> None:
        """Report what is not computed yet, once in each step that computes.

        That nothing is left to compute is news once.
        """
        self._is_computing = True
        uncomputed = self._sends.uncomputed
        if uncomputed or self._reported:
            self._reported = uncomputed
            self._port.report_progress(uncomputed)

    def _wait_for_agent(self, wait_s: float, least_s: float) -> None:
        now = self._clock.now()
        if self._quiet_since is None:
            self._quiet_since = now
        quiet_s = now - self._quiet_since
        self._wake_event.wait(min(wait_s, max(MIN_WAIT_S, least_s, WAIT_SHARE * quiet_s)))

    def _poll_agent(self, wait_s: float) -> None:
        """Take what the agent has; wait for it at most `wait_s`.

        The event is cleared before the look: what sets it afterwards is seen next time.
        """
        if wait_s > 0:
            self._wake_event.wait(wait_s)
        if self._wake_event.is_set():
            self._wake_event.clear()
            self._quiet_since = None
            for event in self._port.poll():
                self._handle_event(event)
        if not self._port.is_alive:
            self._fail_all()

    def _handle_event(self, event: HandoffEvent) -> None:
        match event:
            case PrefixFound(ticket, num_tokens, _, is_read):
                self._prefixes.answered(ticket, num_tokens, is_read=is_read)
            case KVLanded() | BlocksQuiescent() | KVSent() if self._is_of_store(event.ticket):
                num_tokens = event.num_tokens if isinstance(event, KVLanded) else None
                self._prefixes.answered(event.ticket, num_tokens or 0)
            case KVLanded(ticket, _, num_tokens):
                self._loads.landed(ticket, num_tokens)
            case KVFailed(ticket, error):
                self._loads.fail(ticket, error)
            case BlocksQuiescent(ticket):
                self._loads.settle(ticket)
            case KVSent(ticket):
                self._sends.settle(ticket, None)
            case SendFailed(ticket, error):
                self._sends.settle(ticket, error)
            case KVExported() | ExportReleased() | ImportRevoked() | LayersLanding():
                raise AssertionError("vLLM shares no blocks, and asks for no layers one by one")
            case _:
                assert_never(event)

    def _is_of_store(self, order: TicketId) -> bool:
        """Whether an event is the store's answer to an order of `RankPrefixes`."""
        return self._uses_store and order in self._prefixes

    def _fail_all(self) -> None:
        error = HandoffError("the handoff agent's thread has ended", stage="agent")
        self._loads.fail_all(error)
        self._sends.fail_all(error)
