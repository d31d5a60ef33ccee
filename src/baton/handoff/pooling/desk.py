"""The pool's thread: all of a worker's handoffs through the store.

    engine's thread ── commands ──► pool's thread ── events ──► engine's thread (`poll`)
                                      └ the store, the engine's blocks

It works on one batch of one handoff after the other, so that a long prompt holds up nobody for
long, and looks for awaited entries every few milliseconds. Reading and writing of blocks happens
here alone: with the event that ends a handoff, nobody touches its blocks any more.
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
from baton.handoff.graves import Grave, Graves
from baton.handoff.interface import BlocksQuiescent
from baton.handoff.pooling.carrying import Carrier
from baton.handoff.pooling.collection import Collection
from baton.handoff.pooling.deposit import Deposit
from baton.handoff.pooling.keeping import Keeper
from baton.handoff.pooling.pieces import name_pieces
from baton.handoff.pooling.signs import SignsOfLife, SignsSeen
from baton.handoff.pooling.taking import Taker
from baton.handoff.vouching import compute_interval_s
from baton.kv.identity import HashDomain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.authority.ticket import Ticket
    from baton.clock import Clock
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )
    from baton.handoff.pooling.pieces import Piece
    from baton.handoff.pooling.pool import Pool
    from baton.handoff.pulse import EnginePulse, Roll
    from baton.ids import TicketId

logger = logging.getLogger(__name__)

POLL_S: Final = 0.004
"""Between two looks for entries that are awaited, and at deadlines."""
TICK_S: Final = 0.05
"""Between two looks at deadlines of prefills, whose progress comes by commands."""
STOP_TIMEOUT_S: Final = 5.0
STOPPING: Final = "the worker is stopping"
UNNAMED: Final = "the order does not name its prompt's tokens"


class PoolDesk:
    """Thread-safe: every call only queues. Closes the store at its end."""

    def __init__(
        self, pool: Pool, *, fingerprint: str, clock: Clock, timeout_s: float, pulse: EnginePulse
    ) -> None:
        """Check that the worker's pages and the store fit; starts nothing.

        Raises:
            ConfigError: KV in such pages cannot be kept in the store.
        """
        self._pool, self._fingerprint = pool, fingerprint
        self._clock, self._timeout_s, self._pulse = clock, timeout_s, pulse
        self._heard: Roll | None = None
        interval_s = compute_interval_s(timeout_s)
        self._signs = SignsOfLife(pool.store, interval_s)
        self._seen = SignsSeen(pool.store, interval_s)
        self._carrier = Carrier(pool.face, pool.form)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deposits: dict[TicketId, Deposit] = {}
        self._collections: dict[TicketId, Collection] = {}
        self._given_up = Graves()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def open(self, emit: Callable[[HandoffEvent], None]) -> None:
        """Whom to tell; from the thread that calls `step`. Once."""
        self._emit = emit
        self._keeper = Keeper(self._pool, self._carrier, emit)
        self._taker = Taker(self._pool, self._carrier, clock=self._clock, emit=emit)

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

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.expect`."""
        self._commands.put(partial(self._expect, order))

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort.offer`."""
        self._commands.put(partial(self._offer, order))

    def computing(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort.computing`: the pulse has it, and is looked at."""
        if any(each.mode == "pool" for each in prompts):
            self._commands.put(_nothing)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort.layer_ready`."""
        self._commands.put(partial(self._layer_ready, tickets, layer))

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort.finish`."""
        self._commands.put(partial(self._finish, ticket, first_token))

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort.abort`."""
        self._commands.put(partial(self._abort, ticket, reason))

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The gateway says that this ticket's other half failed."""
        self._commands.put(partial(self._give_up, ticket, reason))

    def _run(self) -> None:
        wait_s: float | None = None
        while not self._is_stopping:
            wait_s = self.step(wait_s)
        self._signs.end()
        self._pool.store.close()

    def step(self, wait_s: float | None) -> float | None:
        """Wait for commands that long (None: for ever), carry them out, and one batch of each.

        Returns how long there is nothing to do then.
        """
        self._take_commands(wait_s)
        self._hear_engines()
        worked = [self._advance_deposit(each) for each in tuple(self._deposits.values())]
        worked += [self._advance_collection(c) for c in tuple(self._collections.values())]
        return 0.0 if any(worked) else self._patience_s()

    def _hear_engines(self) -> None:
        """Wait for longer where this worker's engine, or that of a prompt's prefill, computes."""
        roll = self._pulse.roll
        if roll is not self._heard:
            self._heard = roll
            pooled = [each for each in roll.prompts if each.mode == "pool"]
            for deposit in filter(None, (self._deposits.get(each.id) for each in pooled)):
                deposit.wait_until(Instant(roll.lived_at + self._timeout_s))
            self._signs.lived(pooled, roll.lived_at)
        if self._collections:
            self._seen.look(self._collections.values(), self._clock.now(), self._lives)

    def _lives(self, ticket: TicketId) -> None:
        collection = self._collections.get(ticket)
        if collection is not None:
            collection.wait_until(Instant(self._clock.now() + self._timeout_s))

    def _patience_s(self) -> float | None:
        """How long nothing has to be looked at; None: until the next command."""
        if self._collections:
            return POLL_S
        return TICK_S if self._deposits else None

    def _take_commands(self, wait_s: float | None) -> None:
        """Carry out what was asked for; wait for it while there is nothing else to do."""
        with suppress(queue.Empty):
            self._commands.get(timeout=wait_s)()
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()()

    def _advance_deposit(self, deposit: Deposit) -> bool:
        """One batch of what a prefill has computed; whether there was one."""
        ticket = deposit.order.ticket.id
        try:
            if self._keeper.step(deposit):
                return True
        except Exception as exc:  # noqa: BLE001 - one broken handoff must not end all others
            _report(exc)
            self._fail_deposit(ticket, str(exc), "store")
            return False
        if deposit.is_done:
            del self._deposits[ticket]
            self._keeper.finish(deposit)
        elif self._clock.now() >= deposit.deadline:
            self._fail_deposit(ticket, "the deadline passed before prefill was done", "store")
        return False

    def _advance_collection(self, collection: Collection) -> bool:
        """One batch of what has appeared for a decode; whether there was one."""
        ticket = collection.order.ticket.id
        try:
            # Before what it speaks of is read: if both are evicted meanwhile, nobody waits for it.
            self._taker.find_word(collection)
            if self._taker.step(collection):
                return True
            if not collection.next_pieces:
                del self._collections[ticket]
                self._taker.complete(collection)
                return False
            end = self._find_end(collection)
            # What was put before the end came may have been missed by the look before it.
            if end is not None and self._taker.step(collection):
                return True
        except Exception as exc:  # noqa: BLE001 - one broken handoff must not end all others
            _report(exc)
            end = Grave(str(exc), "store")
        if end is not None:
            del self._collections[ticket]
            self._taker.end_early(collection, end.reason, end.stage)
        return False

    def _find_end(self, collection: Collection) -> Grave | None:
        """Why nothing more will come, if so."""
        if collection.grave is not None:
            return collection.grave
        word = collection.word
        if word is not None:
            reason = word.reason or "what the prefill worker kept is in the store no more"
            return Grave(reason, "prefill" if word.reason else "store")
        if self._clock.now() >= collection.deadline:
            return Grave("the deadline passed before all was in the store", "store")
        return None

    def _expect(self, order: ReceiveOrder) -> None:
        ticket, pieces = order.ticket.id, self._name(order)
        collection = Collection(order, pieces, deadline=self._deadline(order))
        if not pieces:  # nothing to wait for is not the same as all there is
            self._taker.end_early(collection, UNNAMED, "store")
            return
        collection.grave = self._given_up.take(ticket)
        self._collections[ticket] = collection

    def _offer(self, order: SendOrder) -> None:
        ticket, pieces = order.ticket.id, self._name(order)
        self._deposits[ticket] = Deposit(
            order,
            pieces,
            num_layers=self._pool.form.whole.num_layers,
            deadline=self._deadline(order),
        )
        grave = self._given_up.take(ticket)
        if grave is None and not pieces:
            grave = Grave(UNNAMED, "store")
        if grave is not None:
            self._fail_deposit(ticket, grave.reason, grave.stage)

    def _name(self, order: ReceiveOrder | SendOrder) -> tuple[Piece, ...]:
        """The pieces of an order's prompt; none where it does not name all of its tokens."""
        if order.prompt_ids is None or len(order.prompt_ids) != order.num_tokens:
            return ()
        salt = order.ticket.tenant_salt
        domain = HashDomain(self._fingerprint, salt, self._pool.form.block_size)
        return name_pieces(domain, order.prompt_ids)

    def _layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        for ticket, stop in tickets:
            deposit = self._deposits.get(ticket)
            if deposit is not None:
                deposit.layer_ready(layer, stop)

    def _finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        deposit = self._deposits.get(ticket)
        if deposit is not None:
            deposit.finish(first_token)
            deposit.wait_until(Instant(self._clock.now() + self._timeout_s))

    def _abort(self, ticket: TicketId, reason: str) -> None:
        if self._collections.pop(ticket, None) is not None:
            self._taker.forget(ticket)
            self._emit(BlocksQuiescent(ticket))
        else:
            self._fail_deposit(ticket, reason, "abort")

    def _give_up(self, ticket: TicketId, reason: str) -> None:
        grave = Grave(reason, "gateway")
        collection = self._collections.get(ticket)
        if collection is not None:
            collection.grave = grave
        elif ticket in self._deposits:
            self._fail_deposit(ticket, reason, grave.stage)
        else:
            self._given_up.bury(ticket, grave)

    def _fail_deposit(self, ticket: TicketId, reason: str, stage: str) -> None:
        deposit = self._deposits.pop(ticket, None)
        if deposit is not None:
            self._keeper.fail(deposit, reason, stage)

    def _deadline(self, order: ReceiveOrder | SendOrder) -> Instant:
        return Instant(min(order.deadline, self._clock.now() + self._timeout_s))

    def _begin_stop(self) -> None:
        for ticket in tuple(self._deposits):
            self._fail_deposit(ticket, STOPPING, "stop")
        for collection in self._collections.values():
            self._taker.end_early(collection, STOPPING, "stop")
        self._collections.clear()
        self._is_stopping = True


def _nothing() -> None:
    """Wakes the thread."""


def _report(error: Exception) -> None:
    if not isinstance(error, BatonError):
        logger.error("the pool's thread met an unexpected error", exc_info=error)
