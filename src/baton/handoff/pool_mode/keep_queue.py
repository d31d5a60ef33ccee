"""What engines have computed, on its way into the store: one order after the other, in batches.

    start_keep ──► queued ──► named, looked for ──► copied, batch by batch ──► KVSent
                     │                 └──── some blocks at a time ◄──┘         ▲
                     └──── the engine has taken its blocks back: dropped ───────┘

What the store has is not copied; with `store.admission = "second"`, neither is what was not here
before, and what follows it. What it has then goes into its journal, if there is one. How much
is copied at once, and when, is `keep_pace`'s.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.handoff.interface import KVSent
from baton.handoff.pool_mode.block_copier import TokenSegment
from baton.kv.identity import HashDomain, adapt_fingerprint, compute_block_hashes
from baton.kv.prefix_names import salt_of_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent, KeepOrder
    from baton.handoff.pool_mode.keep_pace import KeepPace
    from baton.handoff.pool_mode.prefix_store import PrefixCounts
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.pool_mode.store_writer import StoreWriter
    from baton.kv.identity import BlockHash

KEEP_BATCH_BYTES: Final = 1 << 20
"""At most, of entries that are smaller: a lookup waits for one batch."""
KEEP_BATCH_ENTRIES: Final = 8
"""At most, of larger ones: a disk is busy while the next of them are copied."""
NAMED_ENTRIES: Final = 128
"""Named, looked for and reported at once: some 4 us each, in which this thread holds the
interpreter."""

MAX_SEEN: Final = 1 << 16
"""Blocks that were to be kept: about 150 bytes each."""


@dataclass(slots=True, eq=False)
class _Keep:
    """`num_named` of its blocks are named; of those, `segments` are to be copied next."""

    order: KeepOrder
    num_left: int
    num_named: int = 0
    last_named: TokenSegment | None = None
    segments: Sequence[TokenSegment] = ()
    unreported: list[TokenSegment] = field(default_factory=list)
    is_refused: bool = False
    """Some of it was here for the first time: nothing of what follows would be found."""


@dataclass(slots=True)
class KeepQueue:
    """Owner: the pool's thread."""

    access: StoreAccess
    fingerprint: str
    clock: Clock
    pace: KeepPace
    counts: PrefixCounts
    writer: StoreWriter
    emit: Callable[[HandoffEvent], None]
    log: Callable[[Exception], None]
    _keeps: deque[_Keep] = field(default_factory=deque, init=False)
    _seen: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict, init=False)
    """By `admission`, the latest at the end."""

    def __len__(self) -> int:
        return len(self._keeps)

    def add(self, order: KeepOrder) -> None:
        """Keep what an engine has computed, after what was added before."""
        if not self._keeps:
            self.pace.start(self.clock.now())
        keep = _Keep(order, len(order.token_ids) // self.access.entry_format.block_size)
        self._keeps.append(keep)
        self.counts.num_waiting += keep.num_left

    def step(self) -> float | None:
        """Copy one batch, if it is time. Returns how long to wait then; None: nothing is left."""
        if not self._keeps:
            return None
        began_at = self.clock.now()
        wait_s = self.pace.compute_wait_s(began_at)
        if wait_s > 0:
            return wait_s
        used_s, num_stored = self.clock.thread_time_s(), self.counts.num_stored
        self._advance(self._keeps[0])
        now, used_s = self.clock.now(), self.clock.thread_time_s() - used_s
        num_stored = self.counts.num_stored - num_stored
        self.pace.observe(now, now - began_at, used_s, num_stored)
        self.counts.kept_s += used_s
        return self.pace.compute_wait_s(now) if self._keeps else None

    def stop(self) -> None:
        """Answer all orders: their blocks are accessed no more."""
        while self._keeps:
            self._end(self._keeps[0])

    def _advance(self, keep: _Keep) -> None:
        """One batch of the first order, which ends with the last one, and where it fails."""
        if keep.order.guard.is_revoked or not keep.num_left:
            self._end(keep)
            return
        try:
            if keep.segments:
                self._copy_batch(keep)
            else:
                self._name_next(keep)
        except Exception as exc:  # noqa: BLE001 - full or broken: it costs caching only
            self.log(exc)
            self._end(keep)
            return
        if not keep.num_left:
            self._end(keep)

    def _name_next(self, keep: _Keep) -> None:
        """Name the next blocks of a sequence, and leave out those that the store has."""
        self._report(keep)
        order, size = keep.order, self.access.entry_format.block_size
        start, last = keep.num_named * size, keep.last_named
        hashes = compute_block_hashes(
            HashDomain(adapt_fingerprint(self.fingerprint, order.adapter), order.tenant_salt, size),
            order.token_ids[start : start + NAMED_ENTRIES * size],
            None if last is None else last.block_hash,
        )
        segments = [
            TokenSegment(each, at, at + size)
            for each, at in zip(hashes, range(start, len(order.token_ids), size), strict=False)
        ]
        keep.num_named += len(segments)
        keep.last_named = segments[-1]
        num_present = 0 if keep.is_refused else self.writer.count_present(segments)
        self.counts.num_present += num_present
        self._note_present(keep, segments[:num_present])
        keep.segments = self._admit(keep, segments[num_present:])

    def _admit(self, keep: _Keep, missing: Sequence[TokenSegment]) -> Sequence[TokenSegment]:
        """The leading ones that are to be kept; all are remembered, the others dropped."""
        if self.access.admission == "always":
            return missing
        are_known = [self._was_seen(each.block_hash) for each in missing]
        num = 0 if keep.is_refused else [*are_known, False].index(False)
        num_refused = len(missing) - num
        keep.is_refused = num_refused > 0
        keep.num_left -= num_refused
        self.counts.num_waiting -= num_refused
        self.counts.num_dropped += num_refused
        return missing[:num]

    def _was_seen(self, block: BlockHash) -> bool:
        is_known = block in self._seen
        self._seen[block] = None
        self._seen.move_to_end(block)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return is_known

    def _copy_batch(self, keep: _Keep) -> None:
        order, segments = keep.order, keep.segments
        most = max(KEEP_BATCH_ENTRIES, KEEP_BATCH_BYTES // self._entry_bytes)
        batch = segments[: self.pace.count_at_once(self.clock.now(), most)]
        num_kept, _ = self.writer.keep_segments(
            batch, order.blocks, order.tenant_salt, order.guard, after=order.after
        )
        self.counts.num_stored += num_kept
        self._note_present(keep, segments[:num_kept])
        keep.segments = segments[num_kept:]

    def _end(self, keep: _Keep) -> None:
        """The first order is over: what is left of it is not kept."""
        self._report(keep)
        self.counts.num_dropped += keep.num_left
        self.counts.num_waiting -= keep.num_left
        self._keeps.popleft()
        self.emit(KVSent(keep.order.id))

    def _note_present(self, keep: _Keep, present: Sequence[TokenSegment]) -> None:
        """The store has the next blocks of a sequence."""
        keep.num_left -= len(present)
        self.counts.num_waiting -= len(present)
        keep.unreported += present

    def _report(self, keep: _Keep) -> None:
        """To the journal, some at once: a gateway that waits for news asks again after each."""
        present, order = keep.unreported, keep.order
        if self.access.journal is not None and present:
            adapter = "" if order.adapter is None else order.adapter.name
            salt = salt_of_adapter(order.tenant_salt, adapter)
            self.access.journal.add_present(present, order.token_ids, salt, self.writer.name_parts)
        keep.unreported = []

    @property
    def _entry_bytes(self) -> int:
        """Of a full block, the parts that this worker holds."""
        entry_format, shard = self.access.entry_format, self.access.view.layout.shard
        parts = entry_format.parts_of_shard(shard)
        return sum(entry_format.body_bytes(part, entry_format.block_size) for part in parts)
