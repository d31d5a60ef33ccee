"""Prompts' beginnings in the store: what any worker computed is loaded instead of computed again.

    engine's thread ── start_load, start_keep ──► pool's thread ── KVLanded, KVSent ──► engine's

A lookup finds what is there, from the prompt's first missing token on, until the first entry that
is not. A load takes it, or as much of its beginning as is worth it (`load_costs`). It is given up
where to compute would be quicker: before it begins, by what loads from these tiers have taken
lately, and between two batches, by what this one takes: a load is charged its own batches, not
those of others that load meanwhile. What an engine has computed is kept in the background
(`keep_queue`), mostly when nothing is being loaded.

    engine's thread ── start_lookup ──► pool's thread ── PrefixFound, is_read ──► put_in_blocks

A `ReadOrder` is answered once what was found is in memory, where that is one batch. Then nothing is
left that could fail or be waited for, and the engine's thread copies it into blocks by itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.clock import Instant
from baton.errors import BatonError
from baton.handoff.interface import BlocksQuiescent, EngineSteps, KVLanded, PrefixFound
from baton.handoff.pool_mode.block_copier import hash_segments
from baton.handoff.pool_mode.keep_pace import KeepPace
from baton.handoff.pool_mode.keep_queue import KeepQueue
from baton.handoff.pool_mode.load_costs import LoadCosts, TierTime, TierTokens, add_times, cut
from baton.handoff.pool_mode.store_access import note_store_encoding
from baton.handoff.read_prefixes import ReadOrder
from baton.kv.identity import HashDomain, adapt_fingerprint
from baton.kv.prefix_names import salt_of_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent, KeepOrder, LoadOrder, LookupOrder
    from baton.handoff.pool_mode.block_copier import TokenSegment
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.pool_mode.store_reader import ReadBatch, StoreReader
    from baton.handoff.pool_mode.store_writer import StoreWriter
    from baton.ids import TicketId
    from baton.kv.identity import BlockHash

logger = logging.getLogger(__name__)

MAX_FOUND: Final = 64
"""Lookups whose answer is remembered for the load that follows it."""
MAX_READ_BYTES: Final = 32 << 20
"""Of KV that was read and is not in blocks yet: beyond that lookups read nothing."""
ERROR_PAUSE_S: Final = 1.0
"""Until a store that could not be looked at is looked at again."""
OTHERS_S: Final = 0.25
"""While something is loaded: between two batches of what is to be kept, and looks at entries."""
REPORT_WAIT_S: Final = 0.05
"""Between two reports of what lookups have found."""
ELSEWHERE_S: Final = 60.0
"""Until what was found, and is others' to report, is looked for once more: it may have moved."""
MAX_ELSEWHERE: Final = 4096
TURNS_S: Final = 2.0
"""So long a load goes on though computing would have been quicker: others take turns with it."""


@dataclass(slots=True)
class TierLoads:
    """What loads took in a tier, those for which there was a prediction; and that.

    `refused_tokens` were found there, and left to be computed.
    """

    loaded_s: float = 0.0
    predicted_s: float = 0.0
    refused_tokens: int = 0


@dataclass(slots=True)
class PrefixCounts:
    """Since the start. Owner: the pool's thread; others read.

    Loads by their outcome: `whole`: all that was worth it, `given_up`: computing was quicker,
    `unused`: read, and not wanted any more. `tiers`: those that anything was found in. Entries that
    were to be kept: `num_dropped` found no room, in the engine or in the store; `num_waiting` are
    in the queue now. To keep the others, and to look for them, took `kept_s` of processor time.
    """

    num_whole: int = 0
    num_missing: int = 0
    num_given_up: int = 0
    num_failed: int = 0
    num_unused: int = 0
    loaded_tokens: int = 0
    tiers: dict[str, TierLoads] = field(default_factory=dict)
    num_stored: int = 0
    num_present: int = 0
    num_dropped: int = 0
    num_waiting: int = 0
    kept_s: float = 0.0


