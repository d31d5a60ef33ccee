"""Prompts' beginnings in the store: what any worker computed is loaded instead of computed again.

    engine's thread ── start_load, start_keep ──► pool's thread ── KVLanded, KVSent ──► engine's

A lookup finds what is there, from the prompt's first missing token on, until the first entry that
is not. A load takes it. It is given up where to compute would be quicker: before it begins, by what
loads have taken lately, and between two batches, by what this one takes: a load is charged its own
batches, not those of others that load meanwhile. What an engine has computed is kept in the
background (`keep_queue`), when nothing is being loaded.

    engine's thread ── start_lookup ──► pool's thread ── PrefixFound, is_read ──► put_in_blocks

A `ReadOrder` is answered once what was found is in memory, where that is one batch. Then nothing is
left that could fail or be waited for, and the engine's thread copies it into blocks by itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError
from baton.handoff.interface import BlocksQuiescent, EngineSteps, KVLanded, PrefixFound
from baton.handoff.pool_mode.block_copier import hash_segments
from baton.handoff.pool_mode.keep_pace import KeepPace
from baton.handoff.pool_mode.keep_queue import KeepQueue
from baton.handoff.pool_mode.store_access import note_store_encoding
from baton.handoff.read_prefixes import ReadOrder
from baton.kv.identity import HashDomain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.handoff.interface import HandoffEvent, KeepOrder, LoadOrder, LookupOrder
    from baton.handoff.pool_mode.block_copier import TokenSegment
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.pool_mode.store_reader import ReadBatch, StoreReader
    from baton.handoff.pool_mode.store_writer import StoreWriter
    from baton.ids import TicketId

logger = logging.getLogger(__name__)

LEARNING: Final = 0.2
"""Weight of the latest load in what is expected of the next."""
FORGETTING: Final = 0.9
"""What remains of a load's expected time whenever it was too long: it is tried again some time."""
MAX_FOUND: Final = 64
"""Lookups whose answer is remembered for the load that follows it."""
MAX_READ_BYTES: Final = 32 << 20
"""Of KV that was read and is not in blocks yet: beyond that lookups read nothing."""
ERROR_PAUSE_S: Final = 1.0
"""Until a store that could not be looked at is looked at again."""


@dataclass(slots=True)
class LoadCost:
    """Seconds in which a token is loaded here; None: nothing was loaded yet."""

    token_s: float | None = None

    def is_worth_it(self, computed_token_s: float) -> bool:
        """Whether a token is loaded in less time than it is computed, as far as is known."""
        if self.token_s is None or computed_token_s <= 0 or self.token_s <= computed_token_s:
            return True
        self.token_s *= FORGETTING
        return False

    def observe(self, seconds: float, num_tokens: int) -> None:
        """A load, without its lookup, and without its waits for others that load meanwhile."""
        each = seconds / num_tokens
        known = each if self.token_s is None else self.token_s
        self.token_s = known + LEARNING * (each - known)


