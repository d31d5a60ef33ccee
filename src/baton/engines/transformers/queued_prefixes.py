"""Beginnings of prompts that wait: looked for in the store, and loaded into the prefix cache.

    unasked ──► awaited ──answered──► found ──► loading ──► done       (`PrefixState`)

Pure: no clock, no I/O. A load holds the blocks into which it writes, and none once it has ended:
then its prompt finds them by their hashes, as any other does, unless they had to be evicted first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from baton.engines.interface import DecodeRequest
from baton.engines.transformers.sequence import PrefixState, Sequence
from baton.ids import TicketId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from baton.engines.transformers.pinned_blocks import PinnedBlocks
    from baton.kv.pool import BlockPool

MAX_LOOKED_AHEAD: Final = 8
"""Waiting prompts, from the next one on, that are looked for and loaded before their turn."""


@dataclass(frozen=True, slots=True)
class WorthAsking:
    """How many tokens a prompt must lack to be looked for.

    `held_tokens`: it is held for the answer when its turn has come; `unheld_tokens`: it takes
    several steps, of which the first may be computed meanwhile; `queued_tokens`: it waits in any
    case.
    """

    held_tokens: int
    unheld_tokens: int
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A request whose tokens from `start` on are looked for in the store."""

    sequence: Sequence
    id: TicketId
    start: int


@dataclass(frozen=True, slots=True)
class PendingLoad(PendingLookup):
    """A request whose tokens `[start, stop)` are loaded from the store into `blocks`."""

    stop: int
    blocks: tuple[int, ...]


class QueuedPrefixes:
    """Lookups and loads of one engine. Owned by the engine's thread."""

    def __init__(self, pool: BlockPool, pinned_blocks: PinnedBlocks) -> None:
        self._pool, self._pinned_blocks = pool, pinned_blocks
        self._lookups: dict[TicketId, Sequence] = {}
        self._loads: dict[TicketId, PendingLoad] = {}

    @property
    def num_loads(self) -> int:
        """Loads that are under way."""
        return len(self._loads)

    def start_lookups(
        self, waiting: Iterable[Sequence], min_tokens: int, held_tokens: int
    ) -> Iterator[PendingLookup]:
        """Look for prompts that lack `min_tokens`, once for each; hold those of `held_tokens`."""
        for sequence in islice(waiting, MAX_LOOKED_AHEAD):
            is_received = isinstance(sequence.kind, DecodeRequest)
            if sequence.load_id is not None or sequence.num_output_tokens or is_received:
                continue
            hashes = sequence.reusable_hashes()
            num_cached = self._pool.find_cached(hashes) * sequence.block_size
            num_missing = sequence.num_prompt_tokens - num_cached
            if num_missing < min_tokens:
                continue
            # Tickets' ids are random: one that begins with so many zeros does not happen.
            sequence.load_id = order = TicketId(sequence.arrival.to_bytes(16, "big"))
            is_held = num_missing >= held_tokens
            sequence.prefix_state = PrefixState.AWAITED if is_held else PrefixState.ASKED
            self._lookups[order] = sequence
            yield PendingLookup(sequence, order, num_cached)

    def compute_meanwhile(self, order: TicketId) -> None:
        """Wait for this answer no more."""
        sequence = self._lookups.get(order)
        if sequence is not None:
            sequence.prefix_state = PrefixState.ASKED

    def start_loads(self, waiting: Iterable[Sequence], num_running: int) -> Iterator[PendingLoad]:
        """Load what was found, where it takes no room that those ahead, or running ones, need."""
        num_free = self._pool.num_free - num_running
        for sequence in islice(waiting, MAX_LOOKED_AHEAD):
            num_free -= sequence.num_blocks_for(sequence.num_tokens)
            if num_free < 0:
                return
            load = self.try_start_load(sequence, num_running)
            if load is not None:
                yield load

    def try_start_load(self, sequence: Sequence, num_running: int) -> PendingLoad | None:
        """Load what was found of a prompt, which keeps its place in the queue.

        None where there is nothing to load (any more), or no room for the prompt.
        """
        order, size = sequence.load_id, sequence.block_size
        if order is None or sequence.prefix_state is not PrefixState.FOUND:
            return None
        num_cached = self._pool.find_cached(sequence.reusable_hashes())
        num_missing = sequence.num_blocks_for(sequence.num_stored_tokens) - num_cached
        if num_missing <= 0:
            sequence.prefix_state = PrefixState.DONE
            return None
        cached = self._pool.acquire_cached(sequence.reusable_hashes())  # else they make room
        num_needed = sequence.num_blocks_for(sequence.num_tokens) - num_cached
        has_room = num_needed + num_running <= self._pool.num_free
        reserved = self._pool.try_reserve(num_missing) if has_room else None
        self._pool.release(cached)
        if reserved is None:
            return None
        sequence.prefix_state = PrefixState.LOADING
        start, stop, blocks = num_cached * size, sequence.num_stored_tokens, reserved.blocks
        self._loads[order] = load = PendingLoad(sequence, order, start, stop, blocks)
        self._pinned_blocks.grant(order, sequence, reserved)
        return load

    def end_load(self, order: TicketId) -> PendingLoad | None:
        """The store has answered a load; None where it has ended since."""
        load = self._loads.pop(order, None)
        if load is not None:
            load.sequence.prefix_state = PrefixState.DONE
        return load

    def end(self, order: TicketId) -> Sequence | None:
        """Stop to wait for a lookup or a load, whose blocks are quarantined; None: it has ended."""
        load = self.end_load(order)
        if load is not None:
            return self._pinned_blocks.quarantine(order)
        sequence = self._lookups.pop(order, None)
        if sequence is not None:
            sequence.prefix_state = PrefixState.DONE
        return sequence

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError where the loads under way are not those of the waiting sequences."""
        loading = {s.load_id for s in waiting if s.prefix_state is PrefixState.LOADING}
        if loading != self._loads.keys():
            raise AssertionError("what is being loaded is not what waits for it")


def waits_for_store(sequence: Sequence) -> bool:
    """Whether it is not computed now, whatever room there is."""
    return sequence.prefix_state in {PrefixState.AWAITED, PrefixState.LOADING}
