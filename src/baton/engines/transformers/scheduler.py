"""What to compute next: queues, blocks and the token budget. Pure: no tensors, no clock, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.engines.transformers.pinned_blocks import KeptBlocks, PinnedBlocks, SharedBlocks
from baton.engines.transformers.queued_prefixes import QueuedPrefixes, waits_for_store
from baton.engines.transformers.sequence import (
    PrefixState,
    Status,
    count_handed_over,
    count_landed,
    is_pulled,
    is_pushed_prefix,
)
from baton.events.journal import LEAST_EXPECTED_TOKENS, CacheJournal
from baton.kv.layout import LayerLayout, needed_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.ticket import Ticket
    from baton.engines.transformers.queued_prefixes import PendingLoad, PendingLookup, WorthAsking
    from baton.engines.transformers.sequence import PublishedRun, Sequence
    from baton.handoff.interface import KVLanded, LandingLayers, SampledToken
    from baton.ids import TicketId
    from baton.kv.pool import BlockPool

Allocated = TypeVar("Allocated")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step, and of what runs at once.

    Where fewer than `min_handoff_tokens` are missing they are computed, not received. Prompts that
    are to be pulled hold at most `max_held_blocks`, what is being kept in the store at most
    `max_kept_blocks`. Of a prompt that is split between two workers one step computes
    `max_split_tokens`, if they are more, where nothing else is computed.
    """

    max_batch_tokens: int
    max_num_seqs: int
    min_handoff_tokens: int
    max_held_blocks: int
    max_kept_blocks: int = 0
    max_split_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `num_tokens` tokens of `sequence`."""

    sequence: Sequence
    num_tokens: int

    @property
    def stop(self) -> int:
        """Tokens `[0, stop)` are computed once this work is done."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether some of these tokens are the prompt's, and no peer has computed them."""
        return self.sequence.num_computed < self.sequence.num_prefill_tokens

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the last one known, so that a new one follows."""
        is_last = self.num_tokens == self.sequence.num_uncomputed
        return is_last and not self.sequence.is_standby


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """A decode request for whose tokens from `start` on `blocks` were set aside."""

    sequence: Sequence
    ticket: Ticket
    start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, and the orders for the handoff before it.

    Of a work with `Sequence.landing` KV is waited for, layer by layer: it is the only one.

    `copies` of whole blocks, `(from, to)`, come first of all. What is `offered_from_cache` is
    computed. `held` could be computed, but wait for the store's answer. `lacks_exported_blocks`:
    a request waits for room, and some blocks are exported.
    """

    work: list[Work] = field(default_factory=list)
    offered: list[tuple[Sequence, Ticket]] = field(default_factory=list)
    offered_from_cache: list[tuple[Sequence, Ticket]] = field(default_factory=list)
    expected: list[PendingReceive] = field(default_factory=list)
    lookups: list[PendingLookup] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    loads: list[PendingLoad] = field(default_factory=list)
    declined: list[Ticket] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)
    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)
    lacks_exported_blocks: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(work.num_tokens for work in self.work)

    @property
    def has_landing(self) -> bool:
        """Whether it computes on KV that has not landed yet."""
        return any(work.sequence.landing is not None for work in self.work)