@dataclass(slots=True)
class PrefixCounts:
    """Since the start. Owner: the pool's thread; others read.

    Loads by their outcome: `whole`: all that the store had, `given_up`: computing was quicker,
    `unused`: read, and not wanted any more.
    `loaded_s` and `predicted_s` are of the loads for which there was a prediction. Entries that
    were to be kept: `num_dropped` found no room, in the engine or in the store; `num_waiting` are
    in the queue now. To keep the others, and to look for them, took `kept_s` of processor time.
    """

    num_whole: int = 0
    num_missing: int = 0
    num_given_up: int = 0
    num_failed: int = 0
    num_unused: int = 0
    loaded_tokens: int = 0
    loaded_s: float = 0.0
    predicted_s: float = 0.0
    num_stored: int = 0
    num_present: int = 0
    num_dropped: int = 0
    num_waiting: int = 0
    kept_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadOrder
    segments: Sequence[TokenSegment] | None = None
    own_s: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class StoredPrefixes:
    """Implements `ReadsPrefixes`; `step` is the pool's thread's.

    `put_command` passes a call on to that thread.
    """

    access: StoreAccess
    fingerprint: str
    clock: Clock
    put_command: Callable[[Callable[[], None]], None]
    counts: PrefixCounts = field(default_factory=PrefixCounts)
    cost: LoadCost = field(default_factory=LoadCost)
    steps: EngineSteps = field(default_factory=EngineSteps)
    _found: OrderedDict[TicketId, Sequence[TokenSegment]] = field(default_factory=OrderedDict)
    _read: dict[TicketId, ReadBatch] = field(default_factory=dict)
    """The pool's thread adds to it, the engine's takes out."""
    _loads: dict[TicketId, _Load] = field(default_factory=dict)
    _keeps: KeepQueue = field(init=False)
    _emit: Callable[[HandoffEvent], None] = field(init=False)
    _reader: StoreReader = field(init=False)
    _writer: StoreWriter = field(init=False)

    def open(
        self, emit: Callable[[HandoffEvent], None], reader: StoreReader, writer: StoreWriter
    ) -> None:
        """Set the receiver of events. Once."""
        self._emit, self._reader, self._writer = emit, reader, writer
        self._keeps = KeepQueue(
            self.access,
            self.fingerprint,
            self.clock,
            KeepPace(self.steps, self.access.keep_share),
            self.counts,
            writer,
            emit,
            _log,
        )

    @property
    def block_size(self) -> int:
        """See `PrefixStore`."""
        return self.access.entry_format.block_size

    def start_lookup(self, order: LookupOrder) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._answer_lookup, order, self.clock.now()))

    def start_load(self, order: LoadOrder) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._begin_load, _Load(order)))

    def put_in_blocks(self, order: LoadOrder) -> int:
        """See `ReadsPrefixes`."""
        read = self._read.pop(order.id, None)
        stop = len(order.prompt_ids)
        if read is None or read.segments[0].start > order.start:
            return order.start
        first = sum(each.stop <= order.start for each in read.segments)  # cached since it was read
        last = sum(each.stop <= stop for each in read.segments)
        if first >= last:
            return order.start
        self._reader.put_in_blocks(read.part(first, last), order)
        num_tokens = read.segments[last - 1].stop
        self.put_command(partial(self._count_read_load, read, num_tokens - order.start))
        return num_tokens

    def release(self, order: TicketId) -> None:
        """See `ReadsPrefixes`."""
        read = self._read.pop(order, None)
        if read is not None:
            self._reader.release(read)
            self.put_command(self._count_unused)

    def start_keep(self, order: KeepOrder) -> None:
        """See `PrefixStore`."""
        self.put_command(lambda: self._keeps.add(order))

    def drop(self, num_tokens: int) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._count_dropped, num_tokens // self.block_size))

    def abort_load(self, order: TicketId) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._abort_load, order))

    def step(self) -> float | None:
        """One batch of each load; of what is to be kept only where nothing is loaded.

        Returns how long there is nothing to do then; None: until the next call.
        """
        loads = tuple(self._loads.values())
        for load in loads:
            self._advance_load(load)
        if self._loads:
            return 0.0
        waits = (self._keeps.step(), self._check_reported())
        return min((each for each in waits if each is not None), default=None)

    def _check_reported(self) -> float | None:
        journal = self.access.journal
        try:
            return None if journal is None else journal.step(self._writer.name_parts)
        except Exception as exc:  # noqa: BLE001 - a broken store must not end this thread
            _log(exc)
            return ERROR_PAUSE_S

    def stop(self) -> None:
        """Answer all orders: nothing is accessed any more."""
        for load in tuple(self._loads.values()):
            self._end_load(load)
        self._keeps.stop()

    def _begin_load(self, load: _Load) -> None:
        self._loads[load.order.id] = load

    def _abort_load(self, order: TicketId) -> None:
        if self._loads.pop(order, None) is not None:
            self._emit(BlocksQuiescent(order))

    def _advance_load(self, load: _Load) -> None:
        try:
            is_over = self._look_up(load) if load.segments is None else self._load_batch(load)
        except Exception as exc:  # noqa: BLE001 - one broken load must not end all others
            _log(exc)
            self.counts.num_failed += 1
            is_over = True
        if is_over:
            self._end_load(load)

    def _answer_lookup(self, order: LookupOrder, asked_at: Instant) -> None:
        try:
            found = self._find(order)
            if isinstance(order, ReadOrder):
                found = self._try_read(order.id, found)
        except Exception as exc:  # noqa: BLE001 - one broken lookup must not end all others
            _log(exc)
            self.counts.num_failed += 1
            found = ()
        is_read = order.id in self._read
        if found and not is_read:
            self._found[order.id] = found
            if len(self._found) > MAX_FOUND:
                self._found.popitem(last=False)
        num_tokens, took_s = found[-1].stop if found else order.start, self.clock.now() - asked_at
        self._emit(PrefixFound(order.id, num_tokens, took_s, is_read))

    def _try_read(self, order: TicketId, found: Sequence[TokenSegment]) -> Sequence[TokenSegment]:
        """Read what was found, if it is one batch and there is memory; what can be loaded of it."""
        if not found or not self._reader.fits_one_batch(found):
            return found
        if sum(each.held_bytes for each in tuple(self._read.values())) >= MAX_READ_BYTES:
            return found
        read = self._reader.read_bodies(found)
        if read.segments:
            self._read[order] = read
        return read.segments

    def _look_up(self, load: _Load) -> bool:
        """Whether there is nothing to load."""
        order = load.order
        load.num_tokens = order.start
        found = self._found.pop(order.id, None)
        if found is None:
            found = self._find(order)
        stop = len(order.prompt_ids)
        load.segments = [each for each in found if order.start < each.stop <= stop]
        return not load.segments

    def _find(self, order: LookupOrder) -> Sequence[TokenSegment]:
        """What the store has from the order's first missing token on; none where that is slower."""
        wanted = [
            s for s in self._hash(order.tenant_salt, order.prompt_ids) if s.stop > order.start
        ]
        found = wanted[: self._writer.count_present(wanted)]
        if self.access.journal is not None:
            for missing in wanted[len(found) : len(found) + 1]:
                self.access.journal.note_missing(missing)
        if not found:
            self.counts.num_missing += 1
        elif not self.cost.is_worth_it(order.token_s):
            self.counts.num_given_up += 1
            return ()
        return found

    def _load_batch(self, load: _Load) -> bool:
        """Whether it is over: all is in place, an entry has gone, or it takes too long."""
        order, segments = load.order, load.segments
        if not segments:
            return True
        began_at = self.clock.now()
        num_read, _ = self._reader.read_segments(segments, order.start, order.blocks, order.guard)
        load.own_s += self.clock.now() - began_at
        if num_read:
            load.num_tokens = segments[num_read - 1].stop
            load.segments = segments[num_read:]
        seconds, num_loaded = load.own_s, load.num_tokens - order.start
        is_last = not load.segments or not num_read
        is_slow = 0 < order.token_s * num_loaded < seconds
        if not (is_last or is_slow):
            return False
        if is_slow and not is_last:
            self.counts.num_given_up += 1
        else:
            self.counts.num_whole += 1
        self._learn(seconds, num_loaded)
        self.counts.loaded_tokens += num_loaded
        return True

    def _learn(self, seconds: float, num_tokens: int) -> None:
        """So many tokens were loaded, or read, in this time."""
        if self.cost.token_s is not None:
            self.counts.predicted_s += num_tokens * self.cost.token_s
            self.counts.loaded_s += seconds
        if num_tokens:
            self.cost.observe(seconds, num_tokens)

    def _count_read_load(self, read: ReadBatch, num_tokens: int) -> None:
        """What was read is in blocks. What was read too late for that is learned nothing from."""
        self._learn(read.took_s, len(read.segments) * self.block_size)
        self.counts.num_whole += 1
        self.counts.loaded_tokens += num_tokens

    def _end_load(self, load: _Load) -> None:
        order = load.order
        del self._loads[order.id]
        if load.num_tokens > order.start and order.trace is not None:
            note_store_encoding(order.trace, self.access.encoding)
        self._emit(KVLanded(order.id, None, max(order.start, load.num_tokens)))

    def _count_unused(self) -> None:
        self.counts.num_unused += 1

    def _count_dropped(self, num_entries: int) -> None:
        self.counts.num_dropped += num_entries

    def _hash(self, tenant_salt: str, token_ids: NDArray[np.int32]) -> Sequence[TokenSegment]:
        """The full blocks."""
        domain = HashDomain(self.fingerprint, tenant_salt, self.block_size)
        num_full = len(token_ids) // self.block_size * self.block_size
        return hash_segments(domain, token_ids[:num_full])


def _log(error: Exception) -> None:
    if isinstance(error, BatonError):
        logger.debug("a prompt's beginning: %s", error)
    else:
        logger.error("the pool's thread met an unexpected error", exc_info=error)
