"""The scheduler's side: which requests' KV is transferred, and each step's orders to the workers.

    prefill:  Queued ─ scheduled ─► Computing ─ finished ─► (blocks held until reported sent)
                 └ finished: Withdraw   ├ preempted ─► LocalCompute
                                        └ the send failed ─► LocalCompute, blocks still held

    decode:   AwaitingBlocks ─ allocated, some missing ─► Loading ─ received ─► Landed
                 └ allocated, none missing: Decline ─► LocalCompute  │             │
                                              finished: Abort ◄──────┘             │
                                                          LocalCompute ◄─ scheduled ┘

A request in LocalCompute is computed by this server alone. Pure: no clock, no I/O, nothing of
vLLM's. Owned by the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from baton.engines.vllm.step_orders import (
    NO_ORDERS,
    Abort,
    Decline,
    Finished,
    Progress,
    StartReceive,
    StartSend,
    StepOrders,
    Withdraw,
)
from baton.engines.vllm.tickets import Refusal
from baton.kv.copies import blocks_holding, count_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from baton.engines.vllm.step_orders import Occupancy, PrefixOrders, Prompt, VllmRequestId

ALL_CACHED: Final = "the decode worker has it cached, but for the last token at most"


@dataclass(frozen=True, slots=True)
class Queued:
    """A prefill of which nothing was reported yet."""

    prompt: Prompt


@dataclass(slots=True)
class Computing:
    """A prefill that was offered: its first `num_blocks` blocks and `stop` tokens were reported."""

    prompt: Prompt
    num_blocks: int = 0
    stop: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class AwaitingBlocks:
    """A decode whose KV is to be received, once vLLM has blocks for it."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Loading:
    """A decode whose blocks belong to the handoff."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Landed:
    """A decode whose handoff is over, well or not."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class LocalCompute:
    """A request that has no handoff any more, or never had one. None where none is missed."""

    refusal: Refusal | None


State: TypeAlias = Queued | Computing | AwaitingBlocks | Loading | Landed | LocalCompute
_FOLLOWED: Final = (Queued, Computing, Landed)
"""States that change when their request is scheduled."""
_RECEIVING: Final = (AwaitingBlocks, Loading, Landed)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `[num_computed, stop)` of one request are in a step; `blocks` joined its table.

    `num_loaded` of the computed ones came from the store.
    """

    request: VllmRequestId
    blocks: Sequence[int]
    num_computed: int
    stop: int
    num_loaded: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    outcome: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Offered:
    """The prompt's KV was offered to its decode worker."""


@dataclass(frozen=True, slots=True)
class Released:
    """A finished request's blocks are vLLM's to free."""

    report: Offered | Refusal | None


@dataclass(frozen=True, slots=True)
class Held:
    """A finished request's blocks are held until the worker reports it as sent."""

    report: Offered | Refusal


FinishResult: TypeAlias = Released | Held


@dataclass(slots=True)
class _Pending:
    """Orders for the next step that do not come from the step itself."""

    arrived: list[Prompt] = field(default_factory=list)
    queued: list[Prompt] = field(default_factory=list)
    expected: list[StartReceive] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)
    withdrawn: list[Withdraw] = field(default_factory=list)
    aborted: list[Abort] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not (
            self.arrived
            or self.queued
            or self.expected
            or self.declined
            or self.withdrawn
            or self.aborted
            or self.finished
        )


