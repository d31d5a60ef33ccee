"""The invariants, looked at while a run goes on (failure-modes' I1 to I7; docs/reliability.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, assert_never

from baton.handoff.grants import MAX_EARLY_GRANTS, MAX_TOMBSTONES
from baton.handoff.interface import (
    BlocksQuiescent,
    ExportReleased,
    ImportRevoked,
    KVExported,
    KVFailed,
    KVLanded,
    KVSent,
    SendFailed,
)
from baton.handoff.messages import Grant, RenewLease
from baton.handoff.staging import Holder
from baton.kv.blocks import BlockState
from baton.sim.handoff import internals
from baton.sim.handoff.agent import tickets_of
from baton.sim.handoff.deadline_checker import DeadlineChecker
from baton.sim.handoff.export_checker import ExportChecker
from baton.sim.handoff.lease_checker import LeaseChecker
from baton.sim.handoff.memory import NUM_LAYERS
from baton.sim.handoff.pool_checker import PoolChecker
from baton.sim.handoff.violation import ViolationError

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.engines.transformers.scheduler import Work
    from baton.engines.transformers.sequence import Sequence
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SendOrder
    from baton.handoff.peers import MessageReceived
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.sim.handoff.fabric import Fabric
    from baton.sim.handoff.process import SimProcess
    from baton.sim.handoff.transport import SimWrite
    from baton.sim.handoff.violation import Invariant

MAX_LINKS_PER_PEER: Final = 8

Known: TypeAlias = dict["TicketId", tuple[object, ...]]
"""All that an agent knows of some tickets."""

_WRITABLE = frozenset({BlockState.IN_FLIGHT, BlockState.QUARANTINED})


@dataclass(slots=True)
class Checker:
    """Looks on; nothing that it does changes a run. `fabric` is set once it is there."""

    tickets: dict[TicketId, Ticket] = field(default_factory=dict)
    sealed: dict[str, TicketId] = field(default_factory=dict)
    incarnations: dict[Epoch, int] = field(default_factory=dict)
    messages: list[MessageReceived] = field(default_factory=list)
    failures: list[tuple[str, KVFailed | SendFailed]] = field(default_factory=list)
    waits_for_landing: set[TicketId] = field(default_factory=set)
    fabric: Fabric | None = None
    deadlines: DeadlineChecker = field(default_factory=DeadlineChecker)
    leases: LeaseChecker = field(init=False)
    exports: ExportChecker = field(init=False)
    pooling: PoolChecker = field(default_factory=PoolChecker)
    _states: dict[tuple[Epoch, TicketId], str] = field(default_factory=dict)
    _orders: dict[tuple[Epoch, TicketId], ReceiveOrder] = field(default_factory=dict)
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
        self, process: SimProcess, sequence: Sequence, chain: list[int], stop: int
    ) -> None:
        """I1: tokens `[0, stop)` of a sequence are attended to."""
        self.exports.on_read(process, sequence.blocks)
        for layer in range(NUM_LAYERS):
            wrong = process.pages.find_wrong(layer, sequence.blocks, chain, stop)
            if wrong is not None:
                where = f"layer {layer}, token {wrong} of [0, {stop})"
                self._fail("I1", f"{process.name}: {sequence.request.id} reads wrong KV: {where}")

    def on_compute(self, process: SimProcess, work: Work) -> None:
        """I2: KV of the tokens of a step is written into blocks of the engine's."""
        size = work.sequence.block_size
        first, stop = work.sequence.num_computed // size, -(-work.stop // size)
        self.exports.on_write(process, work.sequence.blocks[first:stop])

    def on_start_receive(self, process: SimProcess, order: ReceiveOrder) -> None:
        """An engine asked for KV."""
        self._begin(process, order.ticket.id, "expected")
        self._orders[process.epoch, order.ticket.id] = order

    def on_start_send(self, process: SimProcess, order: SendOrder) -> None:
        """An engine announced KV."""
        self._begin(process, order.ticket.id, "offered")

    def on_abort(self, process: SimProcess, ticket: TicketId) -> None:
        """An engine lost interest."""
        key = process.epoch, ticket
        self.deadlines.end(process, ticket)
        if self._states.get(key) == "expected":
            self._states[key] = "aborted"

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """I2: an agent reports that pages are ready, or free: nothing may land in them any more."""
        if not isinstance(event, BlocksQuiescent):
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
                if fate == "expected":
                    self._accepted(process, self._orders[key], event)
            case KVFailed():
                self._transition(key, {"expected", "aborted"}, "failed", name)
                self.failures.append((process.name, event))
            case BlocksQuiescent():
                self._transition(key, {"failed", "aborted"}, "over", name)
            case KVExported() | ExportReleased() | ImportRevoked():
                self._on_export_event(key, event)
            case KVSent() | SendFailed():
                self._transition(key, {"offered"}, "sent", name)
                if isinstance(event, SendFailed):
                    self.failures.append((process.name, event))
            case _:
                assert_never(event)

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
        is_held = fate == "offered" and self.tickets[ticket].mode == "pull"
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
        """I1: what landed was computed by the life that the ticket names, and held by it."""
        if self.leases.is_read_late(order.ticket.id):
            name = order.ticket.id.hex()[:6]
            self._fail("I1", f"{process.name}: {name}: what was read after its lease is consumed")
        if order.ticket.mode == "pool":
            self.pooling.check_landed(process, order, landed)
            return
        imported = landed.imported
        expected = {self.incarnations[order.ticket.prefill.epoch]}
        size, table = process.plan.block_size, order.blocks
        first = table.first * size
        blocks = [*imported, *table.blocks.tolist()[len(imported) :]]
        self.exports.on_read(process, blocks)
        for layer in range(NUM_LAYERS):
            incarnations = process.pages.incarnations(
                layer, blocks, order.start - first, order.num_tokens - first
            )
            if incarnations != expected:
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
