"""One step of the engine: commands and handoff events in, one step computed, updates out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from baton.engines.interface import (
    DecodeRequest,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PrefillRequest,
    UpdateSink,
)
from baton.engines.lookup_cost import LOAD_TIMEOUT_S
from baton.engines.stall_detector import STALL_REASON, StallDetector
from baton.engines.transformers.orders import make_receive_order, make_send_order
from baton.engines.transformers.prefixes import EnginePrefixes
from baton.engines.transformers.sequence import (
    LayerLateError,
    Sequence,
    SequenceTable,
    Status,
    count_handed_over,
    count_landed,
    find_ticket,
    is_pulled,
    is_pushed_prefix,
)
from baton.engines.transformers.updates import TokenCounts, UpdateQueue, make_stats
from baton.errors import BatonError, EngineError, OverloadedError, StoreError, TicketError
from baton.handoff.interface import (
    BlocksQuiescent,
    ExportReleased,
    ImportRevoked,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    LayersLanding,
    PrefixFound,
    SampledToken,
    SendFailed,
)
from baton.kv.copies import blocks_holding
from baton.telemetry.metrics import HeldBlockTime
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Many

    from baton.auth.ticket import Ticket
    from baton.clock import Clock
    from baton.engines.first_tokens import FirstTokens
    from baton.engines.transformers.scheduler import Plan, Scheduler, Work
    from baton.handoff.interface import HandoffEvent, HandoffPort
    from baton.ids import RequestId, TicketId

_log = logging.getLogger(__name__)
_NO_TOKEN: Final = SampledToken(0)
"""Ends a prefill request that was served from the cache: it is not read."""


class StepRunner(Protocol):
    """What the loop asks of the model: see `model_runner.ModelRunner`."""

    def compute(self, step: list[Work]) -> list[SampledToken | None]:
        """The token that follows each work; reports each layer to the handoff.

        Raises:
            LayerLateError: see `ModelRunner.compute`.
        """
        ...


class EnginePages(Protocol):
    """What the loop asks of the memory: see `pages.KVPages`."""

    lands_in_place: bool

    def load_blocks(self, blocks: list[int]) -> None:
        """Take what peers have written into `blocks`, all layers."""
        ...

    def open_peer_mappings(self) -> None:
        """From now on blocks of peers that were attached can be read."""
        ...

    def copy(self, source: Many[int], target: Many[int]) -> None:
        """Copy whole blocks into blocks of this engine's own, all layers."""
        ...


