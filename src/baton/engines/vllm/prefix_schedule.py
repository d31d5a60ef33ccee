"""The scheduler's side: which prompts' beginnings are loaded from the store, and what is kept.

    Asked ─ all ranks answered ─► Found ─ allocated, some to load ─► Loading ─ received ─► Local
      ├ ahead: vLLM has not come to it yet. If it does before the answer, it waits, or ─► Local
      └ vLLM asks again until then  ├ allocated, all ranks have read it ─► Local
                                    └ allocated, nothing to load ─► Local

What all ranks have read while they looked is put in place by the step that computes the rest: vLLM
runs such a request at once. It need not wait for other loads, and nothing of it can fail.
A request in Local is computed by vLLM. vLLM's own cache comes first: only what it lacks is looked
for. Every rank has its own parts of an entry, so that only what all of them have counts. What is
found may have gone when it is to be loaded: then vLLM computes it. Pure: no clock, no I/O, nothing
of vLLM's. Owned by the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.engines.lookup_cost import LOAD_TIMEOUT_S
from baton.engines.vllm.step_orders import Keep, LookUp, PrefixOrders, StartLoad
from baton.kv.copies import blocks_holding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Instant
    from baton.engines.lookup_cost import LookupCost
    from baton.engines.vllm.step_orders import VllmRequestId

MAX_UNDER_WAY: Final = 4
"""Lookups and loads at once: a rank has one thread for them. Other requests wait for a place."""
MAX_AHEAD: Final = 8
"""Lookups besides, of requests that wait in vLLM's queue anyway."""
TOKEN_BYTES: Final = 4


@dataclass(slots=True)
class Asked:
    """The ranks look for it; `num_found` is the least that those have which answered.

    `is_found`: one of them has something. `num_read` of these have it in memory. `at`: since when
    the request waits for nothing else; None: it waits in vLLM's queue.
    """

    lookup: LookUp
    at: Instant | None
    num_found: int
    num_answers: int = 0
    num_read: int = 0
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens before `stop` are here or in the store. It took `lookup_s` to learn that.

    `is_read`: all ranks have them in memory.
    """

    lookup: LookUp
    stop: int
    lookup_s: float
    is_read: bool


@dataclass(frozen=True, slots=True)
class Loading:
    """Its blocks belong to the ranks until they report the request as received."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Local:
    """It is computed here. `num_present` of its tokens had been computed before it.

    Those from `loaded_from` on came from the store, if any did.
    """

    num_present: int
    loaded_from: int | None = None


State: TypeAlias = Asked | Found | Loading | Local


@dataclass(slots=True)
class _Pending:
    lookups: list[LookUp] = field(default_factory=list)
    loads: list[StartLoad] = field(default_factory=list)
    read_loads: list[StartLoad] = field(default_factory=list)
    released: list[VllmRequestId] = field(default_factory=list)
    aborted: list[VllmRequestId] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    num_dropped_tokens: int = 0