class FoundPrefix(NamedTuple):
    """Adjacent full blocks of a prompt that the store has, and how many tokens of them by tier."""

    segments: Sequence[TokenSegment]
    runs: Sequence[TierTokens]

    def part(self, start: int, stop: int) -> FoundPrefix:
        """Pieces `[start, stop)` of it."""
        if not self.segments:
            return self
        size = self.segments[0].stop - self.segments[0].start
        return FoundPrefix(self.segments[start:stop], cut(self.runs, start * size, stop * size))


NOTHING: Final = FoundPrefix((), ())


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadOrder
    began_at: Instant
    found: FoundPrefix | None = None
    times: dict[str, TierTime] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def limit_s(self) -> float:
        """What it may take, with the others that load meanwhile: as long as computing."""
        order = self.order
        return max(TURNS_S, order.token_s * (len(order.prompt_ids) - order.start))


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
    costs: LoadCosts = field(default_factory=LoadCosts)
    steps: EngineSteps = field(default_factory=EngineSteps)
    _found: OrderedDict[TicketId, FoundPrefix] = field(default_factory=OrderedDict)
    _unreported: deque[tuple[LookupOrder, Sequence[TokenSegment]]] = field(
        default_factory=partial(deque, maxlen=MAX_FOUND)
    )
    _elsewhere: OrderedDict[BlockHash, Instant] = field(default_factory=OrderedDict)
    """Last blocks of what was found and is others' to report, and until when that is believed."""
    _read: dict[TicketId, ReadBatch] = field(default_factory=dict)
    """The pool's thread adds to it, the engine's takes out."""
    _loads: dict[TicketId, _Load] = field(default_factory=dict)
    _others_at: Instant = field(default=Instant(0.0), init=False)
    _pace: KeepPace = field(init=False)
    _keeps: KeepQueue = field(init=False)
    _emit: Callable[[HandoffEvent], None] = field(init=False)
    _reader: StoreReader = field(init=False)
    _writer: StoreWriter = field(init=False)

    def open(
        self, emit: Callable[[HandoffEvent], None], reader: StoreReader, writer: StoreWriter
    ) -> None:
        """Set the receiver of events. Once."""
        self._emit, self._reader, self._writer = emit, reader, writer
        self._pace = KeepPace(self.steps, self.access.keep_share)
        self._keeps = KeepQueue(
            self.access,
            self.fingerprint,
            self.clock,
            self._pace,
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
        self.put_command(partial(self._begin_load, _Load(order, self.clock.now())))

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

    def hurry(self, *, is_hurried: bool) -> None:
        """See `ReadsPrefixes`."""
        self.put_command(partial(setattr, self._pace, "is_hurried", is_hurried))

    def drop(self, num_tokens: int) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._count_dropped, num_tokens // self.block_size))

    def abort_load(self, order: TicketId) -> None:
        """See `PrefixStore`."""
        self.put_command(partial(self._abort_load, order))

    def step(self) -> float | None:
        """One batch of each load; between these, now and then, of what is to be kept or copied up.

        Returns how long there is nothing to do then; None: until the next call.
        """
        loads = tuple(self._loads.values())
        for load in loads:
            self._advance_load(load)
        if self._loads:
            now = self.clock.now()
            if now < self._others_at and not self._pace.is_hurried:
                return 0.0
            self._others_at = Instant(now + OTHERS_S)
        waits = (self._keeps.step(), self._check_reported(), self._promote())
        if self._loads:
            return 0.0
        return min((each for each in waits if each is not None), default=None)

    def _check_reported(self) -> float | None:
        """Look at what is reported, and report what lookups have found: not while they wait."""
        journal = self.access.journal
        if journal is None:
            return None
        try:
            if self._unreported:
                order, found = self._unreported.popleft()
                adapter = "" if order.adapter is None else order.adapter.name
                salt = salt_of_adapter(order.tenant_salt, adapter)
                journal.add_present(found, order.prompt_ids, salt, self._writer.name_parts)
                if not journal.reports(found[-1]):
                    self._note_elsewhere(found[-1])
            wait_s = journal.step(self._writer.name_parts)
            return min(wait_s, REPORT_WAIT_S) if self._unreported else wait_s
        except Exception as exc:  # noqa: BLE001 - a broken store must not end this thread
            _log(exc)
            return ERROR_PAUSE_S

    def _may_report(self, found: TokenSegment) -> bool:
        """Whether it is not reported, nor known to be where others report."""
        journal, until = self.access.journal, self._elsewhere.get(found.block_hash, -inf)
        is_new = journal is not None and not journal.reports(found)
        return is_new and self.clock.now() >= until

    def _note_elsewhere(self, found: TokenSegment) -> None:
        """Others report it, as what is in their memory: it is not looked for here for a while."""
        self._elsewhere[found.block_hash] = Instant(self.clock.now() + ELSEWHERE_S)
        if len(self._elsewhere) > MAX_ELSEWHERE:
            self._elsewhere.popitem(last=False)

    def _promote(self) -> float | None:
        try:
            return 0.0 if self.access.store.promote_waiting() else None
        except Exception as exc:  # noqa: BLE001 - a broken store must not end this thread
            _log(exc)
            return ERROR_PAUSE_S

    def stop(self) -> None:
        """Answer all orders: nothing is accessed any more."""
        for load in tuple(self._loads.values()):
            self._end_load(load)
        self._keeps.stop()

    def _begin_load(self, load: _Load) -> None:
        if not self._loads:
            self._others_at = Instant(self.clock.now() + OTHERS_S)
        self._loads[load.order.id] = load

    def _abort_load(self, order: TicketId) -> None:
        if self._loads.pop(order, None) is not None:
            self._emit(BlocksQuiescent(order))

    def _advance_load(self, load: _Load) -> None:
        try:
            is_over = self._look_up(load) if load.found is None else self._load_batch(load)
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
                found = self._try_read(order, found)
        except Exception as exc:  # noqa: BLE001 - one broken lookup must not end all others
            _log(exc)
            self.counts.num_failed += 1
            found = NOTHING
        is_read = order.id in self._read
        segments = found.segments
        if segments and not is_read:
            self._found[order.id] = found
            if len(self._found) > MAX_FOUND:
                self._found.popitem(last=False)
        num_tokens = segments[-1].stop if segments else order.start
        self._emit(PrefixFound(order.id, num_tokens, self.clock.now() - asked_at, is_read))

    def _try_read(self, order: ReadOrder, found: FoundPrefix) -> FoundPrefix:
        """Read what was found, if it is one batch and there is memory; what can be loaded of it."""
        if not found.segments or not self._reader.fits_one_batch(found.segments):
            return found
        if sum(each.held_bytes for each in tuple(self._read.values())) >= MAX_READ_BYTES:
            return found
        read = self._reader.read_bodies(found.segments)
        self._learn_lost(read.lost, order.token_s)
        if read.segments:
            self._read[order.id] = read
        else:
            self.counts.num_missing += 1
        return found.part(0, len(read.segments))

    def _look_up(self, load: _Load) -> bool:
        """Whether there is nothing to load."""
        order = load.order
        load.num_tokens = order.start
        found = self._found.pop(order.id, None)
        if found is None or found.segments[0].start > order.start:  # the cache has lost tokens
            found = self._find(order)
        stop = len(order.prompt_ids)
        first = sum(each.stop <= order.start for each in found.segments)
        last = sum(each.stop <= stop for each in found.segments)
        load.found = found.part(first, last)
        return not load.found.segments

    def _find(self, order: LookupOrder) -> FoundPrefix:
        """What the store has from the order's first missing token on, and is worth loading."""
        wanted = [segment for segment in self._hash(order) if segment.stop > order.start]
        runs = self._writer.find_tiers(wanted)
        num_found = sum(run.num for run in runs)
        if (journal := self.access.journal) is not None:
            for missing in wanted[num_found : num_found + 1]:
                journal.note_missing(missing)
            if num_found and self._may_report(wanted[num_found - 1]):
                self._unreported.append((order, wanted[:num_found]))
        if not num_found:
            self.counts.num_missing += 1
            return NOTHING
        tokens = [TierTokens(run.tier, run.num * self.block_size) for run in runs]
        return self._choose(FoundPrefix(wanted[:num_found], tokens), order.token_s)

    def _choose(self, found: FoundPrefix, token_s: float) -> FoundPrefix:
        """As much as is worth loading, by what loads have taken lately."""
        num_tokens = self.costs.choose(found.runs, token_s)
        if num_tokens == 0:
            self.counts.num_given_up += 1
        refused = cut(found.runs, num_tokens)
        self.costs.forget_slow(refused, token_s)
        for tier, num_refused in refused:
            self._count_tier(tier).refused_tokens += num_refused
        return found.part(0, num_tokens // self.block_size)

    def _load_batch(self, load: _Load) -> bool:
        """Whether it is over: all is in place, an entry has gone, or it takes too long.

        It then leaves what it has put in place.
        """
        order, found = load.order, load.found
        if found is None or not found.segments:
            return True
        began_at = self.clock.now()
        read = self._reader.read_segments(
            found.segments, order.start, order.blocks, order.guard, after=order.after
        )
        now, num_read = self.clock.now(), len(read.segments)
        took_s = now - began_at
        if num_read:
            load.num_tokens = read.segments[-1].stop
            order.progress.last_at = now
            add_times(load.times, read.times, took_s - read.timed_s)
        self._learn_lost(read.lost, order.token_s)
        rest = found.part(num_read, len(found.segments))
        num_worth_it = self.costs.choose(rest.runs, order.token_s, load.times)
        if num_read and num_worth_it and now - load.began_at < load.limit_s:
            load.found = rest.part(0, num_worth_it // self.block_size)
            return False
        if num_read and rest.segments:
            self.counts.num_given_up += 1
        elif load.num_tokens > order.start:
            self.counts.num_whole += 1
        else:
            self.counts.num_missing += 1
        self._learn(load.times.values())
        self.counts.loaded_tokens += load.num_tokens - order.start
        return True

    def _learn(self, times: Iterable[TierTime]) -> None:
        """What a load took, or a read."""
        for each in times:
            predicted_s = self.costs.predict(each.tier, each.num_tokens)
            counts = self._count_tier(each.tier)
            if predicted_s is not None:
                counts.predicted_s += predicted_s
                counts.loaded_s += each.seconds
            self.costs.observe(each)

    def _learn_lost(self, lost: TierTime | None, token_s: float) -> None:
        """An entry could not be read, for longer than it takes to compute, or to load.

        Else a tier whose reads are late, each time, would be tried for each prompt.
        """
        if lost is None or not token_s:
            return
        expected_s = self.costs.predict(lost.tier, lost.num_tokens) or 0.0
        if lost.seconds > max(expected_s, token_s * lost.num_tokens):
            self.costs.observe(lost)

    def _count_tier(self, tier: str) -> TierLoads:
        return self.counts.tiers.setdefault(tier, TierLoads())

    def _count_read_load(self, read: ReadBatch, num_tokens: int) -> None:
        """What was read is in blocks. What was read too late for that is learned nothing from."""
        self._learn(read.times)
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

    def _hash(self, order: LookupOrder) -> Sequence[TokenSegment]:
        """The full blocks of its prompt."""
        fingerprint = adapt_fingerprint(self.fingerprint, order.adapter)
        domain = HashDomain(fingerprint, order.tenant_salt, self.block_size)
        num_full = len(order.prompt_ids) // self.block_size * self.block_size
        return hash_segments(domain, order.prompt_ids[:num_full])


def _log(error: Exception) -> None:
    if isinstance(error, BatonError):
        logger.debug("a prompt's beginning: %s", error)
    else:
        logger.error("the pool's thread met an unexpected error", exc_info=error)