class EngineLoop:
    """All that the engine's thread owns; `step` waits for nothing but layers that land.

    Updates leave in one call of `sink` before the step, and one after it, where there are any.
    `on_end` is called with each request that has ended.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        *,
        info: EngineInfo,
        runner: StepRunner,
        pages: EnginePages,
        scheduler: Scheduler,
        handoff: HandoffPort,
        sink: UpdateSink,
        on_end: Callable[[RequestId], None],
        first_tokens: FirstTokens,
        clock: Clock,
    ) -> None:
        self._info, self._pages, self._scheduler = info, pages, scheduler
        self._first_tokens = first_tokens
        self._handoff, self._on_end, self._clock = handoff, on_end, clock
        self._runner = runner
        self._sequences = SequenceTable(info)
        self._updates = UpdateQueue(sink)
        self._counts = TokenCounts()
        self._stall_detector = StallDetector()
        self._held = HeldBlockTime()
        self._prefixes = EnginePrefixes(
            handoff.prefixes, scheduler.kept_blocks, clock, scheduler.limits.max_batch_tokens
        )
        self.reraises = False
        """See `AgentLoop`."""

    def step(self) -> bool:
        """Handle handoff events, compute one step, deliver. Returns whether it computed."""
        for event in self._handoff.poll():
            try:
                self._handle_event(event)
            except Exception as exc:
                if self.reraises:
                    raise
                # One handoff's, whatever it was: the others go on.
                _log.exception("the handoff %s failed in the engine", event.ticket.hex())
                self._fail_handoff(event.ticket, EngineError(f"the handoff failed: {exc}"))
        self._expire()
        self.deliver()  # a first token that landed does not wait for the step that follows it
        self._scheduler.worth_asking = self._prefixes.compute_worth_asking()
        plan = self._scheduler.schedule()
        for imported, own in plan.copies:
            self._pages.copy(imported, own)
        self._start_handoffs(plan)
        if plan.work:
            self._handoff.report_progress(self._sequences.uncomputed_prefills())
            self._compute(plan)
        self._release_imports()
        self._cancel_stalled(is_busy=bool(plan.work))
        self.deliver()
        return bool(plan.work)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        ticket = find_ticket(request)
        if ticket is not None and self._is_in_use(ticket.id):
            error = TicketError(f"ticket {ticket.id.hex()} is in use: it was replayed")
            self._updates.add_failure(request.id, error)
            self._on_end(request.id)
            return
        if isinstance(request.kind, DecodeRequest):
            self._handoff.renew_lease(request.kind.ticket)
        self._scheduler.add(self._sequences.add(request))

    def extend(self, request: RequestId, token_ids: Many[int], *, generates: bool) -> None:
        """Append tokens to a standby request; see `StandbyEngine.extend`."""
        sequence = self._sequences.find(request)
        if sequence is not None and sequence.is_standby:
            sequence.extend(token_ids, generates=generates)

    def cancel(self, request: RequestId) -> None:
        """Forget a request; no update follows."""
        sequence = self._sequences.find(request)
        if sequence is not None:
            self._end(sequence, "cancelled")
            self._release_imports()

    def fail_all(self, error: BatonError) -> None:
        """Fail whatever is unfinished."""
        for sequence in self._sequences.all():
            self._fail(sequence, error)
        self._release_imports()
        self.deliver()

    def abandon(self, error: BatonError, unseen: Iterable[RequestId]) -> None:
        """Report all requests as failed, and touch nothing else: it cannot be trusted any more.

        `unseen` were submitted, but not to this loop.
        """
        for request in (*self._sequences.clear(), *unseen):
            self._updates.add_failure(request, error)
        self.deliver()

    def deliver(self) -> None:
        """Pass the updates since the last call to the sink."""
        self._updates.deliver()

    def compute_wait_timeout_s(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        deadlines = [
            self._sequences.next_deadline,
            self._stall_detector.timeout_at,
            self._prefixes.next_deadline,
        ]
        known = [at for at in deadlines if at is not None]
        return max(0.0, min(known) - self._clock.now()) if known else None

    def stats(self) -> EngineStats:
        """Counts of this moment."""
        return make_stats(
            self._scheduler, self._counts, self._held.block_seconds, self._prefixes.loads
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the scheduler's views of one fact disagree."""
        self._scheduler.check_invariants()

    def _cancel_stalled(self, *, is_busy: bool) -> None:
        no_progress = self._scheduler.waits_for_offered and not is_busy
        if self._stall_detector.should_cancel(self._clock.now(), no_progress=no_progress):
            self._handoff.cancel_oldest_ungranted(
                self._scheduler.pinned_blocks.sending_tickets, STALL_REASON
            )

    def _start_handoffs(self, plan: Plan) -> None:
        """Give the plan's orders to the handoff, before anything is computed."""
        fingerprint = self._info.fingerprint
        for sequence in plan.refused:
            self._fail(sequence, OverloadedError("too many prompts wait here to be pulled"))
        if plan.lacks_exported_blocks:
            self._handoff.revoke_exported()
        for ticket in plan.declined:
            self._handoff.decline(ticket, "too little of the prompt is missing here")
        for receive in plan.expected:
            self._count_admission(receive.sequence)
            self._stamp(receive.sequence, Stamp.PAGES_RESERVED)
            self._handoff.start_receive(
                make_receive_order(receive, fingerprint, in_place=self._pages.lands_in_place)
            )
        for lookup in plan.lookups:
            self._prefixes.look_up(lookup)
        for sequence in plan.held:
            self._prefixes.hold(sequence)
        for load in plan.loads:
            self._prefixes.begin(load)
        for work in plan.work:
            self._count_admission(work.sequence)
        for sequence, _ in plan.offered_from_cache:
            self._count_admission(sequence)
        for sequence, ticket in (*plan.offered, *plan.offered_from_cache):
            self._held.hold(ticket.id, ticket.mode, self._clock.now())
            self._held.resize(ticket.id, len(sequence.blocks), self._clock.now())
            self._handoff.start_send(make_send_order(sequence, ticket, fingerprint))
        for sequence, ticket in plan.offered_from_cache:
            self._stamp(sequence, Stamp.PREFILL_DONE)
            self._held.prefill_done(ticket.id, self._clock.now())
            self._handoff.prefill_done(ticket.id, None)

    def _finish_load(self, landed: KVLanded) -> None:
        num_tokens = landed.num_tokens or 0
        self._prefixes.finish(landed.ticket, num_tokens)
        load = self._scheduler.finish_load(landed.ticket, num_tokens)
        if load is None or num_tokens <= load.start:
            return
        held = blocks_holding(0, num_tokens - load.start, load.sequence.block_size)
        self._pages.load_blocks(list(load.blocks[: held.stop]))
        trace, size = load.sequence.request.trace, load.sequence.block_size
        num_usable = min(num_tokens, load.sequence.num_prompt_tokens - 1) // size * size
        trace.num_loaded_tokens = max(0, num_usable - load.start)
        if Stamp.ADMITTED in trace.stamps:  # its first tokens were computed meanwhile
            # Those that it had from the cache or a peer count already, also if they are gone since.
            num_reused = trace.num_cached_tokens + trace.num_received_tokens
            num_more = max(0, num_usable - max(load.start, num_reused))
            trace.num_cached_tokens += num_more
            self._counts.cached += num_more

    def _compute(self, plan: Plan) -> None:
        """Run the step; a failure fails the step's requests and nothing else."""
        began_at = self._clock.now()
        self._prefixes.steps.num_begun += 1
        try:
            tokens = self._runner.compute(plan.work)
        except LayerLateError:
            # All at once: each by itself would wait as long.
            self._scheduler.give_up_landing(self._info.layout.num_layers)
            return
        except Exception:  # noqa: BLE001 - the engine survives whatever a model raises
            _log.exception("a step of %d tokens failed", plan.num_tokens)
            for work in plan.work:
                self._fail(work.sequence, EngineError("the engine failed while computing"))
            return
        finally:
            self._prefixes.steps.num_ended += 1
        if not plan.has_landing:
            self._prefixes.observe_step(plan, self._clock.now() - began_at)
        for work, token in zip(plan.work, tokens, strict=True):
            if work.is_prefill and work.stop >= work.sequence.num_prompt_tokens:
                self._note_prefilled(work.sequence)
            self._scheduler.advance(work)
            if work.sequence.is_standby and not work.sequence.num_uncomputed:
                self._updates.add_computed(work.sequence)
            if token is not None and work.sequence.landing is not None:
                self._scheduler.await_landing(work.sequence, token)
            elif token is not None:
                self._accept(work.sequence, token)

    def _accept(self, sequence: Sequence, token: SampledToken) -> None:
        """A new token: an answer's next one, or a prefill request's only one."""
        self._stamp(sequence, Stamp.FIRST_TOKEN)
        if isinstance(sequence.kind, PrefillRequest):
            sequence.first_token = token
            self._scheduler.hold(sequence)
            self._held.prefill_done(sequence.kind.ticket.id, self._clock.now())
            self._handoff.prefill_done(sequence.kind.ticket.id, token)
            self._answer_early(sequence, sequence.kind.ticket, token)
            return
        if sequence.ticket is not None and sequence.ticket.first_token_early:
            token = self._commit_first_token(sequence, sequence.ticket, token)
        finish = sequence.append(token.token_id, self._info.eos_token_ids)
        self._emit(sequence, token, finish)
        if finish is not None:
            self._end(sequence, "finished")

    def _answer_early(self, sequence: Sequence, ticket: Ticket, token: SampledToken) -> None:
        """Answer before the handoff ends, where the client may; its blocks stay pinned."""
        if ticket.first_token_early:
            self._emit(sequence, token, sequence.append(token.token_id, self._info.eos_token_ids))
        elif is_pulled(sequence):
            self._emit(sequence, token, FinishReason.LENGTH)
        else:
            return
        self._forget(sequence)

    def _commit_first_token(
        self, sequence: Sequence, ticket: Ticket, token: SampledToken
    ) -> SampledToken:
        """A decode request's token; its first one may be with the client already."""
        if sequence.num_output_tokens:
            return token
        return self._first_tokens.commit(ticket.id, token)

    def _emit(self, sequence: Sequence, token: SampledToken, finish: FinishReason | None) -> None:
        self._counts.output += 1
        self._updates.add_token(sequence, token, finish)

    def _handle_event(self, event: HandoffEvent) -> None:
        match event:
            case KVLanded(ticket) if ticket in self._prefixes:
                self._finish_load(event)
            case LayersLanding(ticket, layers):
                self._scheduler.begin_landing(ticket, layers)
            case KVLanded():
                self._handle_landed(event)
            case KVFailed(ticket, error):
                self._fall_back(ticket, error)
            case BlocksQuiescent(ticket):
                self._prefixes.end(ticket)
                self._scheduler.pinned_blocks.release_quarantined(ticket)
            case KVSent(ticket) if self._scheduler.kept_blocks.release(ticket):
                pass
            case KVSent(ticket):
                self._held.release(ticket, self._clock.now())
                self._finish_send(self._scheduler.finish_send(ticket))
            case PrefixFound(order):
                self._scheduler.find_stored(order, self._prefixes.find(event))
            case KVExported() | ExportReleased() | ImportRevoked():
                self._handle_shared(event)
            case SendFailed(ticket, error):
                self._handle_send_failed(ticket, error)
            case _:
                assert_never(event)

    def _handle_shared(self, event: KVExported | ExportReleased | ImportRevoked) -> None:
        match event:
            case KVExported(ticket, blocks):
                self._held.resize(ticket, len(blocks), self._clock.now())
                self._finish_send(self._scheduler.export(ticket, blocks))
            case ExportReleased(ticket):
                self._held.release(ticket, self._clock.now())
                self._scheduler.shared_blocks.end_export(ticket)
            case ImportRevoked(ticket):
                self._scheduler.shared_blocks.revoke(ticket)
            case _:
                assert_never(event)

    def _handle_send_failed(self, ticket: TicketId, error: BatonError) -> None:
        self._held.release(ticket, self._clock.now())
        sequence = self._scheduler.finish_send(ticket)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._fail(sequence, error)

    def _handle_landed(self, landed: KVLanded) -> None:
        first_token = self._check_first_token(landed)
        # Without a first token the last prompt token is computed here: its logits give one.
        num_to_compute = 1 if first_token is None else 0
        sequence = self._scheduler.land(landed, num_to_compute)
        if sequence is None:
            return
        if sequence.landing is not None:
            self._finish_landing(sequence)
            return
        if landed.imported:
            self._pages.open_peer_mappings()
        num_landed = count_landed(landed, sequence)
        num_received = num_landed - sequence.num_cached_tokens
        held = blocks_holding(sequence.num_cached_tokens, num_landed, sequence.block_size)
        self._pages.load_blocks(sequence.blocks[held.start : held.stop])
        sequence.request.trace.num_received_tokens = num_received
        self._counts.received += num_received
        self._stamp(sequence, Stamp.KV_READY)
        if first_token is not None and num_landed == sequence.num_prompt_tokens:
            self._accept(sequence, first_token)

    def _finish_landing(self, sequence: Sequence) -> None:
        num_received = count_handed_over(sequence) - sequence.num_cached_tokens
        sequence.request.trace.num_received_tokens = num_received
        self._counts.received += num_received
        token = self._scheduler.finish_landing(sequence)
        self._stamp(sequence, Stamp.KV_READY)
        if token is not None:
            self._count_computed(sequence)
            self._accept(sequence, token)

    def _check_first_token(self, landed: KVLanded) -> SampledToken | None:
        """What the prefill worker sampled, if it is a token of this model."""
        token = landed.first_token
        if token is None:
            return None
        ids = (token.token_id, *(each.token_id for each in token.top))
        if max(ids) < self._info.vocab_size and min(ids) >= 0:
            return token
        _log.warning("the handoff %s brought a first token that is none", landed.ticket.hex())
        return None

    def _fail_handoff(self, ticket: TicketId, error: BatonError) -> None:
        sequence = self._sequences.find_by_ticket(ticket)
        if sequence is not None and sequence.status is not Status.ENDED:
            self._fail(sequence, error)

    def _release_imports(self) -> None:
        """Release imported blocks that no request needs; no step is reading them."""
        for ticket in self._scheduler.shared_blocks.take_pending_releases():
            self._handoff.release_imported(ticket)

    def _fall_back(self, ticket: TicketId, error: BatonError) -> None:
        sequence = self._scheduler.fall_back(ticket)
        if sequence is None:
            return
        trace = sequence.request.trace
        trace.fallbacks.append(f"computed locally: {error}")
        # What was computed upon KV that lands no more is computed again.
        trace.stamps.pop(Stamp.PREFILL_DONE, None)
        self._updates.log_degraded(error)

    def _finish_send(self, sequence: Sequence | None) -> None:
        if sequence is None or sequence.status is Status.ENDED:
            return
        if sequence.first_token is None and is_pushed_prefix(sequence):
            self._updates.add_token(sequence, _NO_TOKEN, FinishReason.LENGTH)
            self._end(sequence, "finished")
            return
        if sequence.first_token is None:
            self._fail(sequence, EngineError("the handoff ended before prefill did"))
            return
        self._emit(sequence, sequence.first_token, FinishReason.LENGTH)
        self._end(sequence, "finished")

    def _expire(self) -> None:
        for sequence in self._sequences.find_expired(self._clock.now()):
            self._fail(sequence, EngineError("the request's deadline passed"))
        for order in self._prefixes.take_held_too_long():
            self._scheduler.compute_meanwhile(order)
        for order in self._prefixes.take_late():
            late = self._scheduler.give_up_load(order)
            if late is not None:
                error = StoreError(f"the store has not answered for {LOAD_TIMEOUT_S} s")
                late.request.trace.fallbacks.append(f"computed locally: {error}")
                self._updates.log_degraded(error)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        self._updates.add_failure(sequence.request.id, error)
        self._end(sequence, str(error))

    def _end(self, sequence: Sequence, reason: str) -> None:
        """Forget a sequence; a handoff that is still under way is aborted."""
        ticket = sequence.ticket
        if ticket is not None:
            if self._scheduler.pinned_blocks.holds(ticket.id):
                self._handoff.abort(ticket.id, reason)
            elif isinstance(sequence.kind, DecodeRequest):
                self._handoff.decline(ticket, reason)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._prefixes.leave(sequence)
        self._scheduler.end(sequence)
        self._stamp(sequence, Stamp.FINISHED)
        self._sequences.remove(sequence)
        self._on_end(sequence.request.id)

    def _is_in_use(self, ticket: TicketId) -> bool:
        scheduler = self._scheduler
        is_held = scheduler.pinned_blocks.holds(ticket) or scheduler.shared_blocks.holds(ticket)
        return is_held or self._sequences.has_ticket(ticket)

    def _count_admission(self, sequence: Sequence) -> None:
        trace = sequence.request.trace
        if Stamp.ADMITTED in trace.stamps:
            return
        self._stamp(sequence, Stamp.ADMITTED)
        trace.num_cached_tokens = sequence.num_cached_tokens
        self._counts.cached += sequence.num_cached_tokens

    def _note_prefilled(self, sequence: Sequence) -> None:
        trace = sequence.request.trace
        if Stamp.PREFILL_DONE in trace.stamps:  # it was preempted since
            return
        self._stamp(sequence, Stamp.PREFILL_DONE)
        if sequence.landing is None:  # else what is received is not known before it has landed
            self._count_computed(sequence)

    def _count_computed(self, sequence: Sequence) -> None:
        trace = sequence.request.trace
        num_reused = trace.num_cached_tokens + trace.num_received_tokens
        self._counts.computed += sequence.num_prompt_tokens - num_reused

    def _stamp(self, sequence: Sequence, name: Stamp) -> None:
        sequence.request.trace.stamp(name, self._clock.now())