class Scheduler:  # noqa: PLR0904 - one for each thing that happens to a sequence
    """Waiting sequences in order of arrival, running ones, and the blocks of all.

    The oldest sequence always makes progress: where blocks are short, the youngest running one
    loses its own and is computed again later. What can be found by its hash goes into `journal`.
    Prompts are looked for in the store as soon as they wait, where that is `worth_asking`; None:
    none are. What it has is loaded into the prefix cache before their turn comes, into
    blocks that those ahead of them do not need; so a load holds none once it has ended.
    Owned by the engine's thread.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        layers: tuple[LayerLayout, ...],
        journal: CacheJournal | None = None,
    ) -> None:
        self.pool, self.limits, self.pinned_blocks = pool, limits, PinnedBlocks()
        self.shared_blocks = SharedBlocks(pool)
        self.kept_blocks = KeptBlocks(pool, limits.max_kept_blocks)
        self.worth_asking: WorthAsking | None = None
        self.num_preemptions = 0
        self._layers = tuple(dict.fromkeys(layers))
        self._journal = journal
        self._waiting: deque[Sequence] = deque()
        self._new_prefixes: list[Sequence] = []
        self._unoffered: list[Sequence] = []
        self._stored = QueuedPrefixes(pool, self.pinned_blocks)
        self._running: list[Sequence] = []
        self._has_room = True

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, for which nothing is being loaded. Any thread may read it."""
        return len(self._waiting) + len(self._new_prefixes) - self._stored.num_loads

    @property
    def waits_for_offered(self) -> bool:
        """Whether a request waits for blocks while handoffs hold some."""
        waits = any(not waits_for_store(sequence) for sequence in self._waiting)
        return waits and bool(self.pinned_blocks.sending_tickets)

    @property
    def num_running(self) -> int:
        """Sequences that each step may work on."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. A prefix that is cached is offered ahead of what needs a step."""
        if is_pushed_prefix(sequence):
            self._new_prefixes.append(sequence)
        else:
            self._report_expected(sequence)
            self._waiting.append(sequence)

    def schedule(self) -> Plan:
        """Choose one step's work; allocates, reserves and preempts as needed.

        Decoding goes before prefill, older sequences before younger ones.
        """
        plan = Plan(copies=self.shared_blocks.try_copy_revoked(spare=len(self._running)))
        unoffered, self._unoffered = self._unoffered, []
        for sequence in unoffered:
            if sequence.status is Status.RUNNING:
                self._offer(sequence, self._find_budget(sequence, plan), plan)
        for sequence in self._list_running():
            num_tokens = min(self._find_budget(sequence, plan), sequence.num_uncomputed)
            if num_tokens > 0 and sequence.status is Status.RUNNING:
                self._continue(sequence, num_tokens, plan)
        for sequence in self._new_prefixes:
            if not self._try_offer_cached(sequence, plan):
                self._waiting.append(sequence)
        self._new_prefixes.clear()
        worth = self.worth_asking
        if worth is not None:
            fewest = min(worth.held_tokens, worth.unheld_tokens)
            self._look_up(fewest, worth, plan)
        self._has_room = True
        for sequence in () if plan.has_landing else tuple(self._waiting):
            if sequence.prefix_state is PrefixState.AWAITED and self._may_start(plan):
                plan.held.append(sequence)
            elif not (waits_for_store(sequence) or self._admit(sequence, plan)):
                break
        if worth is not None:
            self._look_up(worth.queued_tokens, worth, plan)
        plan.loads.extend(self._stored.start_loads(self._waiting, len(self._running)))
        lacks_exported = not self._has_room and self.shared_blocks.num_exported_blocks > 0
        return replace(plan, lacks_exported_blocks=lacks_exported)

    def _list_running(self) -> list[Sequence]:
        """Those that this step may work on, in the order of their turns.

        One whose KV lands computes alone: others would wait for its layers, too.
        """
        by_age = sorted(self._running, key=lambda s: (s.num_uncomputed > 1, s.arrival))
        return [each for each in by_age if each.landing is None] or by_age[:1]

    def _find_budget(self, sequence: Sequence, plan: Plan) -> int:
        """Tokens that a step may still compute of a sequence.

        A part of a split prompt is one step where nothing waits for that: the second worker
        follows the first, layer by layer, in the step in which that ends.
        """
        is_split = sequence.landing is not None or is_pushed_prefix(sequence)
        if is_split and not plan.work and all(each is sequence for each in self._running):
            return max(self.limits.max_split_tokens, self.limits.max_batch_tokens)
        return self.limits.max_batch_tokens - plan.num_tokens

    def advance(self, work: Work) -> None:
        """The KV of this work is in its pages; blocks that became full can be found from now on."""
        sequence = work.sequence
        sequence.num_computed = work.stop
        self._publish(sequence)

    def end(self, sequence: Sequence) -> None:
        """This sequence's answer is over; its blocks are freed once no handoff uses them."""
        match sequence.status:
            case Status.WAITING:
                is_new = sequence in self._new_prefixes
                (self._new_prefixes if is_new else self._waiting).remove(sequence)
            case Status.RUNNING:
                self._running.remove(sequence)
            case Status.AWAITING_KV | Status.OFFERED | Status.ENDED:
                pass
        if sequence.load_id is not None:
            self._stored.end(sequence.load_id)
        sequence.stop_landing()
        sequence.status = Status.ENDED
        match sequence.kind:
            case PrefillRequest(ticket) if self.pinned_blocks.holds(ticket.id):
                return  # freed when the handoff gives them back
            case DecodeRequest(ticket):
                self.pinned_blocks.quarantine(ticket.id)
            case PrefillRequest() | Colocated():
                pass
        self.shared_blocks.release(sequence)

    def hold(self, sequence: Sequence) -> None:
        """A prefill request is computed: keep its blocks until its handoff ends."""
        self._running.remove(sequence)
        sequence.status = Status.OFFERED

    def begin_landing(self, ticket: TicketId, layers: LandingLayers) -> None:
        """The first layer of a decode request's KV is in place: what is not received is computed.

        From the next step on, while the other layers land.
        """
        found = self.pinned_blocks.find_incoming(ticket)
        if found is None:
            return
        sequence, blocks = found
        num_tokens = sequence.num_prompt_tokens
        sequence.begin_landing(
            layers, blocks, count_handed_over(sequence), self._find_dead(num_tokens)
        )
        self._run(sequence)

    def give_up_landing(self, num_layers: int) -> None:
        """A layer was late: requests that lack any of their KV wait for the rest of it."""
        for sequence in tuple(self._running):
            if sequence.landing is not None and sequence.landing.num < num_layers:
                self.await_landing(sequence)

    def await_landing(self, sequence: Sequence, token: SampledToken | None = None) -> None:
        """It waits for the rest of its KV: with the token that came of it, or to be computed."""
        self._running.remove(sequence)
        sequence.status, sequence.early_token = Status.AWAITING_KV, token
        if token is None:
            sequence.stop_landing()

    def _find_dead(self, num_tokens: int) -> int:
        """How many first tokens of a prompt are in no layer's window."""
        return max(needed_tokens(layer, num_tokens)[0] for layer in self._layers)

    def land(self, landed: KVLanded, num_to_compute: int) -> Sequence | None:
        """KV of a decode request is in place: it runs. None where it has ended since.

        The last `num_to_compute` tokens of the prompt are computed again, over what came; where
        only the first tokens came, so are those after them. The blocks that were set aside where
        a peer's are imported are free.
        """
        ticket, imported = landed.ticket, landed.imported
        granted = self.pinned_blocks.land(ticket)
        if granted is None:
            if imported:
                self.shared_blocks.reject_import(ticket)
            return None
        sequence, blocks = granted
        if sequence.landing is not None:
            if sequence.status is not Status.RUNNING:
                self._run(sequence)
            return sequence
        self.pool.release(blocks[: len(imported)])
        blocks = [*imported, *blocks[len(imported) :]]
        num_tokens = sequence.num_prompt_tokens
        dead = self._find_dead(num_tokens)
        num_landed = count_landed(landed, sequence)
        num_to_compute = max(num_to_compute, num_tokens - num_landed)
        sequence.receive(blocks, num_to_compute, complete_from=dead, num_imported=len(imported))
        if imported:
            self.shared_blocks.import_blocks(ticket, sequence)
        self._publish(sequence)
        self._run(sequence)
        return sequence

    def finish_landing(self, sequence: Sequence) -> SampledToken | None:
        """Its KV has landed after its first layer had: the token that was computed meanwhile."""
        token = sequence.finish_landing()
        self._publish(sequence)
        return token

    def find_stored(self, order: TicketId, num_tokens: int | None) -> None:
        """The store has answered: it has tokens before `num_tokens`; None: nothing of use.

        A prompt whose first tokens are computed already waits again if enough others were found.
        """
        sequence = self._stored.end(order)
        if sequence is None:
            return
        if num_tokens is None or sequence.status is Status.OFFERED:
            return
        if sequence.status is Status.RUNNING:
            num_saved = min(num_tokens, sequence.num_prompt_tokens - 1) - sequence.num_computed
            is_offered = sequence.ticket and self.pinned_blocks.holds(sequence.ticket.id)
            worth = self.worth_asking
            if worth is None or num_saved < worth.queued_tokens or is_offered:
                return
            self._running.remove(sequence)
            self._requeue(sequence)
        sequence.num_stored_tokens = num_tokens
        sequence.prefix_state = PrefixState.FOUND

    def compute_meanwhile(self, order: TicketId) -> None:
        """The store's answer takes too long: the prompt is computed when its turn comes."""
        self._stored.compute_meanwhile(order)

    def finish_load(self, order: TicketId, num_tokens: int) -> PendingLoad | None:
        """Tokens before `num_tokens` of the prompt are in place: they can be found by their hashes.

        None where the request has ended since.
        """
        granted = self.pinned_blocks.land(order)
        load = self._stored.end_load(order)
        if granted is None or load is None:
            return None
        sequence, blocks = granted
        self._publish_run(sequence, sequence.make_loaded_run(blocks, load.start, num_tokens))
        self.pool.release(blocks)
        return load

    def give_up_load(self, order: TicketId) -> Sequence | None:
        """The store does not answer: the prompt is computed here. None where it has ended since."""
        return self._stored.end(order)

    def fall_back(self, ticket: TicketId) -> Sequence | None:
        """A decode request gets no KV: it is computed here, next. None where it has ended since."""
        sequence = self.pinned_blocks.quarantine(ticket)
        if sequence is not None:
            if sequence.status is Status.RUNNING:
                self._running.remove(sequence)
            sequence.stop_landing()
            sequence.kind = Colocated()
            self._requeue(sequence)
        return sequence

    def finish_send(self, ticket: TicketId) -> Sequence | None:
        """A prefill request's handoff ended. Its blocks are freed if the sequence has ended too."""
        sequence = self.pinned_blocks.unpin(ticket)
        if sequence is not None and sequence.status is Status.ENDED:
            self.pool.release(sequence.restart())
        return sequence

    def export(self, ticket: TicketId, blocks: tuple[int, ...]) -> Sequence | None:
        """As `finish_send`, but a peer attends over `blocks` until it releases them."""
        sequence = self.pinned_blocks.find_sending(ticket)
        if sequence is not None:
            self.shared_blocks.export_blocks(ticket, sequence, blocks)
        return self.finish_send(ticket)

    def check_invariants(self) -> None:
        """Raise AssertionError where queues, statuses and blocks disagree."""
        self.shared_blocks.check_invariants()
        self.pool.check_invariants()
        waiting = [*self._waiting, *self._new_prefixes]
        if any(s.status is not Status.WAITING or s.blocks for s in waiting):
            raise AssertionError("a waiting sequence has blocks, or another status")
        self._stored.check_invariants(waiting)
        for sequence in self._running:
            room = len(sequence.blocks) * sequence.block_size
            if sequence.status is not Status.RUNNING or room < sequence.num_computed:
                raise AssertionError(f"request {sequence.request.id} runs without its blocks")

    def _continue(self, sequence: Sequence, num_tokens: int, plan: Plan) -> None:
        missing = sequence.num_blocks_for(sequence.num_computed + num_tokens) - len(sequence.blocks)
        while missing > 0:
            fresh = self.pool.try_allocate(missing)
            if fresh is not None:
                sequence.blocks += fresh
                break
            if self.kept_blocks.give_up_newest():
                continue
            self._preempt_youngest(plan)
            if sequence.status is not Status.RUNNING:
                return
        plan.work.append(Work(sequence, num_tokens))

    def _preempt_youngest(self, plan: Plan) -> None:
        # A prefill request's blocks are offered to a peer: they may not be taken away. Nor may
        # those in which KV lands.
        preemptable = (s for s in self._running if isinstance(s.kind, Colocated))
        victim = max(preemptable, key=lambda s: s.arrival)
        self._running.remove(victim)
        # It may be in this step already: one that decodes goes before an older standby request
        # that was given several tokens.
        plan.work[:] = [work for work in plan.work if work.sequence is not victim]
        self.num_preemptions += 1
        self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        self.shared_blocks.release(sequence)
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Take the first waiting sequence in, if there is room for it."""
        if self._num_active >= self.limits.max_num_seqs:
            return False
        self._take_back_kept(sequence)
        match sequence.kind:
            case DecodeRequest(ticket):
                if self._count_missing(sequence, ticket) >= self.limits.min_handoff_tokens:
                    return self._start_receive(sequence, ticket, plan)
                plan.declined.append(ticket)
                sequence.kind = Colocated()
            case PrefillRequest() if not self._may_be_held(sequence):
                self._waiting.remove(sequence)
                plan.refused.append(sequence)
                sequence.status = Status.ENDED
                return True
            case PrefillRequest() | Colocated():
                pass
        load = self._stored.try_start_load(sequence, len(self._running))
        if load is not None:
            plan.loads.append(load)
            return True
        budget = self._find_budget(sequence, plan)
        if budget <= 0 or not self._start(sequence):
            return False
        plan.work.append(Work(sequence, min(budget, sequence.num_uncomputed)))
        self._offer(sequence, max(budget, self.limits.max_batch_tokens), plan)
        return True

    def _take_back_kept(self, sequence: Sequence) -> None:
        """Where a request lacks blocks that are being copied into the store, and no others."""
        kept = self.kept_blocks
        if not kept.num_blocks:
            return
        cached = self.pool.acquire_cached(sequence.reusable_hashes())
        num_missing = sequence.num_blocks_for(sequence.num_tokens) - len(cached)
        num_needed = num_missing + len(self._running)
        if num_needed <= self.pool.num_free + kept.num_blocks:
            while num_needed > self.pool.num_free and kept.give_up_newest():
                pass
        self.pool.release(cached)

    @property
    def _num_active(self) -> int:
        """Sequences that run, or will once their KV has landed."""
        num_landing = sum(sequence.landing is not None for sequence in self._running)
        num_incoming = self.pinned_blocks.num_incoming - self._stored.num_loads
        return len(self._running) + num_incoming - num_landing

    def _may_start(self, plan: Plan) -> bool:
        """Whether this step can take in another prompt, if there are blocks for it."""
        has_budget = plan.num_tokens < self.limits.max_batch_tokens
        return has_budget and self._num_active < self.limits.max_num_seqs

    def _offer(self, sequence: Sequence, step_tokens: int, plan: Plan) -> None:
        """Where it is to be handed over.

        Its blocks are fixed from then on. So it waits while the store may still have the rest of
        the prompt, but not beyond its last step: one may have `step_tokens`.
        """
        if not isinstance(sequence.kind, PrefillRequest):
            return
        is_asked = sequence.prefix_state is PrefixState.ASKED and not is_pulled(sequence)
        if is_asked and sequence.num_uncomputed > step_tokens:
            self._unoffered.append(sequence)
            return
        self.pinned_blocks.pin(sequence.kind.ticket.id, sequence)
        plan.offered.append((sequence, sequence.kind.ticket))

    def _look_up(self, min_tokens: int, worth: WorthAsking, plan: Plan) -> None:
        lookups = self._stored.start_lookups(self._waiting, min_tokens, worth.held_tokens)
        plan.lookups.extend(lookups)

    def _try_offer_cached(self, sequence: Sequence, plan: Plan) -> bool:
        """Offer a prefix that is cached whole."""
        cached = self.pool.acquire_cached(sequence.hashes(sequence.num_tokens))
        if len(cached) * sequence.block_size < sequence.num_tokens:
            self.pool.release(cached)
            return False
        sequence.admit(cached, [])
        sequence.status = Status.OFFERED
        if sequence.ticket is not None:
            self.pinned_blocks.pin(sequence.ticket.id, sequence)
            plan.offered_from_cache.append((sequence, sequence.ticket))
        return True

    def _may_be_held(self, sequence: Sequence) -> bool:
        """Whether its blocks may wait for its decode worker, where they are to."""
        num_blocks = sequence.num_blocks_for(sequence.num_tokens)
        num_held = self.pinned_blocks.num_held_blocks
        return not is_pulled(sequence) or num_held + num_blocks <= self.limits.max_held_blocks

    def _count_missing(self, sequence: Sequence, ticket: Ticket) -> int:
        """Tokens to be handed over that no cached block has."""
        num_cached = self.pool.find_cached(sequence.reusable_hashes()) * sequence.block_size
        return ticket.count_handed_over(sequence.num_tokens) - num_cached

    def _start(self, sequence: Sequence) -> bool:
        taken = self._try_take(sequence, self.pool.try_allocate)
        if taken is None:
            return False
        self._waiting.remove(sequence)
        sequence.admit(*taken)
        self._run(sequence)
        return True

    def _start_receive(self, sequence: Sequence, ticket: Ticket, plan: Plan) -> bool:
        taken = self._try_take(sequence, self.pool.try_reserve)
        if taken is None:
            return False
        cached, reserved = taken
        self._waiting.remove(sequence)
        sequence.admit(cached, [])
        sequence.status = Status.AWAITING_KV
        blocks = reserved.blocks
        self.pinned_blocks.grant(ticket.id, sequence, reserved)
        plan.expected.append(PendingReceive(sequence, ticket, sequence.num_computed, blocks))
        return True

    def _try_take(
        self, sequence: Sequence, take: Callable[[int], Allocated | None]
    ) -> tuple[list[int], Allocated] | None:
        """Share what is cached of all known tokens, and `take` blocks for the others."""
        cached = self.pool.acquire_cached(sequence.reusable_hashes())
        missing = sequence.num_blocks_for(sequence.num_tokens) - len(cached)
        # Room for each running sequence to grow by a block, lest one be preempted at once.
        has_room = missing + len(self._running) <= self.pool.num_free
        self._has_room &= has_room
        taken = take(missing) if has_room else None
        if taken is None:
            self.pool.release(cached)
            return None
        return cached, taken

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running.append(sequence)

    def _report_expected(self, sequence: Sequence) -> None:
        """What a new prompt will store, for gateways that did not place it: it may wait long."""
        if self._journal is None:
            return
        hashes, size = sequence.reusable_hashes(), sequence.block_size
        num_cached = self.pool.find_cached(hashes)
        if (len(hashes) - num_cached) * size < LEAST_EXPECTED_TOKENS:
            return
        parent = hashes[num_cached - 1] if num_cached else None
        self._journal.add_expected(
            parent,
            sequence.token_ids(num_cached * size, len(hashes) * size),
            size,
            sequence.request.tenant_salt,
        )

    def _publish(self, sequence: Sequence) -> None:
        self._publish_run(sequence, sequence.take_publishable())

    def _publish_run(self, sequence: Sequence, run: PublishedRun | None) -> None:
        if run is None:
            return
        for block, block_hash in zip(run.blocks, run.hashes, strict=True):
            self.pool.publish(block, block_hash)
        if self._journal is not None:
            salt = sequence.request.tenant_salt
            self._journal.add_stored(run.hashes, run.parent, run.token_ids, salt)
