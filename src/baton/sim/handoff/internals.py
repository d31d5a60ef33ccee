"""What the checker sees of the production code: private state, which no other module reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.handoff.grants import incarnation_of
from baton.handoff.kv_views import Holder, RegisteredView
from baton.handoff.pool_mode import side_entries
from baton.handoff.session.send import SendPhase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import Ticket
    from baton.engines.transformers.loop import EngineLoop
    from baton.engines.transformers.pinned_blocks import PinnedBlocks
    from baton.engines.transformers.scheduler import Scheduler
    from baton.handoff.agent import HandoffAgent
    from baton.handoff.dispatcher import HandoffDispatcher
    from baton.handoff.messages import Message
    from baton.handoff.peers import Peer
    from baton.handoff.pool_mode.store_handoff import StoreHandoff
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.blocks import BlockState
    from baton.sim.handoff.process import SimProcess
    from baton.store.interface import EntryName


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that is still held: its name, and how many of it."""

    what: str
    num: int


def find_leftovers(
    handoffs: HandoffDispatcher, loop: EngineLoop, scheduler: Scheduler
) -> list[Leftover]:
    """What a worker still holds for handoffs; tombstones are only bounded.

    But for early grants, and for what it has exported.
    """
    agent = handoffs.agent
    receiving, sending, pinned_blocks = (
        agent.loop.receiving,
        agent.loop.sending,
        scheduler.pinned_blocks,
    )
    pool, staging = scheduler.pool, [f.staging_pool for f in agent.loop._views if f.staging_pool]
    counts = {
        "sessions that receive": receiving.num_sessions,
        "sessions that send": sending.num_sessions,
        "writes of the sender": len(sending.writes),
        "reads of the receiver": len(receiving._reads.pending),
        "sequences": len(loop._sequences),
        "tickets that are renewed": len(receiving._lease_renewer._queued),
        "sequences that wait for KV": len(pinned_blocks._incoming),
        "quarantined tickets": len(pinned_blocks._quarantined),
        "orders to keep a prompt's beginning": len(scheduler.kept_blocks._kept),
        "lookups and loads": loop._prefixes.num_under_way,
        "sequences exported to a peer": len(pinned_blocks._sending),
        "blocks": pool.num_blocks - pool.num_free - _count_exported(scheduler),
        "store writes and reads": _count_store_transfers(handoffs.store),
        "tickets of mode pool": len(handoffs._through_store),
        "imports in use": len(agent.loop.importer.table._exporter_of),
        "sequences that import": len(scheduler.shared_blocks._importers),
        "staging pages": sum(len(held) for pages in staging for held in pages._held.values()),
        "handoffs that wait for staging pages": sum(pages.num_waiting for pages in staging),
    }
    return [Leftover(what, num) for what, num in counts.items() if num]


def _count_store_transfers(store: StoreHandoff | None) -> int:
    if store is None:
        return 0
    prefixes = store.prefixes
    num_prefixes = len(prefixes._loads) + len(prefixes._keeps)
    return len(store._writes) + len(store._reads) + num_prefixes


def find_exported(agent: HandoffAgent, scheduler: Scheduler) -> list[Leftover]:
    """What a worker has exported and not had released."""
    num_exports, num_blocks = len(agent.loop.exporter.table._exports), _count_exported(scheduler)
    found = Leftover("exports", num_exports), Leftover("blocks that are exported", num_blocks)
    return [each for each in found if each.num]


def _count_exported(scheduler: Scheduler) -> int:
    """Blocks that are somebody's only because they are exported."""
    exported = [set(blocks) for blocks in scheduler.shared_blocks._exported.values()]
    return len(set().union(*exported))


def count_early_grants(agent: HandoffAgent) -> int:
    """Grants for requests that have not come."""
    return len(agent.loop.sending._early)


def count_tombstones(agent: HandoffAgent) -> int:
    """Tickets remembered as dead, by sender and receiver."""
    return len(agent.loop.sending._tombstones._tombstones) + len(
        agent.loop.receiving._aborted._tombstones
    )


def count_links(agent: HandoffAgent) -> int:
    """Links to peers."""
    return len(agent.loop._peers._peers)


def state_of(scheduler: Scheduler, block: int) -> BlockState:
    """The state of one block of the engine's."""
    return scheduler.pool._ledger.state(block)


def incoming_blocks(pinned_blocks: PinnedBlocks, ticket: TicketId) -> tuple[int, ...]:
    """The blocks into which a ticket's KV may be stored."""
    if ticket in pinned_blocks._incoming:
        return pinned_blocks._incoming[ticket].blocks.blocks
    if ticket in pinned_blocks._quarantined:
        return pinned_blocks._quarantined[ticket].blocks
    return ()


def outgoing_blocks(pinned_blocks: PinnedBlocks, ticket: TicketId) -> list[int]:
    """The blocks that are held for a ticket's reader."""
    sequence = pinned_blocks._sending.get(ticket)
    return [] if sequence is None else sequence.blocks


def kept_blocks(scheduler: Scheduler) -> set[int]:
    """The blocks that are held to be copied into the store."""
    return {block for kept in scheduler.kept_blocks._kept.values() for block in kept.blocks}