class PrefixSchedule:  # noqa: PLR0904 - one for each of vLLM's hooks
    """Every request that may be loaded from the store, or left in it.

    `block_size` is vLLM's, `entry_tokens` the store's.
    """

    def __init__(
        self, cost: LookupCost, *, num_ranks: int, block_size: int, entry_tokens: int
    ) -> None:
        self.cost, self.entry_tokens = cost, entry_tokens
        self._num_ranks, self._block_size = num_ranks, block_size
        self._states: dict[VllmRequestId, State] = {}
        self._under_way: set[VllmRequestId] = set()
        self._ahead: set[VllmRequestId] = set()
        self._waits: dict[VllmRequestId, Instant] = {}
        """Since when requests have waited for a place."""
        self._pending: _Pending | None = None

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request: VllmRequestId) -> bool:
        return request in self._states

    @property
    def is_full(self) -> bool:
        """Whether another lookup or load has to wait."""
        return len(self._under_way) >= MAX_UNDER_WAY

    @property
    def may_ask_ahead(self) -> bool:
        """Whether a request may be asked for that waits in vLLM's queue."""
        return len(self._ahead) < MAX_AHEAD

    def waits_too_long(self, request: VllmRequestId, limit_s: float, now: Instant) -> bool:
        """Whether a request that is to wait for a place has waited for `limit_s` already."""
        return now - self._waits.setdefault(request, now) >= limit_s

    def skip(self, request: VllmRequestId, num_cached_tokens: int) -> None:
        """Do not look for this request's prompt, nor wait for the answer."""
        state = self._states.get(request)
        self._forget(request)
        if isinstance(state, Asked | Found):
            self._release(state)
        self._states[request] = Local(num_cached_tokens)

    def ask(self, lookup: LookUp, now: Instant) -> None:
        """A prompt is looked for: `count_missing` is None until it is answered."""
        self._waits.pop(lookup.request, None)
        self._states[lookup.request] = Asked(lookup, now, len(lookup.packed_ids) // TOKEN_BYTES)
        self._under_way.add(lookup.request)

    def ask_ahead(self, lookup: LookUp) -> None:
        """A prompt is looked for while its request waits in vLLM's queue."""
        self._states[lookup.request] = Asked(lookup, None, len(lookup.packed_ids) // TOKEN_BYTES)
        self._ahead.add(lookup.request)

    def is_ahead(self, request: VllmRequestId) -> bool:
        """Whether it was asked for so, and there is no answer yet."""
        state = self._states.get(request)
        return request in self._ahead and isinstance(state, Asked) and state.at is None

    def wait(self, request: VllmRequestId, now: Instant) -> None:
        """One that was asked for ahead waits for nothing but the answer from now on."""
        state = self._states.get(request)
        if isinstance(state, Asked):
            state.at = now

    def order_lookup(self, lookup: LookUp) -> None:
        """Let the next step ask the ranks for it."""
        self._orders().lookups.append(lookup)

    def count_missing(
        self, request: VllmRequestId, num_cached_tokens: int, now: Instant
    ) -> int | None:
        """Tokens to load beyond the cached ones; None: ask again later.

        vLLM computes the last token of a prompt in any case: for that one alone nothing is loaded.
        """
        state = self._states.get(request)
        if isinstance(state, Asked):
            if state.num_answers < self._num_ranks:
                return None
            state = self._learn(state, num_cached_tokens, now)
        if not isinstance(state, Found):
            return 0
        if state.is_read and num_cached_tokens < state.lookup.start:
            state = self._forget_read(state)
        missing = state.stop - num_cached_tokens
        if missing <= 1:
            return 0
        if not self.is_full or state.is_read:
            return missing
        limit_s = self.cost.compute_s(missing)  # then to compute it is no slower
        return 0 if self.waits_too_long(request, limit_s, now) else None

    def is_read(self, request: VllmRequestId) -> bool:
        """Whether what is to be loaded for a request is in all ranks' memory."""
        state = self._states.get(request)
        return isinstance(state, Found) and state.is_read

    def allocated(self, request: VllmRequestId, blocks: Sequence[int], num_tokens: int) -> None:
        """A request was admitted: `blocks` hold it, `num_tokens` of its prompt are to be loaded.

        The first call decides; those after it (once the KV is there) are ignored.
        """
        state = self._states.get(request)
        if not isinstance(state, Found):
            return
        self._waits.pop(request, None)
        if num_tokens == 0:
            self._states[request] = Local(state.stop)
            self._release(state)
            return
        lookup, stop = state.lookup, state.stop
        start = stop - num_tokens
        held = blocks_holding(start, stop, self._block_size)
        load = StartLoad(
            request,
            lookup.tenant_salt,
            lookup.packed_ids[: stop * TOKEN_BYTES],
            start,
            self.cost.token_s,
            lookup.adapter,
            held.start,
            tuple(blocks[held.start : held.stop]),
            state.lookup_s,
        )
        if state.is_read:
            self._states[request] = Local(stop, start)
            self._orders().read_loads.append(load)
            return
        self._states[request] = Loading(start, stop)
        self._under_way.add(request)
        self._orders().loads.append(load)

    def read(self, request: VllmRequestId) -> None:
        """One rank has what it found in memory; before `answered`."""
        state = self._states.get(request)
        if isinstance(state, Asked):
            state.num_read += 1

    def answered(self, request: VllmRequestId, num_tokens: int) -> None:
        """One rank has looked: tokens before `num_tokens` can be in place there."""
        state = self._states.get(request)
        if isinstance(state, Asked):
            state.num_answers += 1
            state.num_found = min(state.num_found, num_tokens)
            state.is_found |= num_tokens > state.lookup.start
            if state.num_answers == self._num_ranks:
                self._under_way.discard(request)
                self._ahead.discard(request)

    def received(self, request: VllmRequestId) -> None:
        """All ranks report that a load has ended: its blocks are vLLM's again."""
        state = self._states.get(request)
        if isinstance(state, Loading):
            self._states[request] = Local(state.stop, state.start)
            self._under_way.discard(request)

    def finish(self, request: VllmRequestId) -> int | None:
        """A request is over; no call for it follows.

        Returns:
            How many of its tokens had been computed before it; None where its blocks do not hold
            what vLLM takes them to hold.
        """
        state = self._states.pop(request, None)
        self._forget(request)
        match state:
            case Loading():
                self._orders().aborted.append(request)
                return None
            case Local(num_present):
                return num_present
            case Asked() | Found():
                self._release(state)
        return 0

    def is_stored(self, request: VllmRequestId) -> bool:
        """Whether an admitted request's tokens are loaded from the store, or were."""
        state = self._states.get(request)
        return isinstance(state, Loading) or (
            isinstance(state, Local) and state.loaded_from is not None
        )

    def count_loaded(self, request: VllmRequestId, num_computed_tokens: int) -> int:
        """How many of a request's first `num_computed_tokens` came from the store."""
        state = self._states.get(request)
        if not isinstance(state, Local) or state.loaded_from is None:
            return 0
        return max(0, num_computed_tokens - state.loaded_from)

    def reset(self) -> None:
        """Load nothing that was looked for until now: those prompts are computed."""
        for request, state in self._states.items():
            if isinstance(state, Asked | Found):
                self._release(state)
                self._forget(request)
                self._states[request] = Local(0)

    def keep(self, keep: Keep) -> None:
        """Copy what a request leaves into the store."""
        self._orders().keeps.append(keep)

    def drop(self, num_tokens: int) -> None:
        """Count tokens that cannot be kept."""
        self._orders().num_dropped_tokens += num_tokens

    def take_orders(self) -> PrefixOrders | None:
        """The next step's; None where there are none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        return PrefixOrders(
            tuple(pending.lookups),
            tuple(pending.loads),
            tuple(pending.read_loads),
            tuple(pending.released),
            tuple(pending.aborted),
            tuple(pending.keeps),
            pending.num_dropped_tokens,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the requests under way are not those of the states."""
        under_way = {
            request
            for request, state in self._states.items()
            if isinstance(state, Loading)
            or (isinstance(state, Asked) and state.num_answers < self._num_ranks)
        }
        if under_way != self._under_way | self._ahead or self._under_way & self._ahead:
            raise AssertionError(f"{self._under_way}, {self._ahead} are not {under_way}")
        if len(self._under_way) > MAX_UNDER_WAY or len(self._ahead) > MAX_AHEAD:
            raise AssertionError(f"too many are under way: {self._under_way}, {self._ahead}")

    def _learn(self, asked: Asked, num_cached_tokens: int, now: Instant) -> Found:
        """All ranks have answered. What the request has waited is until vLLM asks again."""
        lookup, waited_s = asked.lookup, 0.0 if asked.at is None else now - asked.at
        num_tokens = len(lookup.packed_ids) // TOKEN_BYTES
        # vLLM computes at least a token of what runs at once.
        is_read = asked.num_found < num_tokens and asked.num_read == self._num_ranks
        found = Found(lookup, max(lookup.start, asked.num_found), waited_s, is_read)
        self._states[lookup.request] = found
        # Who has found what others lack remembers it.
        is_unused = asked.is_found and found.stop == lookup.start
        if is_unused or (asked.num_read and not is_read):
            self._orders().released.append(lookup.request)
        start = max(lookup.start, num_cached_tokens)
        if start < num_tokens and waited_s < LOAD_TIMEOUT_S:
            # else vLLM has all, or the store hung, maybe as it read what it had found
            self.cost.observe_answer(
                now,
                num_found=max(0, found.stop - start),
                num_missing=num_tokens - start,
                waited_s=None if asked.at is None else waited_s,
            )
        return found

    def _forget_read(self, found: Found) -> Found:
        """Load all of it: vLLM's cache has lost tokens, and what was read begins behind them."""
        self._release(found)
        found = replace(found, is_read=False)
        self._states[found.lookup.request] = found
        return found

    def _release(self, state: Asked | Found) -> None:
        """The ranks need not remember what they have found or read, or may be about to."""
        if isinstance(state, Asked) or state.stop > state.lookup.start:
            self._orders().released.append(state.lookup.request)

    def _forget(self, request: VllmRequestId) -> None:
        """It waits for no place, and has none."""
        self._waits.pop(request, None)
        self._under_way.discard(request)
        self._ahead.discard(request)

    def _orders(self) -> _Pending:
        if self._pending is None:
            self._pending = _Pending()
        return self._pending
