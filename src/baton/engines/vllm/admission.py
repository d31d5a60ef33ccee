"""The scheduler's hooks: converts vLLM's requests and steps to plain values, and results back.

Duck-typed over vLLM's objects: nothing of vLLM is imported here.
"""

from __future__ import annotations

import logging
import struct
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import msgspec
import numpy as np

from baton.auth.ticket import hash_tenant
from baton.engines.vllm.adapters import Adapters, NotIdentified
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
from baton.engines.vllm.scheduler_pressure import SchedulerPressure
from baton.engines.vllm.step_orders import Prompt
from baton.engines.vllm.tickets import NoHandoff, Probe, Receive, Refusal, RefusalCounter, Send
from baton.kv.copies import count_blocks
from baton.kv.identity import adapt_fingerprint, compute_prompt_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from baton.auth.ticket import Ticket
    from baton.clock import Clock
    from baton.engines.vllm.handoff_schedule import FinishResult
    from baton.engines.vllm.identity import Identity, ModelFacts, RankFacts
    from baton.engines.vllm.prefix_admission import NearRank, PrefixAdmission
    from baton.engines.vllm.scheduler_pressure import VllmBlockPool
    from baton.engines.vllm.step_orders import StepOrders, StepReport, VllmRequestId
    from baton.engines.vllm.tickets import TicketReader
    from baton.kv.identity import Adapter

logger = logging.getLogger(__name__)

RESET_REASON: Final = (
    "the caches of this server were reset while it ran, and its weights may have been replaced: "
    "restart it to hand over KV"
)


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


OUTCOMES: Final = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "cancelled",
}
"""vLLM's `RequestStatus` → how a request ended; anything else has failed."""