def is_ending(agent: HandoffAgent, ticket: TicketId) -> bool:
    """Whether a handoff out of a worker only waits for its own writes, or is over."""
    outgoing = agent.loop.sending._outgoing.get(ticket)
    return outgoing is None or outgoing.session.phase in {SendPhase.ENDING, SendPhase.ENDED}


def marker_name(ticket: TicketId) -> EntryName:
    """The entry in which a prefill worker reports that it is done with a ticket."""
    return side_entries._marker_name(ticket, 0)


def find_reader(process: SimProcess, region: RegionHandle, pages: set[int]) -> TicketId | None:
    """For which ticket a worker reads into these pages of its own."""
    pinned_blocks, view = process.scheduler.pinned_blocks, process.view
    for ticket in (*pinned_blocks._incoming, *pinned_blocks._quarantined):
        if region == process.pages.region.handle:
            known = incoming_blocks(pinned_blocks, ticket)
        else:
            known = tuple(staged_pages(view, Holder("receive", ticket)))
        if pages <= set(known):
            return ticket
    return None


def staged_pages(view: RegisteredView, holder: Holder) -> list[int]:
    """The staging pages of one handoff."""
    if view.staging_pool is None or holder not in view.staging_pool._held:
        return []
    pages: list[int] = view.staging_pool._held[holder].tolist()
    return pages


def is_staged_for_some(view: RegisteredView, pages: set[int]) -> bool:
    """Whether each of these staging pages belongs to some handoff that receives."""
    if view.staging_pool is None:
        return False
    held = (h.tolist() for holder, h in view.staging_pool._held.items() if holder.side == "receive")
    return pages <= {page for some in held for page in some}


def is_importing(process: SimProcess, ticket: TicketId) -> bool:
    """Whether a worker may read what was exported for a ticket, by its agent or its engine."""
    table, shared = process.agent.loop.importer.table, process.scheduler.shared_blocks
    return ticket in table._exporter_of or ticket in shared._importers


def find_read_pages(process: SimProcess, exporter: Epoch) -> set[int]:
    """The pages of an exporter that sequences of this worker attend over."""
    known = process.agent.loop.importer._exporters.get(exporter)
    if known is None or known.mapping is None:
        return set()
    mapping = known.mapping
    blocks = {
        block
        for sequence in process.scheduler.shared_blocks._importers.values()
        for block in sequence.blocks
    }
    return {block - mapping.first for block in blocks if mapping.first <= block < mapping.stop}


def find_unmapped(process: SimProcess, blocks: Iterable[int]) -> int | None:
    """One of these blocks that is neither an own one nor in an mapping; None if there is none."""
    peer_mappings, num_own = process.pages.peer_mappings, process.plan.num_blocks
    mapped = [] if peer_mappings is None else peer_mappings._attached
    for block in blocks:
        if block >= num_own and not any(each.first <= block < each.stop for each in mapped):
            return block
    return None


def count_peer_mappings(process: SimProcess) -> int:
    """Peers whose pages are mapped."""
    return 0 if process.pages.peer_mappings is None else len(process.pages.peer_mappings._attached)


def check_state(agent: HandoffAgent) -> None:
    """Have every pure structure check itself.

    Raises:
        AssertionError: one of them contradicts itself.
    """
    for incoming in agent.loop.receiving._incoming.values():
        incoming.session.check_invariants()
    for outgoing in agent.loop.sending._outgoing.values():
        outgoing.session.check_invariants()
    agent.loop.exporter.table.check_invariants()
    agent.loop.importer.table.check_invariants()
    for view in agent.loop._views:
        if view.staging_pool is not None:
            view.staging_pool.check_invariants()


def peers_of(agent: HandoffAgent) -> list[Peer]:
    """The peers that have sent their hello."""
    return [peer for peer in agent.loop._peers if peer.hello is not None]


def describe_ticket(agent: HandoffAgent, named: Ticket) -> tuple[object, ...]:
    """All that an agent knows of a ticket, so that two moments can be compared."""
    ticket = named.id
    incoming = agent.loop.receiving._incoming.get(ticket)
    outgoing = agent.loop.sending._outgoing.get(ticket)
    receive = (
        ()
        if incoming is None
        else (
            incoming.session.phase,
            incoming.session.coverage.num_missing,
            incoming.peer,
            incoming.session.lease_holder._until,
            incoming.session.deadline,
        )
    )
    send = (
        ()
        if outgoing is None
        else (
            outgoing.session.phase,
            outgoing.granted,
            sum(outgoing.session._sent),
            outgoing.session.lease._until,
        )
    )
    return (
        receive,
        send,
        agent.loop.sending._early.find(ticket, named.decode),
        ticket in agent.loop.receiving._lease_renewer._queued,
        agent.loop.exporter.table._exports.get(ticket) is None,
        agent.loop.importer.table._exporter_of.get(ticket),
        [
            tombstones._tombstones.get((ticket, by))
            for tombstones in (agent.loop.sending._tombstones, agent.loop.receiving._aborted)
            for by in (None, incarnation_of(named.prefill), incarnation_of(named.decode))
        ],
    )


def send(agent: HandoffAgent, peer: Peer, message: Message) -> None:
    """Have an agent send a message that it would not."""
    agent.loop._peers.send(peer, message)
