"""The pool's thread: all of a worker's handoffs through the store.

    engine's thread ── commands ──► pool's thread ── events ──► engine's thread (`poll`)
                                      └ the store, the engine's blocks

It works on one batch of one handoff after the other, so that a long prompt delays no other for
long, and looks for awaited entries every few milliseconds. Blocks are read and written here alone:
after the event that ends a handoff, no thread accesses its blocks. A store that hangs delays that
event: `cut_writes` takes the blocks of a send back before.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.errors import BatonError
from baton.handoff.grants import Tombstone, Tombstones
from baton.handoff.heartbeat import (
    MAX_KEEPALIVE_INTERVAL_S,
    EngineHeartbeat,
    compute_interval_s,
)
from baton.handoff.interface import BlocksQuiescent
from baton.handoff.pool_mode.block_copier import BlockCopier, hash_segments
from baton.handoff.pool_mode.prefix_store import StoredPrefixes
from baton.handoff.pool_mode.side_entries import HeartbeatEntryReader, HeartbeatEntryWriter
from baton.handoff.pool_mode.store_reader import StoreRead, StoreReader
from baton.handoff.pool_mode.store_writer import StoreWrite, StoreWriter
from baton.kv.identity import HashDomain, adapt_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.ticket import Ticket
    from baton.clock import Clock
    from baton.handoff.block_guard import BlockGuard
    from baton.handoff.heartbeat import PendingPrefills
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
        StreamPosition,
    )
    from baton.handoff.pool_mode.block_copier import TokenSegment
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.ids import TicketId

logger = logging.getLogger(__name__)

POLL_S: Final = 0.004
"""Between two looks for entries that are awaited, at a GPU, and at deadlines."""
TICK_S: Final = 0.05
"""Between two looks at deadlines of prefills, whose progress comes by commands."""
MAX_SILENCE_S: Final = 15 * MAX_KEEPALIVE_INTERVAL_S
"""How long decode waits for a first sign of a prompt, or for its next entry. It is asked once
prefill has computed all, and writes a batch of each of its prompts in turns: on a slow tier, with
tens of prompts, seconds pass between two of one. What has not come after these is lost."""
STOP_TIMEOUT_S: Final = 5.0
STOPPING: Final = "the worker is stopping"
NO_PROMPT_IDS: Final = "the order does not name its prompt's tokens"


class StoreHandoff:
    """Thread-safe: every call but `cut_writes` only queues. Closes the store at its end."""

    def __init__(
        self,
        access: StoreAccess,
        *,
        fingerprint: str,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        """Check that the worker's pages and the store fit; starts nothing.

        Raises:
            ConfigError: KV in such pages cannot be kept in the store.
        """
        self.access, self._fingerprint = access, fingerprint
        self._clock, self._timeout_s = clock, timeout_s
        self._heartbeat = EngineHeartbeat(clock)
        self._last_reported: PendingPrefills | None = None
        interval_s = compute_interval_s(timeout_s)
        self._heartbeat_writer = HeartbeatEntryWriter(access.store, interval_s)
        self._heartbeat_reader = HeartbeatEntryReader(access.store, interval_s)
        self._copier = BlockCopier(access.view, access.entry_format)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.prefixes = StoredPrefixes(access, fingerprint, clock, self._commands.put)
        self._writes: dict[TicketId, StoreWrite] = {}
        self._guards: dict[TicketId, BlockGuard] = {}
        """Of sends that have not ended, queued ones too. The engine's thread adds, the pool's
        removes."""
        self._reads: dict[TicketId, StoreRead] = {}
        self._tombstones = Tombstones()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def open(self, emit: Callable[[HandoffEvent], None]) -> None:
        """Set the receiver of events; from the thread that calls `step`. Once."""
        self._emit = emit
        self._writer = StoreWriter(self.access, self._copier, clock=self._clock, emit=emit)
        self._reader = StoreReader(self.access, self._copier, clock=self._clock, emit=emit)
        self.prefixes.open(emit, self._reader, self._writer)

    def start(self) -> None:
        """Start the thread: the simulator calls `step` instead. Once, after `open`."""
        self._thread = threading.Thread(target=self._run, name="handoff-pool", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End every handoff, close the store, end the thread. Idempotent."""
        if self._thread is None:
            return
        self._commands.put(self._begin_stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the pool's thread did not stop within %s s", STOP_TIMEOUT_S)
        self._thread = None

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.start_receive`."""
        self._commands.put(partial(self._start_receive, order))

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort.start_send`."""
        self._guards[order.ticket.id] = order.guard
        self._commands.put(partial(self._start_send, order))

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort.report_progress`: the heartbeat has it; wake the thread."""
        self._heartbeat.report_progress(prompts)
        if any(each.mode == "pool" for each in prompts):
            self._commands.put(_nothing)

    def layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None = None,
    ) -> None:
        """See `HandoffPort.layer_ready`; `tickets` may be none of this mode."""
        self._heartbeat.tick()
        if tickets:
            self._commands.put(partial(self._layer_ready, tickets, layer, after))

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort.prefill_done`."""
        self._commands.put(partial(self._prefill_done, ticket, first_token))

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort.abort`."""
        self._commands.put(partial(self._abort, ticket, reason))

    def cut_writes(self, ticket: TicketId) -> None:
        """When this returns, a send's blocks are read no more, though `SendFailed` may come late.

        Waits for a copy in memory at most, whatever the store does.
        """
        guard = self._guards.get(ticket)
        if guard is not None:
            guard.revoke()

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway reports that this ticket's other half failed."""
        self._commands.put(partial(self._abort_from_peer, ticket, reason))

    def _run(self) -> None:
        wait_s: float | None = 0.0  # the store is looked at before the first command, too
        while not self._is_stopping:
            try:
                wait_s = self.step(wait_s)
            except Exception as exc:  # noqa: BLE001 - all handoffs would wait without limit
                _log_unexpected(exc)
                wait_s = TICK_S
        self._heartbeat_writer.remove()
        self.access.store.close()

    def step(self, wait_s: float | None) -> float | None:
        """Wait for commands that long (None: no limit), carry them out, and one batch of each.

        Returns how long there is nothing to do then.
        """
        self._take_commands(wait_s)
        self._check_engine_heartbeats()
        worked = [self._advance_write(each) for each in tuple(self._writes.values())]
        worked += [self._advance_read(c) for c in tuple(self._reads.values())]
        prefixes_wait_s = self.prefixes.step()
        if any(worked):
            return 0.0
        waits = [each for each in (self._idle_wait_s(), prefixes_wait_s) if each is not None]
        return min(waits, default=None)

    def _check_engine_heartbeats(self) -> None:
        """Wait for longer where this worker's engine, or that of a prompt's prefill, computes."""
        pending = self._heartbeat.pending
        if pending is not self._last_reported:
            self._last_reported = pending
            pooled = [each for each in pending.prompts if each.mode == "pool"]
            for store_write in filter(None, (self._writes.get(each.id) for each in pooled)):
                store_write.extend_deadline(Instant(pending.last_progress_at + self._timeout_s))
            self._heartbeat_writer.write(pooled, pending.last_progress_at)
        if self._reads:
            epochs = (each.order.ticket.prefill.epoch for each in self._reads.values())
            self._heartbeat_reader.poll(epochs, self._clock.now(), self._engine_alive)

    def _engine_alive(self, ticket: TicketId) -> None:
        store_read = self._reads.get(ticket)
        if store_read is not None:
            store_read.is_queued = True
            store_read.extend_deadline(Instant(self._clock.now() + self._timeout_s))

    def _idle_wait_s(self) -> float | None:
        """How long nothing has to be looked at; None: until the next command."""
        if self._reads or any(each.after is not None for each in self._writes.values()):
            return POLL_S
        return TICK_S if self._writes else None

    def _take_commands(self, wait_s: float | None) -> None:
        """Carry out what was asked for; wait for it while there is nothing else to do."""
        with suppress(queue.Empty):
            self._commands.get(timeout=wait_s)()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()

    def _advance_write(self, store_write: StoreWrite) -> bool:
        """One batch of what a prefill has computed; whether there was one."""
        ticket = store_write.order.ticket.id
        try:
            if self._writer.write_batch(store_write):
                return True
        except Exception as exc:  # noqa: BLE001 - one broken handoff must not end all others
            _log_unexpected(exc)
            self._fail_write(ticket, str(exc), "store")
            return False
        if store_write.is_done:
            self._end_write(ticket)
            self._writer.complete(store_write)
        elif self._clock.now() >= store_write.deadline:
            self._fail_write(ticket, "the deadline passed before prefill was done", "store")
        return False

    def _advance_read(self, store_read: StoreRead) -> bool:
        """One batch of what has appeared for a decode; whether there was one."""
        ticket = store_read.order.ticket.id
        try:
            # Before its entries are read: if both are evicted meanwhile, no read waits for them.
            self._reader.find_marker(store_read)
            if self._reader.read_batch(store_read):
                return True
            end = self._find_end(store_read) if store_read.pending_segments else None
            # What was put before the end came may have been missed by the look before it.
            if end is not None and self._reader.read_batch(store_read):
                return True
        except Exception as exc:  # noqa: BLE001 - one broken handoff must not end all others
            _log_unexpected(exc)
            end = Tombstone(str(exc), "store")
        if not store_read.pending_segments:
            del self._reads[ticket]
            self._reader.complete(store_read)
        elif end is not None:
            del self._reads[ticket]
            self._reader.end_early(store_read, end.reason, end.stage)
        return False

    def _find_end(self, store_read: StoreRead) -> Tombstone | None:
        """Why nothing more will come, if so."""
        if store_read.tombstone is not None:
            return store_read.tombstone
        marker = store_read.marker
        if marker is not None:
            reason = marker.reason or "what the prefill worker kept is in the store no more"
            return Tombstone(reason, "prefill" if marker.reason else "store")
        now = self._clock.now()
        if not store_read.is_queued and now >= store_read.last_landed_at + MAX_SILENCE_S:
            reason = "what the prefill worker kept, and its marker, are in the store no more"
            return Tombstone(reason, "store")
        if now >= store_read.deadline:
            return Tombstone("the deadline passed before all was in the store", "store")
        return None

    def _start_receive(self, order: ReceiveOrder) -> None:
        ticket, segments = order.ticket.id, self._hash_prompt(order)
        now = self._clock.now()
        store_read = StoreRead(order, segments, started_at=now, deadline=self._deadline(order))
        if not segments:  # nothing to wait for is not the same as all there is
            self._reader.end_early(store_read, NO_PROMPT_IDS, "store")
            return
        store_read.tombstone = self._tombstones.take(ticket)
        self._reads[ticket] = store_read

    def _start_send(self, order: SendOrder) -> None:
        ticket, segments = order.ticket.id, self._hash_prompt(order)
        self._writes[ticket] = StoreWrite(
            order,
            segments,
            num_layers=self.access.entry_format.full_layout.num_layers,
            deadline=self._deadline(order),
        )
        tombstone = self._tombstones.take(ticket)
        if tombstone is None and not segments:
            tombstone = Tombstone(NO_PROMPT_IDS, "store")
        if tombstone is not None:
            self._fail_write(ticket, tombstone.reason, tombstone.stage)

    def _hash_prompt(self, order: ReceiveOrder | SendOrder) -> tuple[TokenSegment, ...]:
        """The pieces of an order's prompt; none where it does not name all of its tokens."""
        if order.prompt_ids is None or len(order.prompt_ids) != order.num_tokens:
            return ()
        salt, fingerprint = order.ticket.tenant_salt, self._fingerprint
        domain = HashDomain(
            adapt_fingerprint(fingerprint, order.adapter),
            salt,
            self.access.entry_format.block_size,
        )
        try:
            return hash_segments(domain, order.prompt_ids)
        except Exception as exc:  # noqa: BLE001 - its engine is to be answered
            _log_unexpected(exc)
            return ()

    def _layer_ready(
        self,
        tickets: Sequence[tuple[TicketId, int]],
        layer: int,
        after: StreamPosition | None,
    ) -> None:
        for ticket, stop in tickets:
            store_write = self._writes.get(ticket)
            if store_write is not None:
                store_write.mark_layer_ready(layer, stop, after)

    def _prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        store_write = self._writes.get(ticket)
        if store_write is not None:
            store_write.mark_prefill_done(first_token)
            store_write.extend_deadline(Instant(self._clock.now() + self._timeout_s))

    def _abort(self, ticket: TicketId, reason: str) -> None:
        if self._reads.pop(ticket, None) is not None:
            self._emit(BlocksQuiescent(ticket))
            self._reader.remove_markers(ticket)
        else:
            self._fail_write(ticket, reason, "abort")

    def _abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        tombstone = Tombstone(reason, "gateway")
        store_read = self._reads.get(ticket)
        if store_read is not None:
            store_read.tombstone = tombstone
        elif ticket in self._writes:
            self._fail_write(ticket, reason, tombstone.stage)
        else:
            self._tombstones.add(ticket, tombstone)

    def _fail_write(self, ticket: TicketId, reason: str, stage: str) -> None:
        store_write = self._end_write(ticket)
        if store_write is not None:
            self._writer.fail(store_write, reason, stage)

    def _end_write(self, ticket: TicketId) -> StoreWrite | None:
        self._guards.pop(ticket, None)
        return self._writes.pop(ticket, None)

    def _deadline(self, order: ReceiveOrder | SendOrder) -> Instant:
        return Instant(min(order.deadline, self._clock.now() + self._timeout_s))

    def _begin_stop(self) -> None:
        self._is_stopping = True
        for ticket in tuple(self._writes):
            self._fail_write(ticket, STOPPING, "stop")
        for store_read in self._reads.values():
            self._reader.end_early(store_read, STOPPING, "stop")
        self._reads.clear()
        self.prefixes.stop()


def _nothing() -> None:
    """Wakes the thread."""


def _log_unexpected(error: Exception) -> None:
    if not isinstance(error, BatonError):
        logger.error("the pool's thread met an unexpected error", exc_info=error)
