"""The invariants, looked at while a run goes on (failure-modes' I1 to I7; docs/reliability.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, assert_never

from baton.handoff.grants import MAX_EARLY_GRANTS, MAX_TOMBSTONES
from baton.handoff.interface import (
    BlocksQuiescent,
    ExportReleased,
    HandoffEvent,
    ImportRevoked,
    KeepOrder,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    LayersLanding,
    LoadOrder,
    PrefixFound,
    ReceiveOrder,
    SendFailed,
    SendOrder,
)
from baton.handoff.kv_views import Holder
from baton.handoff.messages import Grant, RenewLease
from baton.handoff.session.lease import LEASE_STAGE
from baton.kv.blocks import BlockState
from baton.kv.copies import PageCopies, blocks_holding
from baton.sim.handoff import internals
from baton.sim.handoff.agent import tickets_of
from baton.sim.handoff.allowed_failures import Invariant, ViolationError
from baton.sim.handoff.memory import NUM_LAYERS, extend_chain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import Ticket
    from baton.engines.transformers.scheduler import Work
    from baton.engines.transformers.sequence import Sequence
    from baton.handoff.peers import MessageReceived
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.sim.handoff.fabric import Fabric
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.transport import SimWrite

HANDOFF_TIMEOUT_S: Final = 3.0
REQUEST_TIMEOUT_S: Final = 10.0
SLACK_S: Final = 0.7
"""Deadlines are looked at now and then, by clocks that are 2 % wrong."""


@dataclass(slots=True)
class DeadlineChecker:
    """From when each handoff's `HANDOFF_TIMEOUT_S` counts, by the life of its worker."""

    _since_s: dict[tuple[Epoch, TicketId], float] = field(default_factory=dict)

    def start(self, process: SimProcess, ticket: TicketId, *, is_held: bool) -> None:
        """What is held to be pulled waits for as long as its request may, and its lease lasts."""
        extra_s = REQUEST_TIMEOUT_S - HANDOFF_TIMEOUT_S if is_held else 0.0
        self._since_s[process.epoch, ticket] = process.world.timeline.now_s + extra_s

    def end(self, process: SimProcess, ticket: TicketId) -> None:
        """No process waits for it there any more."""
        self._since_s.pop((process.epoch, ticket), None)

    def engine_alive(self, process: SimProcess, prompts: Iterable[Ticket]) -> None:
        """An engine computes: prompts that it has yet to compute may take longer, on both sides."""
        for ticket in prompts:
            for key in ((process.epoch, ticket.id), (ticket.decode.epoch, ticket.id)):
                if key in self._since_s:
                    self._since_s[key] = max(self._since_s[key], process.world.timeline.now_s)

    def find_overdue(self, process: SimProcess) -> TicketId | None:
        """A handoff of this life that should have ended long ago."""
        latest_s = process.world.timeline.now_s - HANDOFF_TIMEOUT_S - SLACK_S
        if latest_s < process.running_since_s:
            return None  # what was asked before it stood still may have begun after it
        for (epoch, ticket), since_s in self._since_s.items():
            if epoch == process.epoch and since_s < latest_s:
                return ticket
        return None


DRIFT: Final = 0.05
"""Of a lease: two clocks are 2 % wrong each, in opposite directions, and decode's is not ours."""


