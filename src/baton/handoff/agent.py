"""The handoff agent of one worker, as its engine sees it, and its thread.

    engine's thread ── commands ──► agent's thread ── events ──► engine's thread (`poll`)
                                      │ `AgentLoop`
                       links to peers ┘  └ transports

The engine's calls only queue a command, and write one byte to a pipe where the thread may sleep.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from baton.handoff.agent_loop import AgentLoop, log_unexpected
from baton.handoff.heartbeat import EngineHeartbeat
from baton.record import MutableRecord
from baton.transfer.links.choice import LinkObserver, NullObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
        StreamPosition,
    )
    from baton.handoff.options import AgentOptions
    from baton.handoff.peer_transports import LinkReport
    from baton.ids import TicketId

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
MAX_FAILED_STEPS: Final = 100
"""And no tick that came to its end: the thread ends, which `/health` shows."""
THREAD_NAME: Final = b"baton-handoff"
_PR_SET_NAME: Final = 15


class ReadyLayers(NamedTuple):
    """KV of tokens `[0, stop)` of these layers is in place."""

    ticket: TicketId
    layers: Sequence[int]
    stop: int


class _Progress(MutableRecord):
    """One prompt: tokens `[start, stop)` are new in the layers that are being computed.

    `seen` has a bit for each layer that is ready up to `stop`; the agent was not notified of
    those in `pending` yet: they are not more than `batch_bytes`. `ready_at` is the trace's: when
    each layer was ready last.
    """

    start: int
    stop: int
    ready_at: list[float]
    batch_bytes: int
    seen: int = 0
    pending: list[int] = msgspec.field(default_factory=list)


class LayerBatcher:
    """Gathers ready layers of each prompt until they exceed `batch_bytes`, or the prompt ends.

    What is left goes with the prompt's end (`take`): a prompt of fewer bytes is sent at once. A
    notification wakes the agent's thread in the middle of a forward pass, and each write costs
    both workers some hundred microseconds; to send earlier is worth that only for bytes that take
    as long on their way. 0: each layer by itself, as it is of a prompt whose rest the decode worker
    may compute meanwhile.

    Prompts that are offered and not finished; owner: the engine's thread.
    """

    def __init__(self, batch_bytes: int, *, num_layers: int, bytes_per_token: int) -> None:
        self._batch_bytes = batch_bytes
        self._layer_token_bytes = bytes_per_token / num_layers
        self._num_layers = num_layers
        self._prompts: dict[TicketId, _Progress] = {}

    def add(self, order: SendOrder) -> None:
        """A prompt is offered."""
        num_ready, trace = order.num_ready_tokens, order.trace
        trace.layers_ready = [0.0] * self._num_layers
        batch_bytes = 0 if order.ticket.num_prefix_tokens else self._batch_bytes
        self._prompts[order.ticket.id] = _Progress(
            num_ready, num_ready, trace.layers_ready, batch_bytes
        )

    def layer_ready(
        self, tickets: Iterable[tuple[TicketId, int]], layer: int, at: float
    ) -> tuple[ReadyLayers, ...]:
        """For each `(ticket, stop)`: KV of tokens `[0, stop)` of `layer` is in place.

        `at` is now; 0 where a GPU has yet to compute it. Returns what the agent is to be notified
        of now.
        """
        bit = 1 << layer
        due: list[ReadyLayers] = []
        for ticket, stop in tickets:
            prompt = self._prompts.get(ticket)
            if prompt is None:
                continue  # it has ended
            if stop != prompt.stop:  # a new chunk, or the first one again
                if stop < prompt.stop:
                    prompt.start = 0
                elif not prompt.pending:
                    prompt.start = prompt.stop
                prompt.stop, prompt.seen = stop, 0
                prompt.pending.clear()  # they come again, up to this `stop`
            if prompt.seen & bit:
                continue
            prompt.seen |= bit
            prompt.ready_at[layer] = at
            prompt.pending.append(layer)
            num_bytes = len(prompt.pending) * (stop - prompt.start) * self._layer_token_bytes
            if num_bytes > prompt.batch_bytes:
                due.append(ReadyLayers(ticket, prompt.pending, stop))
                prompt.pending = []
        return tuple(due)

    def take(self, ticket: TicketId) -> ReadyLayers | None:
        """A prompt is computed, or has ended: the layers that are left, if there are any."""
        prompt = self._prompts.pop(ticket, None)
        if prompt is None or not prompt.pending:
            return None
        return ReadyLayers(ticket, prompt.pending, prompt.stop)


class HandoffAgent:  # noqa: PLR0904 - the engine's contract, and the process's
    """Implements `HandoffPort`, thread-safe. `loop`, once opened, is the agent's own thread's.

    For orders of every mode but pool: `HandoffDispatcher` stands between it and an engine.
    """

    loop: AgentLoop
    prefixes = None
    """Nothing is kept without a store."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self._events: deque[HandoffEvent] = deque()
        self._wake_engine: Callable[[], None] = _nothing
        self._observer: LinkObserver = NullObserver()
        layout = options.views[0].layout
        self._layers = LayerBatcher(
            options.layer_batch_bytes,
            num_layers=layout.num_layers,
            bytes_per_token=layout.bytes_per_token,
        )
        self._after: StreamPosition | None = None
        """Of the last layer that was ready; the engine's thread's."""
        self._heartbeat = EngineHeartbeat(options.clock)
        self._thread: threading.Thread | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """Where peers reach this agent: `host:port`, known after `start`."""
        return self._address

    def start(self, wake_engine: Callable[[], None]) -> None:
        """Listen, expose each KV view on every transport, start the thread. Call once.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the region of a view.
        """
        self.open(wake_engine)
        self._thread = threading.Thread(target=self._run, name="handoff-agent", daemon=True)
        self._thread.start()

    def open(self, wake_engine: Callable[[], None]) -> None:
        """`start` without the thread: the simulator calls `loop.step` instead."""
        self._wake_engine = wake_engine
        self.loop = self._make_loop()
        self._address = self.loop.address

    def _make_loop(self) -> AgentLoop:
        return AgentLoop(
            self.options, heartbeat=self._heartbeat, observer=self._observer, emit=self._emit
        )

    def stop(self) -> None:
        """End every handoff, close every socket and mapping, end the thread. Idempotent."""
        if self._thread is None:
            return
        self.loop.call(self.loop.begin_stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the handoff agent did not stop within %s s", STOP_TIMEOUT_S)
        self._thread = None

    def observe_links(self, observer: LinkObserver) -> None:
        """Report choices, transfers and failures to an observer. Call before `start`."""
        self._observer = observer

    def describe_links(self) -> Future[list[LinkReport]]:
        """The measured links with each peer, from the thread; empty once it has ended."""
        reply: Future[list[LinkReport]] = Future()

        def answer() -> None:
            if reply.set_running_or_notify_cancel():
                reply.set_result(self.loop.describe_links())

        if self.is_alive:
            self.loop.call(answer)
        else:
            reply.set_result([])
        return reply

    @property
    def num_lapsed_leases(self) -> int:
        """Prompts that were held here until their lease ran out."""
        return 0 if self._thread is None else self.loop.sending.num_lapsed_leases

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        self.loop.note(self.loop.receiving.renew_lease, ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        self.loop.call(self.loop.receiving.start_receive, order)

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        self._layers.add(order)
        # Nothing of it is in place yet: what is follows, and wakes the thread.
        self.loop.note(self.loop.sending.start_send, order)

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self._heartbeat.report_progress(prompts)

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """See `HandoffPort`."""
        self._heartbeat.tick()
        self._after = after
        at = self._heartbeat.pending.last_progress_at if after is None else 0.0
        due = self._layers.layer_ready(tickets, layer, at)
        if due:
            self.loop.call(self.loop.sending.layers_ready, due, after)

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        rest = self._layers.take(ticket)
        self.loop.call(self.loop.sending.prefill_done, ticket, first_token, rest, self._after)

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        self.loop.call(self.loop.receiving.decline, ticket, reason)

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self.loop.call(self.loop.abort, ticket, reason)

    def abort_all(self, reason: str) -> None:
        """Fail every handoff of this worker, on either side; those that come later are as before.

        Thread-safe. Pages that a peer may still write to stay quarantined, as after any abort.
        """
        self.loop.call(self.loop.abort_all, reason)

    def cut_writes(self, ticket: TicketId) -> None:
        """Its pages are needed: end the connections over which its writes are under way.

        For a handoff that was aborted, whose peer does not take what was sent. What else is written
        over these connections goes on over others. Where posted writes cannot be recalled
        (`Capabilities.late_writes`), nothing is done.
        """
        self.loop.call(self.loop.cut_writes, ticket)

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self.loop.call(self.loop.sending.cancel_oldest_ungranted, tuple(tickets), reason)

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway reports that this ticket's other half failed: recompute (or stop) now."""
        self.loop.call(self.loop.abort_from_peer, ticket, reason)

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""
        self.loop.call(self.loop.importer.release_imported, ticket)

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""
        self.loop.call(self.loop.exporter.revoke_exported)

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events: list[HandoffEvent] = []
        while self._events:
            event = self._events.popleft()
            self._layers.take(event.ticket)  # of a prompt that failed before it was computed
            events.append(event)
        return events

    def _emit(self, event: HandoffEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:  # else the engine was woken, and has not polled yet
            self._wake_engine()

    def _run(self) -> None:
        _name_this_thread(THREAD_NAME)
        loop = self.loop
        while not loop.is_stopping and loop.num_failed_steps < MAX_FAILED_STEPS:
            try:
                loop.step()
            except Exception:  # noqa: BLE001 - one broken handoff must not end all others
                log_unexpected("the handoff agent met an unexpected error")
                loop.num_failed_steps += 1
        if not loop.is_stopping:
            logger.critical("the handoff agent ends: %d steps have failed", loop.num_failed_steps)
            with suppress(Exception):
                loop.begin_stop()
        loop.close()


def _name_this_thread(name: bytes) -> None:
    """For `top -H` and /proc: Python names threads for itself alone. At most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _nothing() -> None:
    """Before `start`, no thread waits for events."""
