"""vLLM's requests as the store's: what is looked for, and what is left when a request ends.

Duck-typed over vLLM's objects: nothing of vLLM is imported here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from baton.auth.ticket import hash_tenant
from baton.clock import Instant
from baton.engines.lookup_cost import TOLERATED_SHARE
from baton.engines.vllm.adapters import NotIdentified
from baton.engines.vllm.step_orders import Keep, LookUp
from baton.kv.copies import count_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from baton.clock import Clock
    from baton.engines.vllm.kept_blocks import CountedBlocks, KeptBlocks
    from baton.engines.vllm.prefix_schedule import PrefixSchedule
    from baton.engines.vllm.step_orders import PrefixOrders, StepReport, VllmRequestId
    from baton.kv.identity import Adapter

Identify: TypeAlias = "Callable[[], Adapter | NotIdentified | None]"

MOSTLY_PROMPTS: Final = 16
"""Tokens for each request in a step: more than a step that only decodes has, also by guessing."""
LONGEST_WAIT_S: Final = 0.05
"""For so long at most a step waits for answers of a rank on the scheduler's thread."""
LEAST_WAIT_S: Final = 0.005
"""As long as copies of one or two prompts take: with less, blocks would still be held when vLLM
looks for some."""
IDLE_S: Final = 0.1
"""Without a step for so long, vLLM is idle: most copies into the store are done by then."""


class NearRank(Protocol):
    """The only rank, which is on the scheduler's thread: between two steps."""

    def look_up(self, lookup: LookUp | None, wait_s: float) -> StepReport:
        """Look for a prompt (None: it was before), and wait at most `wait_s` for an answer."""
        ...

    def keep(self, keep: Keep) -> None:
        """Begin to keep what a request has left."""
        ...

    def await_kept(self, wait_s: float) -> StepReport:
        """Wait at most `wait_s` until some of it is copied."""
        ...