@dataclass(slots=True)
class LeaseChecker:
    """All leases of a run, in true time. `seen` counts what happened to them."""

    tickets: dict[TicketId, Ticket]
    seen: Counter[str] = field(default_factory=Counter)
    _renewed_s: dict[tuple[Epoch, TicketId], float] = field(default_factory=dict)
    _lapsed_s: dict[TicketId, float] = field(default_factory=dict)
    _read_late: set[TicketId] = field(default_factory=set)

    def start(self, process: SimProcess, ticket: TicketId) -> None:
        """All is computed: the prefill worker holds it."""
        self._renewed_s[process.epoch, ticket] = process.world.timeline.now_s

    def on_renewed(self, process: SimProcess, by: Epoch, tickets: Iterable[TicketId]) -> None:
        """A prefill worker receives tickets: those of that decode worker are held longer."""
        now_s = process.world.timeline.now_s
        for ticket in tickets:
            known = self.tickets.get(ticket)
            if known is not None and known.decode.epoch == by:
                key = process.epoch, ticket
                if key in self._renewed_s:
                    self.seen["lease renewed"] += 1
                    self._renewed_s[key] = now_s

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """A prefill worker holds it no more; its blocks may hold another prompt from here on."""
        if isinstance(event, KVSent | KVExported | SendFailed):
            self._renewed_s.pop((process.epoch, event.ticket), None)
        if isinstance(event, SendFailed) and event.error.stage == LEASE_STAGE:
            self.seen["lease lapsed"] += 1
            self._lapsed_s[event.ticket] = process.world.timeline.now_s

    def on_read(self, process: SimProcess, ticket: TicketId | None) -> None:
        """A decode worker copies source pages of this ticket."""
        if ticket is None or ticket not in self._lapsed_s:
            return
        world = process.world
        late_s = world.timeline.now_s - self._lapsed_s[ticket]
        if late_s > DRIFT * world.schedule.lease_s:
            self.seen["read after its lease"] += 1
            self._read_late.add(ticket)

    def is_read_late(self, ticket: TicketId) -> bool:
        """Whether what lies in its pages was read when no handoff held it any more."""
        return ticket in self._read_late

    def find_overdue(self, process: SimProcess) -> TicketId | None:
        """One that is held although no worker has renewed it in time."""
        world = process.world
        latest_s = world.timeline.now_s - (1 + DRIFT) * world.schedule.lease_s - SLACK_S
        for (epoch, ticket), renewed_s in self._renewed_s.items():
            # It may have begun when the process went on.
            if epoch == process.epoch and max(renewed_s, process.running_since_s) < latest_s:
                is_ending = internals.is_ending(process.agent, ticket)
                if not is_ending and internals.outgoing_blocks(
                    process.scheduler.pinned_blocks, ticket
                ):
                    return ticket
        return None


_NAMES: Final = {
    KVExported: "export",
    ExportReleased: "export released",
    ImportRevoked: "import revoked",
}


@dataclass(slots=True)
class ExportChecker:
    """All exports of a run. `seen` counts what happened to them."""

    seen: Counter[str] = field(default_factory=Counter)

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """An export ends only when no process reads it any more, whatever was reported."""
        if isinstance(event, KVExported | ExportReleased | ImportRevoked):
            self.seen[_NAMES[type(event)]] += 1
        if isinstance(event, ExportReleased):
            for other in _others(process):
                if internals.is_importing(other, event.ticket):
                    name = event.ticket.hex()[:6]
                    raise ViolationError(
                        "I2", f"{process.name}: export {name} ends, and {other.name} reads"
                    )

    def on_write(self, process: SimProcess, blocks: Iterable[int]) -> None:
        """Bytes are about to change in blocks of a worker's own."""
        changed = set(blocks)
        if not process.world.schedule.shares_blocks or not changed:
            return
        if max(changed) >= process.plan.num_blocks:
            raise ViolationError("I2", f"{process.name}: it writes into blocks of a peer")
        for other in _others(process):
            if changed & internals.find_read_pages(other, process.epoch):
                raise ViolationError(
                    "I2", f"{process.name}: blocks change that {other.name} attends over"
                )

    def on_copy(self, process: SimProcess, source: Iterable[int], target: Iterable[int]) -> None:
        """Blocks that were imported are copied into others."""
        self.seen["import copied"] += 1
        self.on_read(process, source)
        self.on_write(process, target)

    def on_read(self, process: SimProcess, blocks: Iterable[int]) -> None:
        """Blocks are looked at: own ones, or mapped ones."""
        if process.world.schedule.shares_blocks:
            block = internals.find_unmapped(process, blocks)
            if block is not None:
                raise ViolationError(
                    "I2", f"{process.name}: block {block} is read, and mapped no more"
                )


def _others(process: SimProcess) -> list[SimProcess]:
    """Who may read a worker's blocks: lives that have not ended, stopped ones too."""
    return [each for each in process.world.processes if each.is_alive and each is not process]