class HandoffSchedule:  # noqa: PLR0904 - a method for each event
    """Every request that vLLM's scheduler has, as far as a handoff concerns it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._states: dict[VllmRequestId, State] = {}
        self._followed: set[VllmRequestId] = set()
        self._pending = _Pending()
        self._just_held: set[VllmRequestId] = set()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request: VllmRequestId) -> bool:
        return request in self._states

    def add(self, request: VllmRequestId, state: Queued | AwaitingBlocks | LocalCompute) -> None:
        """Take a new request in."""
        self._enter(request, state)
        match state:
            case AwaitingBlocks(prompt):
                self._pending.queued.append(prompt)
            case Queued(prompt):
                self._pending.arrived.append(prompt)
            case LocalCompute():
                pass

    def decline(self, prompt: Prompt, reason: str) -> None:
        """Nothing of this prompt's KV is wanted here; of it the ticket alone is used."""
        self._pending.declined.append(Decline(prompt, reason))

    def is_receiving(self, request: VllmRequestId) -> bool:
        """Whether a request waits for KV of its prefill worker, or has just got it."""
        return isinstance(self._states.get(request), _RECEIVING)

    @property
    def is_sending(self) -> bool:
        """Whether KV of a request that vLLM has not finished is on offer."""
        return any(isinstance(state, Computing) for state in self._states.values())

    def is_sent_through_store(self, request: VllmRequestId) -> bool:
        """Whether a request is a prefill of mode pool."""
        match self._states.get(request):
            case Queued(prompt) | Computing(prompt):
                return prompt.ticket.mode == "pool"
            case _:
                return False

    def count_missing(self, request: VllmRequestId, num_cached_tokens: int) -> int:
        """Tokens to receive beyond the cached ones: 0 where all but the last are cached.

        A prompt's last token is computed here in any case, and a single one rather than received.
        Changes nothing: vLLM asks again and again.
        """
        state = self._states.get(request)
        if not isinstance(state, AwaitingBlocks):
            return 0
        missing = state.prompt.num_tokens - num_cached_tokens
        return missing if missing > 1 else 0

    def allocated(self, request: VllmRequestId, blocks: Sequence[int], num_tokens: int) -> None:
        """A request was admitted: `blocks` hold it, `num_tokens` of its prompt are to be received.

        The first call decides; those after it (once the KV is there) are ignored.
        """
        state = self._states.get(request)
        if not isinstance(state, AwaitingBlocks):
            return
        prompt = state.prompt
        if num_tokens == 0:
            self._enter(request, LocalCompute(None))
            self._pending.declined.append(Decline(prompt, ALL_CACHED))
            return
        start = prompt.num_tokens - num_tokens
        held = blocks_holding(start, prompt.num_tokens, self._block_size)
        self._enter(request, Loading(prompt))
        self._pending.expected.append(
            StartReceive(request, prompt, start, held.start, tuple(blocks[held.start : held.stop]))
        )

    @property
    def followed(self) -> AbstractSet[VllmRequestId]:
        """The requests that `step` needs to see, in each step that computes tokens of them."""
        return self._followed

    def step(
        self,
        scheduled: Iterable[Scheduled],
        preempted: Collection[VllmRequestId],
        *,
        is_stalled: bool = False,
        occupancy: Occupancy | None = None,
        prefixes: PrefixOrders | None = None,
    ) -> StepOrders:
        """One step's orders: `NO_ORDERS` where there are none.

        Preempted requests lost their blocks before anything was scheduled.
        """
        lost: tuple[VllmRequestId, ...] = ()
        lost_while_held: tuple[VllmRequestId, ...] = ()
        if preempted:
            lost_while_held = tuple(r for r in preempted if r in self._just_held)
            lost = tuple(request for request in preempted if self._preempt(request))
        self._just_held.clear()
        offers: list[StartSend] = []
        progress: list[Progress] = []
        started: list[VllmRequestId] = []
        for work in scheduled:
            match self._states.get(work.request):
                case Queued(prompt):
                    state = Computing(prompt, stop=work.num_computed)
                    self._enter(work.request, state)
                    offers.append(
                        StartSend(work.request, prompt, work.num_computed, work.num_loaded)
                    )
                    progress.append(self._advance(state, work))
                case Computing() as state if state.stop < state.prompt.num_tokens:
                    progress.append(self._advance(state, work))
                case Landed():
                    started.append(work.request)
                    self._enter(work.request, LocalCompute(None))
                case _:
                    pass
        pending = self._pending
        has_news = occupancy is not None or prefixes is not None
        is_new = is_stalled or has_news or lost or lost_while_held
        if not (is_new or progress or started) and pending.is_empty:
            return NO_ORDERS
        self._pending = _Pending()
        return StepOrders(
            preempted=lost,
            preempted_while_held=lost_while_held,
            offers=tuple(offers),
            progress=tuple(progress),
            arrived=tuple(pending.arrived),
            queued=tuple(pending.queued),
            expected=tuple(pending.expected),
            declined=tuple(pending.declined),
            withdrawn=tuple(pending.withdrawn),
            aborted=tuple(pending.aborted),
            started=tuple(started),
            finished=tuple(pending.finished),
            is_stalled=is_stalled,
            occupancy=occupancy,
            prefixes=prefixes,
        )

    def send_failed(self, request: VllmRequestId, reason: str) -> None:
        """A worker reports that an offered prompt's handoff failed; it may still be computing."""
        state = self._states.get(request)
        if isinstance(state, Computing) and state.failure is None:
            state.failure = reason

    def received(self, request: VllmRequestId) -> None:
        """All workers report that a load has ended: its blocks are vLLM's again."""
        state = self._states.get(request)
        if isinstance(state, Loading):
            self._enter(request, Landed(state.prompt))

    def end_waiting(self, reason: str) -> None:
        """End the handoffs of requests that have no blocks yet: they are computed here."""
        for request, state in self._states.items():
            match state:
                case Queued(prompt):
                    self._pending.withdrawn.append(Withdraw(prompt, reason))
                    self._enter(request, LocalCompute(Refusal("handoff_failed", reason)))
                case AwaitingBlocks(prompt):
                    self._pending.declined.append(Decline(prompt, reason))
                    self._enter(request, LocalCompute(None))
                case _:
                    pass

    def finish(self, request: VllmRequestId, ending: Ending) -> FinishResult:
        """A request is over, in whatever state; no call for it follows."""
        state = self._states.pop(request, None)
        self._followed.discard(request)
        match state:
            case None:
                return Released(None)
            case Queued(prompt):
                reason = f"{ending.outcome} before prefill began"
                self._pending.withdrawn.append(Withdraw(prompt, reason))
                return Released(Refusal("handoff_failed", reason))
            case Computing():
                return self._finish_send(request, state, ending)
            case AwaitingBlocks(prompt):
                self._pending.declined.append(Decline(prompt, f"{ending.outcome} before it began"))
            case Loading():
                self._pending.aborted.append(Abort(request, ending.outcome))
            case Landed() | LocalCompute(None):
                pass
            case LocalCompute(refusal):
                return Released(refusal)
            case _:
                assert_never(state)
        self._record_finished(request, ending)
        return Released(None)

    def check_invariants(self) -> None:
        """Raise AssertionError where the orders of a prefill are inconsistent."""
        followed = {r for r, state in self._states.items() if isinstance(state, _FOLLOWED)}
        if followed != self._followed:
            raise AssertionError(f"followed are {self._followed}, not {followed}")
        for request, state in self._states.items():
            if not isinstance(state, Computing):
                continue
            most = self._num_blocks_for(state.prompt.num_tokens)
            if not 0 <= state.stop <= state.prompt.num_tokens or state.num_blocks > most:
                raise AssertionError(f"{request} has progress beyond its prompt: {state}")
            if state.num_blocks < self._num_blocks_for(state.stop):
                raise AssertionError(f"{request} computes tokens without blocks: {state}")

    def _enter(self, request: VllmRequestId, state: State) -> None:
        self._states[request] = state
        if isinstance(state, _FOLLOWED):
            self._followed.add(request)
        else:
            self._followed.discard(request)

    def _finish_send(
        self, request: VllmRequestId, state: Computing, ending: Ending
    ) -> Released | Held:
        if state.stop < state.prompt.num_tokens:  # also if it has failed: other ranks still send it
            state.failure = state.failure or f"{ending.outcome} before prefill was done"
            self._pending.aborted.append(Abort(request, state.failure))
        self._record_finished(request, ending)
        self._just_held.add(request)
        if state.failure is not None:
            return Held(Refusal("handoff_failed", state.failure))
        return Held(Offered())

    def _preempt(self, request: VllmRequestId) -> bool:
        """Whether a handoff must be ended, because the blocks that it reads were taken away."""
        match self._states.get(request):
            case Computing():
                reason = "the prefill was preempted for want of KV blocks"
                self._enter(request, LocalCompute(Refusal("handoff_failed", reason)))
                return True
            case _:
                return False

    def _advance(self, state: Computing, work: Scheduled) -> Progress:
        most = self._num_blocks_for(state.prompt.num_tokens)
        first = state.num_blocks
        blocks = tuple(work.blocks[: most - first])
        state.num_blocks += len(blocks)
        state.stop = min(work.stop, state.prompt.num_tokens)
        is_last = state.stop == state.prompt.num_tokens
        return Progress(work.request, first, blocks, state.stop, is_last)

    def _record_finished(self, request: VllmRequestId, ending: Ending) -> None:
        self._pending.finished.append(Finished(request, ending.outcome, ending.num_output_tokens))

    def _num_blocks_for(self, num_tokens: int) -> int:
        return count_blocks(num_tokens, self._block_size)