class Admission:  # noqa: PLR0904 - one for each of vLLM's hooks
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
        self._reader, self._adapters = reader, Adapters(model.adapter_settings)
        self._schedule = HandoffSchedule(block_size)
        self._block_size, self._held = block_size, held
        self._must_end_sends = False
        self._prefixes: PrefixAdmission | None = None
        self._pressure = SchedulerPressure(block_size, model.max_running)
        self._refused = RefusalCounter()
        self._probes: set[VllmRequestId] = set()
        self._ranks: dict[int, RankFacts] = {}
        self._window_tokens: int | None = None

    def use_store(self, prefixes: PrefixAdmission) -> None:
        """Load prompts' beginnings from the store, and keep there what requests leave. Once."""
        self._prefixes = prefixes

    def bind(self, pool: VllmBlockPool) -> None:
        """The blocks of vLLM are known from now on."""
        self._pressure.bind(pool)
        if self._prefixes is not None:
            self._prefixes.bind(pool)

    def set_ranks(self, ranks: Mapping[int, RankFacts]) -> None:
        """The workers can be reached from now on."""
        self._ranks = dict(ranks)
        layers = (layer for facts in ranks.values() for layer in facts.layout.layers)
        windows = [each.window_tokens for each in layers if each.window_tokens is not None]
        self._window_tokens = min(windows, default=None)
        if not all("pool" in facts.modes for facts in ranks.values()):
            self._prefixes = None  # what a rank computes cannot be kept in its store

    def use_rank(self, near: NearRank, wait_s: float) -> None:
        """See `PrefixAdmission.use_rank`; ignored where there are other ranks to ask."""
        if self._prefixes is not None and len(self._ranks) == 1:
            self._prefixes.use_rank(near, wait_s)

    def arrived(self, request: Request) -> None:
        """A request has joined vLLM's queue."""
        self._pressure.arrived(request.request_id)
        if request.lora_request is not None:  # read it before any KV is computed with it
            self._adapters.find(request.lora_request)
        self.add(request)
        if self._prefixes is not None and self._may_be_stored(request):
            identify = partial(self._adapters.find, request.lora_request)
            self._prefixes.arrived(request, identify)

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
            case Refusal("replayed_ticket") if getattr(request, "abort_immediately", False):
                pass  # vLLM's own, after one that was cancelled: it ends the ticket if none has
            case Refusal():
                self._refuse(request.request_id, role)
            case _:
                assert_never(role)

    def count_missing(self, request: Request, num_cached_tokens: int) -> int | None:
        """How many of a request's prompt tokens are to be received, or loaded from the store.

        None: it is not known yet. vLLM asks again in its next step.
        """
        self.add(request)
        missing: int | None = self._schedule.count_missing(request.request_id, num_cached_tokens)
        if missing == 0 and self._prefixes is not None:
            missing = self._count_stored(self._prefixes, request, num_cached_tokens)
        if missing is not None:
            self._pressure.asked(request.request_id)
        return missing

    def is_read(self, request: Request) -> bool:
        """Whether the KV that a request lacks is in the workers' memory: it can run at once."""
        return self._prefixes is not None and self._prefixes.is_read(request.request_id)

    def is_stored(self, request: Request) -> bool:
        """Whether an admitted request's KV comes from the store."""
        return self._prefixes is not None and self._prefixes.is_stored(request.request_id)

    def allocated(
        self, request: Request, blocks: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Blocks were found for a request: vLLM admits it."""
        self._pressure.admitted(request.request_id)
        if request.request_id in self._schedule:
            self._schedule.allocated(request.request_id, blocks[0], num_external_tokens)
        if self._prefixes is not None:
            self._prefixes.allocated(request, blocks[0], num_external_tokens)

    def step(self, output: SchedulerOutput) -> StepOrders:
        """The orders of a step that vLLM has planned: `NO_ORDERS` where there are none."""
        preempted = read_preempted(output)
        is_busy = bool(output.num_scheduled_tokens)
        now = self._clock.now()
        waiting = preempted
        if preempted:  # a reset does so between two steps: some have ended since, or run again
            waiting = preempted.difference(output.finished_req_ids, output.num_scheduled_tokens)
        self._must_end_sends = False
        is_stalled = self._pressure.step(now, preempted=waiting, is_busy=is_busy)
        follows_some = is_busy and bool(self._schedule.followed)
        return self._schedule.step(
            self._find_followed(output) if follows_some else (),
            preempted,
            is_stalled=is_stalled,
            occupancy=self._pressure.take_news(),
            prefixes=None if self._prefixes is None else self._prefixes.take_orders(output),
        )

    @property
    def needs_step(self) -> bool:
        """Whether one more step is needed, without tokens.

        It reports to the workers how full vLLM is, ends handoffs of preempted prompts, and frees
        blocks that they have copied.
        """
        if self._pressure.is_report_outdated or self._must_end_sends:
            return True
        return self._prefixes is not None and self._prefixes.needs_step

    def reset(self) -> bool:
        """Do not use KV from before with what is computed from now on: vLLM has reset its caches.

        It does so before weights are replaced, which it does not report. Requests that had blocks
        were preempted.

        False, and nothing is changed:

        - blocks are in use: vLLM's own reset has failed, and it asks nevertheless;
        - vLLM may unmap its KV next, and the workers still send some of requests that it preempted
          just now. A step ends that; then it can be asked again.
        """
        if self._pressure.has_used_blocks:
            return False
        if self._model.may_unmap_kv and self._schedule.is_sending:
            self._must_end_sends = True
            return False
        if self._adapters.last_reset is None:
            logger.warning("KV from before is not used any more: %s", RESET_REASON)
        self._adapters.reset()
        self._pressure.refuse_handoffs(RESET_REASON)
        self._schedule.end_waiting(RESET_REASON)
        if self._prefixes is not None:
            self._prefixes.reset()
        return True

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
        if self._prefixes is not None:
            self._prefixes.update_from_workers(received, report)

    def finish(
        self, request: Request, blocks: Sequence[int] = ()
    ) -> tuple[bool, dict[str, object] | None]:
        """A request is over: whether its blocks are held, and its answer's parameters.

        `blocks` hold what it has computed. What is copied into the store of them is not held so.
        """
        self.add(request)
        request_id = request.request_id
        self._pressure.ended(request_id)
        if self._prefixes is not None:
            self._finish_stored(self._prefixes, request, blocks)
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

    def _count_stored(
        self, prefixes: PrefixAdmission, request: Request, num_cached_tokens: int
    ) -> int | None:
        if request.request_id not in prefixes and not self._may_be_stored(request):
            prefixes.skip(request, num_cached_tokens)
        identify = partial(self._adapters.find, request.lora_request)
        return prefixes.count_missing(request, num_cached_tokens, identify)

    def _finish_stored(
        self, prefixes: PrefixAdmission, request: Request, blocks: Sequence[int]
    ) -> None:
        adapter = self._adapters.find(request.lora_request)
        if isinstance(adapter, NotIdentified):
            prefixes.finish(request, blocks, None, is_kept=False)
        else:
            is_kept = self._may_be_kept(request)
            prefixes.finish(request, blocks, adapter, is_kept=is_kept)

    def _count_loaded(self, request: VllmRequestId, num_computed: int) -> int:
        return 0 if self._prefixes is None else self._prefixes.count_loaded(request, num_computed)

    def _may_be_kept(self, request: Request) -> bool:
        """Whether its blocks hold KV of its tokens; mode pool keeps a prompt by itself."""
        request_id = request.request_id
        return (
            request.status.name in OUTCOMES
            and self._is_plain(request)
            and not self._schedule.is_receiving(request_id)
            and not self._schedule.is_sent_through_store(request_id)
        )

    def _may_be_stored(self, request: Request) -> bool:
        """Whether the store may have a prompt's beginning, and no prefill server sends it."""
        return not self._schedule.is_receiving(request.request_id) and self._is_plain(request)

    def _is_plain(self, request: Request) -> bool:
        """Whether its KV depends on its tokens, tenant and adapter alone: on no later token."""
        is_generated = request.pooling_params is None and request.request_id not in self._probes
        return is_generated and _unsupported_reason(request) is None

    def _is_known(self, request: VllmRequestId) -> bool:
        return request in self._schedule or request in self._probes

    def _start(
        self, request: Request, ticket: Ticket, state: type[Queued | AwaitingBlocks]
    ) -> None:
        unsupported = _unsupported_reason(request) or _tenant_mismatch(request, ticket)
        if self._adapters.last_reset is not None:
            unsupported = RESET_REASON
        window = self._window_tokens
        if window is not None and request.num_prompt_tokens >= window:
            # vLLM has no blocks for what is behind the window: on a decode server it names its null
            # block for all of them, and a prefill server's are others' by the time they are sent.
            unsupported = (
                f"a prompt beyond the sliding window of {window} tokens is not handed over"
            )
        adapter = None
        if unsupported is None and request.lora_request is not None:
            found = self._adapters.find(request.lora_request)
            if isinstance(found, NotIdentified):
                unsupported = found.reason
            else:
                adapter = found
        if unsupported is not None:
            if state is AwaitingBlocks:  # else its blocks are held there until the lease is over
                unread = Prompt(ticket, b"", request.num_prompt_tokens, self._clock.now())
                self._schedule.decline(unread, unsupported)
            self._refuse(request.request_id, Refusal("unsupported_request", unsupported))
            return
        if state is Queued and ticket.mode == "pull" and not self._may_be_held(request):
            reason = "too many prompts wait here to be pulled"
            self._refuse(request.request_id, Refusal("overloaded", reason))
            return
        self._schedule.add(request.request_id, state(self._make_prompt(request, ticket, adapter)))

    def _make_prompt(self, request: Request, ticket: Ticket, adapter: Adapter | None) -> Prompt:
        num_tokens = ticket.count_handed_over(request.num_prompt_tokens)
        handed_ids = request.prompt_token_ids[:num_tokens]
        # A third of the time that numpy takes for a list.
        packed_ids = struct.pack(f"{num_tokens}i", *handed_ids)
        token_ids = np.frombuffer(packed_ids, dtype=np.int32)
        fingerprint = self._ranks[0].fingerprint
        if adapter is not None:
            fingerprint = adapt_fingerprint(fingerprint, adapter)
        prompt_hash = compute_prompt_hash(fingerprint, ticket.tenant_salt, token_ids)
        return Prompt(
            ticket,
            prompt_hash,
            num_tokens,
            self._clock.now(),
            packed_ids if ticket.mode == "pool" else None,
            adapter,
        )

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
                num_loaded = self._count_loaded(new.req_id, computed)
                found.append(Scheduled(new.req_id, new.block_ids[0], computed, stop, num_loaded))
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
    """Why KV depends on more than a prompt's token ids and its adapter; None if it does not."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "a prompt of embeddings is not handed over"
    if request.mm_features:
        return "a prompt with images, audio or video is not handed over"
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