@dataclass(slots=True)
class PoolChecker:
    """All copies between stores and engines."""

    seen: Counter[str] = field(default_factory=Counter)

    def check_gather(self, process: SimProcess, blocks: set[int]) -> None:
        """I2: blocks are copied into the store: they must be held for a handoff."""
        pinned_blocks = process.scheduler.pinned_blocks
        held = (
            internals.outgoing_blocks(pinned_blocks, ticket)
            for ticket in pinned_blocks.sending_tickets
        )
        kept = internals.kept_blocks(process.scheduler)
        if not blocks <= {block for some in held for block in some} | kept:
            raise ViolationError("I2", f"{process.name}: blocks are kept that were given back")

    def check_scatter(self, process: SimProcess, blocks: set[int]) -> None:
        """I2: bytes from the store are about to land in blocks."""
        states = {internals.state_of(process.scheduler, block) for block in blocks}
        if not states <= {BlockState.IN_FLIGHT, BlockState.QUARANTINED}:
            names = ", ".join(sorted(state.value for state in states))
            raise ViolationError("I2", f"{process.name}: entries land in blocks that are {names}")

    def check_landed(
        self, process: SimProcess, order: ReceiveOrder | LoadOrder, landed: KVLanded
    ) -> None:
        """I8: what came out of the store is the prompt's, whoever computed it."""
        if order.prompt_ids is None:
            return
        size, first = process.plan.block_size, order.blocks.first
        stop = len(order.prompt_ids) if landed.num_tokens is None else landed.num_tokens
        chain: list[int] = []
        extend_chain(chain, order.prompt_ids.tolist())
        for layer in range(NUM_LAYERS):
            wrong = process.pages.find_wrong(
                layer, order.blocks.blocks.tolist(), chain[first * size :], stop - first * size
            )
            if wrong is not None and wrong + first * size >= order.start:
                at = f"layer {layer}, token {wrong + first * size} of [{order.start}, {stop})"
                raise ViolationError("I8", f"{process.name}: the store gave KV of others: {at}")


MAX_LINKS_PER_PEER: Final = 8

Known: TypeAlias = dict["TicketId", tuple[object, ...]]
"""All that an agent knows of some tickets."""

_WRITABLE = frozenset({BlockState.IN_FLIGHT, BlockState.QUARANTINED})


