"""The scheduler's hooks: converts vLLM's requests and steps to plain values, and results back.

Duck-typed over vLLM's objects: nothing of vLLM is imported here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import msgspec
import numpy as np

from baton.auth.ticket import hash_tenant
from baton.engines.stall_detector import StallDetector
from baton.engines.vllm.compatibility import read_preempted
from baton.engines.vllm.handoff_schedule import (
    AwaitingBlocks,
    Ending,
    HandoffSchedule,
    Held,
    LocalCompute,
    Offered,
    Queued,
    Released,
    Scheduled,
)
from baton.engines.vllm.identity import describe_worker
from baton.engines.vllm.step_orders import Occupancy, Prompt
from baton.engines.vllm.tickets import NoHandoff, Probe, Receive, Refusal, RefusalCounter, Send
from baton.kv.copies import count_blocks
from baton.kv.identity import compute_prompt_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from baton.auth.ticket import Ticket
    from baton.clock import Clock, Instant
    from baton.engines.vllm.handoff_schedule import FinishResult
    from baton.engines.vllm.identity import Identity, ModelFacts, RankFacts
    from baton.engines.vllm.step_orders import StepOrders, StepReport, VllmRequestId
    from baton.engines.vllm.tickets import TicketReader


class HeldPrompts:
    """Owned by the scheduler's thread. A prompt counts from its arrival on."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[VllmRequestId, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that they have, or will."""
        return sum(self._blocks.values())

    def try_add(self, request: VllmRequestId, num_blocks: int) -> bool:
        """Take a prompt in, if there is room for it beside the others."""
        if self.num_blocks + num_blocks > self._max_blocks:
            return False
        self._blocks[request] = num_blocks
        return True

    def drop(self, requests: Iterable[VllmRequestId]) -> None:
        """Their blocks are vLLM's again. Others are ignored."""
        for request in requests:
            self._blocks.pop(request, None)


class VllmBlockPool(Protocol):
    """What is used of vLLM's `BlockPool`. A block that is only cached is free."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int:
        """Blocks that the next request may have."""
        ...


TOLERATED_PART: Final = 32
"""A report of free blocks may be wrong by this part of all blocks, while vLLM is idle."""


class SchedulerPressure:
    """Owned by the scheduler's thread."""

    def __init__(self, block_size: int, max_running: int | None = None) -> None:
        self._block_size, self._max_running = block_size, max_running
        self._pool: VllmBlockPool | None = None
        self._waiting: set[VllmRequestId] = set()
        self._blocked: set[VllmRequestId] = set()
        self._held: set[VllmRequestId] = set()
        self._stall_detector = StallDetector()
        self._last_reported: Occupancy | None = None

    def bind(self, pool: VllmBlockPool) -> None:
        """The blocks of vLLM are known from now on."""
        self._pool = pool

    def arrived(self, request: VllmRequestId) -> None:
        """A request has joined the queue."""
        self._waiting.add(request)

    def asked(self, request: VllmRequestId) -> None:
        """A request would be admitted, if there is room for it."""
        self._waiting.add(request)
        self._blocked.add(request)

    def admitted(self, request: VllmRequestId) -> None:
        """A request has the blocks that it wanted."""
        self._leave(request)

    def held(self, request: VllmRequestId) -> None:
        """A finished request's blocks are held for its decode worker."""
        self._held.add(request)

    def ended(self, request: VllmRequestId) -> None:
        """A request is over."""
        self._leave(request)

    def released(self, requests: Iterable[VllmRequestId]) -> None:
        """The blocks of finished requests are vLLM's again."""
        self._held.difference_update(requests)

    def step(self, now: Instant, *, preempted: Iterable[VllmRequestId], is_busy: bool) -> bool:
        """A step is planned: whether an offer is to be withdrawn, for the room that it holds.

        `preempted` lost their blocks to it; `is_busy`: it computes something.
        """
        self._waiting.update(preempted)
        no_progress = bool(self._blocked and self._held) and not is_busy
        self._blocked.clear()
        return self._stall_detector.should_cancel(now, no_progress=no_progress)

    def take_news(self) -> Occupancy | None:
        """How full it is; None where that was reported, and while vLLM's blocks are not known."""
        pool, reported = self._pool, self._last_reported
        if pool is None:
            return None
        num_waiting, num_free = len(self._waiting), pool.get_num_free_blocks()
        if reported is not None and (reported.num_waiting, reported.num_free_blocks) == (
            num_waiting,
            num_free,
        ):
            return None
        # One block is vLLM's own: it stands for those that a window has left behind.
        self._last_reported = Occupancy(
            num_waiting, pool.num_gpu_blocks - 1, num_free, self._block_size, self._max_running
        )
        return self._last_reported

    @property
    def is_report_outdated(self) -> bool:
        """Whether the last report is so wrong that it is worth a step of its own."""
        pool, reported = self._pool, self._last_reported
        if pool is None or reported is None:
            return False
        num_off = abs(pool.get_num_free_blocks() - reported.num_free_blocks)
        is_far_off = num_off * TOLERATED_PART > reported.num_blocks
        return is_far_off or reported.num_waiting != len(self._waiting)

    def _leave(self, request: VllmRequestId) -> None:
        self._waiting.discard(request)
        self._blocked.discard(request)