class PrefixAdmission:  # noqa: PLR0904 - one for each of vLLM's hooks
    """Owned by the scheduler's thread.

    A rank on the same thread is asked without a step: while nothing runs vLLM would make one
    without tokens for the question, and sleep for 1 ms. While something runs, prompts are looked
    for as they arrive: vLLM asks only about a request that it could run, and an answer takes a
    step, which on a busy server is longer than most prompts take. Where it is not there in time,
    the step waits for the rank, for a small share of what the last one took.
    """

    def __init__(
        self, schedule: PrefixSchedule, kept: KeptBlocks, *, block_size: int, clock: Clock
    ) -> None:
        self._schedule, self._kept, self._clock = schedule, kept, clock
        self._block_size = block_size
        self._planned: tuple[int, Instant] | None = None
        """The last step of prompts that has not ended: another may be planned before it does."""
        self._near: NearRank | None = None
        self._is_behind = False
        """Whether copies have not ended the last time that there was time for them."""
        self._is_hurried = False
        """Whether it copies what is to be kept as fast as it can."""
        self._wait_s = 0.0
        self._queued: dict[VllmRequestId, tuple[Request, Identify]] = {}
        """Those in vLLM's queue that are to be asked for, in the order of arrival."""
        self._admitted: set[VllmRequestId] = set()
        self._step_at: Instant | None = None
        self._step_s = self._waited_s = self._kept_wait_s = 0.0
        self._budget_s, self._earned_at = 0.0, Instant(0.0)
        """How long copies may be waited for; until when steps are counted in it."""
        self._checked_kept_at = Instant(0.0)

    def __contains__(self, request: VllmRequestId) -> bool:
        return request in self._schedule

    def bind(self, pool: CountedBlocks[object]) -> None:
        """The blocks of vLLM are known from now on."""
        self._kept.bind(pool)

    def use_rank(self, near: NearRank, wait_s: float) -> None:
        """Ask this rank without a step; for an answer wait `wait_s` where nothing runs.

        What has not come by then, the report of a later step has.
        """
        self._near, self._wait_s = near, wait_s

    def arrived(self, request: Request, identify: Identify) -> None:
        """A request has joined vLLM's queue. `identify`: as of `count_missing`."""
        is_long = request.num_prompt_tokens >= self._schedule.entry_tokens
        if self._admitted and is_long and not _ignores_caches(request):
            self._queued[request.request_id] = request, identify
            self._ask_ahead()

    def skip(self, request: Request, num_cached_tokens: int) -> None:
        """Do not look for this request's prompt."""
        self._queued.pop(request.request_id, None)
        self._schedule.skip(request.request_id, num_cached_tokens)

    def count_missing(
        self,
        request: Request,
        num_cached_tokens: int,
        identify: Identify,
    ) -> int | None:
        """How many tokens are to be loaded; None: vLLM is to ask again in its next step.

        `identify` finds what computes the request. It looks at files, once for each request.
        """
        schedule = self._schedule
        if schedule.is_ahead(request.request_id):
            self._await_rank(request.request_id)
        is_ahead = schedule.is_ahead(request.request_id)
        if is_ahead or request.request_id not in schedule:
            self._queued.pop(request.request_id, None)
            num_missing = request.num_prompt_tokens - num_cached_tokens
            fewest = schedule.cost.count_worth_asking(self._clock.now(), schedule.entry_tokens)
            if num_missing < fewest or _ignores_caches(request):
                schedule.skip(request.request_id, num_cached_tokens)
            elif is_ahead:
                schedule.wait(request.request_id, self._clock.now())
            elif schedule.is_full:
                limit_s = schedule.cost.compute_held_s(num_missing)
                if not schedule.waits_too_long(request.request_id, limit_s, self._clock.now()):
                    return None
                schedule.skip(request.request_id, num_cached_tokens)
            elif isinstance(adapter := identify(), NotIdentified):
                schedule.skip(request.request_id, num_cached_tokens)
            else:
                self._ask(self._make_lookup(request, num_cached_tokens, adapter))
        return schedule.count_missing(request.request_id, num_cached_tokens, self._clock.now())

    @property
    def needs_step(self) -> bool:
        """Whether vLLM is idle and one step, without tokens, may free blocks that were copied.

        While they are held vLLM does not reset its caches, and so can neither pause nor sleep.
        """
        return bool(self._kept) and self._clock.now() >= self._checked_kept_at + IDLE_S

    def reset(self) -> None:
        """What was looked for is not loaded any more."""
        self._schedule.reset()

    def is_read(self, request: VllmRequestId) -> bool:
        """Whether what is to be loaded is in all ranks' memory: vLLM need not wait for it."""
        return self._schedule.is_read(request)

    def is_stored(self, request: VllmRequestId) -> bool:
        """Whether an admitted request's tokens are loaded from the store, or were."""
        return self._schedule.is_stored(request)

    def count_loaded(self, request: VllmRequestId, num_computed_tokens: int) -> int:
        """How many of a request's tokens came from the store."""
        return self._schedule.count_loaded(request, num_computed_tokens)

    def allocated(self, request: Request, blocks: Sequence[int], num_external_tokens: int) -> None:
        """Blocks were found for a request."""
        self._admitted.add(request.request_id)
        self._schedule.allocated(request.request_id, blocks, num_external_tokens)

    def finish(
        self, request: Request, blocks: Sequence[int], adapter: Adapter | None, *, is_kept: bool
    ) -> None:
        """A request is over: what it computed is kept if `is_kept`, and if there is room for it.

        `adapter` has computed it.
        """
        schedule = self._schedule
        self._admitted.discard(request.request_id)
        self._queued.pop(request.request_id, None)
        num_present = schedule.finish(request.request_id)
        if num_present is None or not is_kept:
            return
        # The last token has no KV; those of a step that has not ended are not there yet.
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_tokens = min(num_computed, request.num_tokens - 1)
        num_tokens -= num_tokens % schedule.entry_tokens
        if num_tokens <= num_present:
            return
        # Only a step that ends waits for copies before vLLM plans the next one.
        near = self._near if self._step_at is not None and self._kept.is_crowded else None
        num_blocks = self._count_room(near, count_blocks(num_tokens, self._block_size))
        most = num_blocks * self._block_size
        num_kept = min(num_tokens, most - most % schedule.entry_tokens)
        held = blocks[: count_blocks(num_kept, self._block_size)]
        # Where vLLM leaves clients' ids as they are, one may be repeated while its KV is copied.
        if num_kept <= num_present or request.request_id in self._kept:
            schedule.drop(num_tokens)
            return
        self._kept.hold(request.request_id, held)
        if num_kept < num_tokens:
            schedule.drop(num_tokens - num_kept)
        self._checked_kept_at = self._clock.now()
        ids = _pack_ids(request, num_kept)
        salt = hash_tenant(request.cache_salt or "")
        keep = Keep(request.request_id, salt, ids, tuple(held), adapter)
        if near is None:
            schedule.keep(keep)
        else:
            near.keep(keep)
            self._is_hurried = True

    def take_orders(self, output: SchedulerOutput) -> PrefixOrders | None:
        """What the step that vLLM has planned asks of the store."""
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens >= MOSTLY_PROMPTS * max(1, len(output.num_scheduled_tokens)):
            self._planned = num_tokens, self._clock.now()
        self._earned_at = self._clock.now()
        self._step_at = self._earned_at if num_tokens else None
        self._waited_s = self._kept_wait_s = 0.0
        if self._kept:
            self._checked_kept_at = self._clock.now()
        return self._schedule.take_orders()

    def update_from_workers(self, received: set[str] | None, report: StepReport | None) -> None:
        """A step is over: apply the workers' reports."""
        if self._step_at is not None:
            self._step_s = self._clock.now() - self._step_at - self._kept_wait_s
            self._earn_wait()
        self._step_at = None
        if self._planned is not None:
            (num_tokens, began_at), self._planned = self._planned, None
            took_s = self._clock.now() - began_at - self._kept_wait_s
            self._schedule.cost.observe_step(num_tokens, took_s)
        for request in received or ():
            self._schedule.received(request)
        if report is not None:
            self._apply(report)
        if self._near is not None and self._is_hurried:
            self._await_kept(self._near, 0)
        self._ask_ahead()

    def _ask_ahead(self) -> None:
        schedule = self._schedule
        while self._queued and schedule.may_ask_ahead:
            request, identify = self._queued.pop(next(iter(self._queued)))
            if isinstance(adapter := identify(), NotIdentified):
                continue
            lookup = self._make_lookup(request, 0, adapter)
            schedule.ask_ahead(lookup)
            if self._near is None:
                schedule.order_lookup(lookup)
            else:
                self._apply(self._near.look_up(lookup, 0.0))

    def _await_rank(self, request: VllmRequestId) -> None:
        """Wait for the answer of a rank on this thread, where that costs the next step little."""
        if self._near is None:
            return
        most_s = min(LONGEST_WAIT_S, TOLERATED_SHARE * self._step_s)
        began_at = now = self._clock.now()
        until = Instant(began_at + most_s - self._waited_s)
        while now < until and self._schedule.is_ahead(request):
            self._apply(self._near.look_up(None, until - now))
            now = self._clock.now()
        self._waited_s += now - began_at

    def _count_room(self, near: NearRank | None, num_blocks: int) -> int:
        """Blocks that can be held of those of a request that has ended.

        Where there is time, a rank on this thread copies them, and those before, until vLLM looks
        for blocks again.
        """
        if near is None or self._is_behind or not self._earn_wait():
            return self._kept.count_room()
        if self._kept.count_room(is_brief=True) < num_blocks:
            self._await_kept(near, num_blocks)
        return self._kept.count_room(is_brief=self._earn_wait())

    def _await_kept(self, near: NearRank, num_blocks: int) -> None:
        """Wait for copies until there is room for so many blocks (0: until all have ended).

        Those that have not ended are paced from then on.
        """
        had_time = self._earn_wait()
        began_at = now = self._clock.now()
        until = Instant(began_at + self._budget_s)
        while True:
            wait_s = max(0.0, until - now) if self._kept else 0.0  # else nothing would end it
            self._apply(near.await_kept(wait_s))
            now = self._clock.now()
            has_room = num_blocks and self._kept.count_room(is_brief=True) >= num_blocks
            if now >= until or has_room or not self._kept:
                break
        self._budget_s, self._earned_at = max(0.0, until - now), now
        self._kept_wait_s += now - began_at
        self._is_hurried = False
        if had_time:
            self._is_behind = now >= until and bool(self._kept)

    def _earn_wait(self) -> bool:
        """Count steps since the last call as time to wait for copies; whether that is enough."""
        now = self._clock.now()
        earned_s = self._budget_s + TOLERATED_SHARE * (now - self._earned_at)
        self._budget_s, self._earned_at = min(LONGEST_WAIT_S, earned_s), now
        return self._budget_s >= LEAST_WAIT_S

    def _ask(self, lookup: LookUp) -> None:
        self._schedule.ask(lookup, self._clock.now())
        if self._near is None or self._admitted:
            self._schedule.order_lookup(lookup)
        else:
            self._apply(self._near.look_up(lookup, self._wait_s))

    def _apply(self, report: StepReport) -> None:
        for request in report.read:
            self._schedule.read(request)
        for request, num_tokens in report.found:
            self._schedule.answered(request, num_tokens)
        for request in report.kept:
            self._kept.kept(request)

    def _make_lookup(
        self, request: Request, num_cached_tokens: int, adapter: Adapter | None
    ) -> LookUp:
        return LookUp(
            request.request_id,
            hash_tenant(request.cache_salt or ""),
            _pack_ids(request, request.num_prompt_tokens),
            num_cached_tokens,
            self._schedule.cost.token_s,
            adapter,
        )


def _ignores_caches(request: Request) -> bool:
    """Whether vLLM computes all of the prompt in any case (it returns the prompt's logprobs)."""
    return bool(request.skip_reading_prefix_cache)


def _pack_ids(request: Request, num_tokens: int) -> bytes:
    """The first tokens of a prompt and its answer, as int32."""
    # A third of the time that numpy takes for a list.
    return struct.pack(f"{num_tokens}i", *request.all_token_ids[:num_tokens])