@dataclass(slots=True)  # noqa: PLR0904 - one for each thing that is looked at
class Checker:
    """Looks on; nothing that it does changes a run. `fabric` is set once it is there.

    `seen` counts what became of layers that were computed while others landed.
    """

    tickets: dict[TicketId, Ticket] = field(default_factory=dict)
    sealed: dict[str, TicketId] = field(default_factory=dict)
    incarnations: dict[Epoch, int] = field(default_factory=dict)
    messages: list[MessageReceived] = field(default_factory=list)
    failures: list[tuple[str, KVFailed | SendFailed]] = field(default_factory=list)
    waits_for_landing: set[TicketId] = field(default_factory=set)
    fabric: Fabric | None = None
    seen: Counter[str] = field(default_factory=Counter)
    deadlines: DeadlineChecker = field(default_factory=DeadlineChecker)
    leases: LeaseChecker = field(init=False)
    exports: ExportChecker = field(init=False)
    pooling: PoolChecker = field(default_factory=PoolChecker)
    _states: dict[tuple[Epoch, TicketId], str] = field(default_factory=dict)
    _orders: dict[tuple[Epoch, TicketId], ReceiveOrder] = field(default_factory=dict)
    _loads: dict[tuple[Epoch, TicketId], LoadOrder] = field(default_factory=dict)
    _loaded_lives: dict[Epoch, set[int]] = field(default_factory=dict)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self.leases = LeaseChecker(self.tickets)
        self.exports = ExportChecker()

    def on_store(
        self, process: SimProcess, region: RegionHandle, copies: PageCopies, ticket: TicketId | None
    ) -> None:
        """I2: bytes are about to be stored in pages of a worker."""
        pages = {page for group in copies.groups for page in group.dst_pages.tolist()}
        if region == process.pages.region.handle:
            self._check_store_in_blocks(process, pages, ticket)
        elif ticket is None:
            if not internals.is_staged_for_some(process.view, pages):
                self._fail("I2", f"{process.name}: a read lands in free staging pages")
        elif not pages <= set(internals.staged_pages(process.view, Holder("receive", ticket))):
            self._fail("I2", f"{process.name}: a write lands in staging pages of others")

    def on_read(self, process: SimProcess, region: RegionHandle, copies: PageCopies) -> None:
        """Pages of a peer are copied: are they held there still? `accepted` asks."""
        pages = {page for group in copies.groups for page in group.dst_pages.tolist()}
        self.leases.on_read(process, internals.find_reader(process, region, pages))

    def on_source_read(self, write: SimWrite) -> None:
        """I2: the source pages of a write are read: they must still be held for it."""
        process, ticket = write.poster.process, write.order.grant
        pages = {page for g in write.order.copies.groups for page in g.src_pages.tolist()}
        if write.order.region == process.pages.region.handle:
            held = set(internals.outgoing_blocks(process.scheduler.pinned_blocks, ticket))
        else:
            held = set(internals.staged_pages(process.view, Holder("send", ticket)))
        if not pages <= held:
            self._fail("I2", f"{process.name}: a write reads source pages that were given back")

    def on_attend(
        self,
        process: SimProcess,
        sequence: Sequence,
        chain: list[int],
        stop: int,
        *,
        layers: range,
    ) -> None:
        """I1: tokens `[0, stop)` of a sequence are attended to, in some layers."""
        self.exports.on_read(process, sequence.blocks)
        for layer in layers:
            wrong = process.pages.find_wrong(layer, sequence.blocks, chain, stop)
            if wrong is not None:
                where = f"layer {layer}, token {wrong} of [0, {stop})"
                self._fail("I1", f"{process.name}: {sequence.request.id} reads wrong KV: {where}")

    def on_compute(self, process: SimProcess, work: Work) -> None:
        """I2: KV of the tokens of a step is written into blocks of the engine's."""
        sequence = work.sequence
        held = blocks_holding(sequence.num_computed, work.stop, sequence.block_size)
        self.exports.on_write(process, sequence.blocks[held.start : held.stop])

    def on_start_receive(self, process: SimProcess, order: ReceiveOrder) -> None:
        """An engine asked for KV."""
        self._begin(process, order.ticket.id, "expected")
        self._orders[process.epoch, order.ticket.id] = order

    def on_start_send(self, process: SimProcess, order: SendOrder) -> None:
        """An engine announced KV."""
        self._begin(process, order.ticket.id, "offered")

    def on_start_load(self, process: SimProcess, order: LoadOrder) -> None:
        """An engine asked for a prompt's beginning."""
        self._begin(process, order.id, "expected")
        self._loads[process.epoch, order.id] = order
        self.pooling.seen["prefix asked for"] += 1

    def on_start_keep(self, process: SimProcess, order: KeepOrder) -> None:
        """An engine left what it has computed."""
        self._begin(process, order.id, "offered")
        self.pooling.seen["prefix to be kept"] += 1

    def on_abort(self, process: SimProcess, ticket: TicketId) -> None:
        """An engine lost interest."""
        key = process.epoch, ticket
        self.deadlines.end(process, ticket)
        if self._states.get(key) == "expected":
            self._states[key] = "aborted"

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """I2: an agent reports that pages are ready, or free: nothing may land in them any more."""
        if not isinstance(event, BlocksQuiescent | LayersLanding):
            self.deadlines.end(process, event.ticket)
            self._note_landing(event.ticket)
        self.leases.on_event(process, event)
        self.exports.on_event(process, event)
        if isinstance(event, KVLanded):
            self.check_state(process)
        if isinstance(event, KVLanded | BlocksQuiescent) and not process.view.is_staged:
            for write in () if self.fabric is None else self.fabric.landing:
                if write.target.process is process and write.order.grant == event.ticket:
                    opened = write.target.grants.get(event.ticket)
                    is_dropped = opened is None or opened.is_closing
                    if not (write.target.traits.receiver_stores and is_dropped):
                        name = type(event).__name__
                        self._fail("I2", f"{process.name}: {name}, and a write may still land")

    def on_engine_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """I4: a handoff ends once; I1: with what its ticket names."""
        key = process.epoch, event.ticket
        fate, name = self._states.get(key, "unknown"), type(event).__name__
        process.note(f"its engine receives {name} of {event.ticket.hex()[:6]}")
        match event:
            case KVLanded():
                self._transition(key, {"expected", "aborted"}, "landed", name)
                if fate == "expected" and key in self._loads:
                    self._check_loaded(process, self._loads[key], event)
                elif fate == "expected":
                    self._accepted(process, self._orders[key], event)
            case LayersLanding():
                self._transition(key, {"expected", "aborted"}, fate, name)
                self.seen["layers landing"] += 1
            case KVFailed():
                self._transition(key, {"expected", "aborted"}, "failed", name)
                self.failures.append((process.name, event))
            case BlocksQuiescent():
                self._transition(key, {"failed", "aborted"}, "over", name)
            case PrefixFound():
                self.pooling.seen["prefix looked for"] += 1
            case KVExported() | ExportReleased() | ImportRevoked():
                self._on_export_event(key, event)
            case KVSent() | SendFailed():
                self._transition(key, {"offered"}, "sent", name)
                if isinstance(event, SendFailed):
                    self.failures.append((process.name, event))
            case _:
                assert_never(event)

    def _check_loaded(self, process: SimProcess, order: LoadOrder, landed: KVLanded) -> None:
        self.pooling.check_landed(process, order, landed)
        stop, first = landed.num_tokens or 0, order.blocks.first * process.plan.block_size
        if stop <= order.start:
            return
        self.pooling.seen["prefix loaded"] += 1
        lives = self._loaded_lives.setdefault(process.epoch, set())
        for layer in range(NUM_LAYERS):
            lives |= process.pages.incarnations(
                layer, order.blocks.blocks.tolist(), order.start - first, stop - first
            )

    def _on_export_event(
        self, key: tuple[Epoch, TicketId], event: KVExported | ExportReleased | ImportRevoked
    ) -> None:
        match event:
            case KVExported():
                self._transition(key, {"offered"}, "exported", "KVExported")
            case ExportReleased():
                self._transition(key, {"exported"}, "sent", "ExportReleased")
            case ImportRevoked():
                self._transition(key, {"landed"}, "landed", "ImportRevoked")
            case _:
                assert_never(event)

    def before_message(self, process: SimProcess, received: MessageReceived) -> Known:
        """I7: what is known of tickets before somebody who has no part in them speaks of them."""
        process.note(f"receives {type(received.message).__name__} from {received.peer.name}")
        self.messages.append(received)
        if received.peer.hello is None:
            return {}
        epoch, named = received.peer.hello.epoch, tickets_of(received, self.sealed)
        if isinstance(received.message, RenewLease | Grant):
            self.leases.on_renewed(process, epoch, named)
        tickets = [self.tickets[each] for each in named if each in self.tickets]
        return {
            ticket.id: internals.describe_ticket(process.agent, ticket)
            for ticket in tickets
            if epoch not in {ticket.prefill.epoch, ticket.decode.epoch}
        }

    def after_message(self, process: SimProcess, received: MessageReceived, before: Known) -> None:
        """I7: it changed nothing."""
        for ticket, known in before.items():
            if internals.describe_ticket(process.agent, self.tickets[ticket]) != known:
                what = type(received.message).__name__
                who = f"another incarnation ({received.peer.name}) than its ticket names"
                self._fail("I7", f"{process.name}: {what} from {who} changed a handoff")

    def on_step(self, process: SimProcess) -> None:
        """Now and then, have a worker's books checked; I5: they are bounded."""
        self._num_steps += 1
        if self._num_steps % 64 == 0:
            self.check_state(process)
        overdue = self.leases.find_overdue(process)
        if overdue is not None:
            self._fail("I3", f"{process.name}: {overdue.hex()[:6]} outlives its lease")
        overdue = self.deadlines.find_overdue(process)
        if overdue is not None:
            self._fail("I4", f"{process.name}: {overdue.hex()[:6]} outlives its deadline")

    def check_state(self, process: SimProcess) -> None:
        """Each pure structure agrees with itself, and has no more in it than it may."""
        try:
            process.loop.check_invariants()
            internals.check_state(process.agent)
        except AssertionError as exc:
            self._fail("error", f"{process.name}: {exc}")
        agent = process.agent
        bounds = {
            "early grants": (internals.count_early_grants(agent), MAX_EARLY_GRANTS),
            "tombstones": (internals.count_tombstones(agent), 2 * MAX_TOMBSTONES),
            "links": (internals.count_links(agent), MAX_LINKS_PER_PEER * len(self.incarnations)),
            "peer_mappings": (internals.count_peer_mappings(process), len(self.incarnations)),
        }
        for what, (num, most) in bounds.items():
            if num > min(most, 4 * len(self.tickets) + MAX_LINKS_PER_PEER * len(self.incarnations)):
                self._fail("I5", f"{process.name}: {num} {what}")

    def _note_landing(self, ticket: TicketId) -> None:
        """Whether a handoff that ends just now has a write that hardware does not let go of."""
        if self.fabric is not None and self.fabric.is_late(ticket):
            self.waits_for_landing.add(ticket)

    def _begin(self, process: SimProcess, ticket: TicketId, fate: str) -> None:
        key = process.epoch, ticket
        if key in self._states:
            self._fail("I4", f"{process.name}: ticket {ticket.hex()[:6]} is used a second time")
        self._states[key] = fate
        known = self.tickets.get(ticket)  # none: an engine's own, with the store
        is_held = fate == "offered" and known is not None and known.mode == "pull"
        self.deadlines.start(process, ticket, is_held=is_held)

    def _check_store_in_blocks(
        self, process: SimProcess, pages: set[int], ticket: TicketId | None
    ) -> None:
        self.exports.on_write(process, pages)
        states = {internals.state_of(process.scheduler, page) for page in pages}
        if not states <= _WRITABLE:
            names = ", ".join(sorted(state.value for state in states))
            self._fail("I2", f"{process.name}: bytes land in blocks that are {names}")
        pinned_blocks = process.scheduler.pinned_blocks
        if ticket is not None and not pages <= set(
            internals.incoming_blocks(pinned_blocks, ticket)
        ):
            self._fail("I2", f"{process.name}: bytes land in blocks of another handoff")

    def _accepted(self, process: SimProcess, order: ReceiveOrder, landed: KVLanded) -> None:
        """I1: what landed was held by the life that the ticket names: computed by it, or loaded."""
        if self.leases.is_read_late(order.ticket.id):
            name = order.ticket.id.hex()[:6]
            self._fail("I1", f"{process.name}: {name}: what was read after its lease is consumed")
        if order.ticket.mode == "pool":
            self.pooling.check_landed(process, order, landed)
            return
        imported = landed.imported
        named = order.ticket.prefill.epoch
        expected = {self.incarnations[named], *self._loaded_lives.get(named, ())}
        size, table = process.plan.block_size, order.blocks
        first = table.first * size
        blocks = [*imported, *table.blocks.tolist()[len(imported) :]]
        self.exports.on_read(process, blocks)
        for layer in range(NUM_LAYERS):
            incarnations = process.pages.incarnations(
                layer, blocks, order.start - first, order.num_tokens - first
            )
            if not incarnations <= expected:
                self._fail(
                    "I1", f"{process.name}: KV of lives {incarnations} where {expected} was asked"
                )

    def _transition(
        self,
        key: tuple[Epoch, TicketId],
        due: set[str],
        fate: str,
        name: str,
    ) -> None:
        before = self._states.get(key, "unknown")
        if before not in due:
            self._fail("I4", f"{name} of a handoff that was {before} ({key[1].hex()[:6]})")
        self._states[key] = fate

    @staticmethod
    def _fail(invariant: Invariant, what: str) -> NoReturn:
        raise ViolationError(invariant, what)