OUTCOMES: Final = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "cancelled",
}
"""vLLM's `RequestStatus` → how a request ended; anything else has failed."""


class Admission:
    """Owned by the scheduler's thread."""

    def __init__(
        self,
        identity: Identity,
        model: ModelFacts,
        *,
        block_size: int,
        held: HeldPrompts,
        reader: TicketReader,
        clock: Clock,
    ) -> None:
        self._identity, self._model, self._clock = identity, model, clock
        self._reader = reader
        self._schedule = HandoffSchedule(block_size)
        self._block_size, self._held = block_size, held
        self._pressure = SchedulerPressure(block_size, model.max_running)
        self._refused = RefusalCounter()
        self._probes: set[VllmRequestId] = set()
        self._ranks: dict[int, RankFacts] = {}

    def bind(self, pool: VllmBlockPool) -> None:
        """The blocks of vLLM are known from now on."""
        self._pressure.bind(pool)

    def set_ranks(self, ranks: Mapping[int, RankFacts]) -> None:
        """The workers can be reached from now on."""
        self._ranks = dict(ranks)

    def arrived(self, request: Request) -> None:
        """A request has joined vLLM's queue."""
        self._pressure.arrived(request.request_id)
        self.add(request)

    def add(self, request: Request) -> None:
        """Read what a request wants of us; nothing happens if it is known."""
        params = request.kv_transfer_params
        if not params or self._is_known(request.request_id):
            return
        role = self._reader.read(params)
        match role:
            case NoHandoff():
                pass
            case Probe():
                self._probes.add(request.request_id)
            case Send(ticket):
                self._start(request, ticket, Queued)
            case Receive(ticket):
                self._start(request, ticket, AwaitingBlocks)
            case Refusal():
                self._refuse(request.request_id, role)
            case _:
                assert_never(role)

    def count_missing(self, request: Request, num_cached_tokens: int) -> int:
        """How many of a request's prompt tokens are to be received."""
        self._pressure.asked(request.request_id)
        self.add(request)
        return self._schedule.count_missing(request.request_id, num_cached_tokens)

    def allocated(
        self, request: Request, blocks: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Blocks were found for a request: vLLM admits it."""
        self._pressure.admitted(request.request_id)
        if request.request_id in self._schedule:
            self._schedule.allocated(request.request_id, blocks[0], num_external_tokens)

    def step(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """The orders of a step that vLLM has planned: `NO_ORDERS` where there are none."""
        preempted = read_preempted(scheduler_output)
        is_busy = bool(scheduler_output.num_scheduled_tokens)
        now = self._clock.now()
        is_stalled = self._pressure.step(now, preempted=preempted, is_busy=is_busy)
        follows_some = is_busy and bool(self._schedule.followed)
        return self._schedule.step(
            self._find_followed(scheduler_output) if follows_some else (),
            preempted,
            is_stalled=is_stalled,
            occupancy=self._pressure.take_news(),
        )

    @property
    def is_report_outdated(self) -> bool:
        """Whether one more step should report to the workers how full vLLM is."""
        return self._pressure.is_report_outdated

    def update_from_workers(
        self, received: set[str] | None, sent: set[str] | None, report: StepReport | None
    ) -> None:
        """Apply the workers' reports of the last step."""
        if sent:
            self._held.drop(sent)
            self._pressure.released(sent)
        for request, reason in () if report is None else report.failed_sends:
            self._schedule.send_failed(request, reason)
        for request in received or ():
            self._schedule.received(request)

    def finish(self, request: Request) -> tuple[bool, dict[str, object] | None]:
        """A request is over: whether its blocks are held, and its answer's parameters."""
        self.add(request)
        request_id = request.request_id
        self._pressure.ended(request_id)
        if request_id in self._probes:
            self._probes.discard(request_id)
            return False, self._describe()
        if request_id not in self._schedule:
            return False, None
        outcome = OUTCOMES.get(request.status.name, "failed")
        result = self._schedule.finish(request_id, Ending(outcome, request.num_output_tokens))
        if isinstance(result, Held):
            self._pressure.held(request_id)
        else:
            self._held.drop((request_id,))
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return isinstance(result, Held), _answer_params(result) if asked else None

    def take_refused(self) -> Mapping[str, int]:
        """Refused tickets by code since the last call."""
        return self._refused.take()

    def _is_known(self, request: VllmRequestId) -> bool:
        return request in self._schedule or request in self._probes

    def _start(
        self, request: Request, ticket: Ticket, state: type[Queued | AwaitingBlocks]
    ) -> None:
        unsupported = _unsupported_reason(request) or _tenant_mismatch(request, ticket)
        if unsupported is not None:
            self._refuse(request.request_id, Refusal("unsupported_request", unsupported))
            return
        if state is Queued and ticket.mode == "pull" and not self._may_be_held(request):
            reason = "too many prompts wait here to be pulled"
            self._refuse(request.request_id, Refusal("overloaded", reason))
            return
        # A third of the time that numpy takes for a list.
        packed_ids = struct.pack(f"{len(request.prompt_token_ids)}i", *request.prompt_token_ids)
        token_ids = np.frombuffer(packed_ids, dtype=np.int32)
        prompt_hash = compute_prompt_hash(self._ranks[0].fingerprint, ticket.tenant_salt, token_ids)
        prompt = Prompt(
            ticket,
            prompt_hash,
            request.num_prompt_tokens,
            self._clock.now(),
            packed_ids if ticket.mode == "pool" else None,
        )
        self._schedule.add(request.request_id, state(prompt))

    def _may_be_held(self, request: Request) -> bool:
        num_blocks = count_blocks(request.num_prompt_tokens, self._block_size)
        return self._held.try_add(request.request_id, num_blocks)

    def _refuse(self, request: VllmRequestId, refusal: Refusal) -> None:
        self._refused.add(refusal)
        self._schedule.add(request, LocalCompute(refusal))

    def _find_followed(self, output: SchedulerOutput) -> list[Scheduled]:
        """What the step computes of requests whose handoffs are under way."""
        followed, num_scheduled = self._schedule.followed, output.num_scheduled_tokens
        found = []
        for new in output.scheduled_new_reqs:
            if new.req_id in followed:
                computed = new.num_computed_tokens
                stop = computed + num_scheduled[new.req_id]
                found.append(Scheduled(new.req_id, new.block_ids[0], computed, stop))
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            if request in followed:
                groups = cached.new_block_ids[index]
                computed = cached.num_computed_tokens[index]
                stop = computed + num_scheduled[request]
                found.append(Scheduled(request, groups[0] if groups else (), computed, stop))
        return found

    def _describe(self) -> dict[str, object]:
        info = describe_worker(self._identity, self._model, self._ranks)
        return {"baton_info": msgspec.to_builtins(info)}


def _unsupported_reason(request: Request) -> str | None:
    """Why a request's KV depends on more than its prompt's token ids; None if it does not."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "a prompt of embeddings is not handed over"
    if request.mm_features:
        return "a prompt with images, audio or video is not handed over"
    if request.lora_request is not None:
        return "KV computed with a LoRA adapter is not handed over"
    if request.resumable:
        return "a prompt that is still being typed is not handed over"
    return None


def _tenant_mismatch(request: Request, ticket: Ticket) -> str | None:
    """Why a request's KV may not be kept where others of its ticket's tenant find it."""
    salt = getattr(request, "cache_salt", None)
    if ticket.mode == "pool" and salt and hash_tenant(salt) != ticket.tenant_salt:
        return "the request is another tenant's than its ticket"
    return None


def _answer_params(result: FinishResult) -> dict[str, object] | None:
    """The `kv_transfer_params` in a prefill request's answer."""
    match result:
        case Held(Offered()) | Released(Offered()):
            return {"baton": {"status": "offered"}}
        case Held(Refusal(code, reason)) | Released(Refusal(code, reason)):
            return {"baton": {"status": "refused", "code": code, "reason": reason}}
        case Released(None):
            return None
        case _:
            raise AssertionError(f"{result} is no result of a prefill request")
