"""What the checker sees of the production code: its books, which nobody else may open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.handoff.pooling import note
from baton.handoff.pooling.desk import PoolDesk
from baton.handoff.session.send import SendPhase
from baton.handoff.staging import Holder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.authority.ticket import Ticket
    from baton.engines.transformers.custody import Custody
    from baton.engines.transformers.loop import EngineLoop
    from baton.engines.transformers.scheduler import Scheduler
    from baton.handoff.agent import HandoffAgent
    from baton.handoff.footprint import ServedFace
    from baton.handoff.messages import Message
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.blocks import BlockState
    from baton.sim.handoff.process import SimProcess
    from baton.store.interface import EntryName


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that is still held: its name, and how many of it."""

    what: str
    num: int


def find_leftovers(agent: HandoffAgent, loop: EngineLoop, scheduler: Scheduler) -> list[Leftover]:
    """What a worker still holds for handoffs; graves are only bounded.

    But for early grants, and for what it has lent.
    """
    receiving, sending, custody = agent._receiving, agent._sending, scheduler.custody
    pool, staging = scheduler.pool, [f.staging_pages for f in agent._faces if f.staging_pages]
    counts = {
        "sessions that receive": receiving.num_sessions,
        "sessions that send": sending.num_sessions,
        "writes of the sending desk": len(sending._writes),
        "reads of the receiving desk": len(receiving._reader._pending),
        "sequences": len(loop._sequences),
        "tickets that are renewed": len(receiving._renewals._queued),
        "sequences that wait for KV": len(custody._incoming),
        "quarantined tickets": len(custody._quarantined),
        "sequences lent to a peer": len(custody._outgoing),
        "blocks": pool.num_blocks - pool.num_free - _count_lent(scheduler),
        "deposits and collections": _count_pooled(agent),
        "loans in use": len(agent._borrowing.book._lender_of),
        "sequences that borrow": len(scheduler.loans._borrowers),
        "staging pages": sum(len(held) for pages in staging for held in pages._held.values()),
        "handoffs that wait for staging pages": sum(pages.num_waiting for pages in staging),
    }
    return [Leftover(what, num) for what, num in counts.items() if num]


def _count_pooled(agent: HandoffAgent) -> int:
    desk = agent._pool
    return len(desk._deposits) + len(desk._collections) if isinstance(desk, PoolDesk) else 0


def find_lent(agent: HandoffAgent, scheduler: Scheduler) -> list[Leftover]:
    """What a worker has lent and not been given back."""
    num_loans, num_blocks = len(agent._lending.book._loans), _count_lent(scheduler)
    found = Leftover("loans", num_loans), Leftover("blocks that are lent", num_blocks)
    return [each for each in found if each.num]


def _count_lent(scheduler: Scheduler) -> int:
    """Blocks that are somebody's only because they are lent."""
    lent = [set(blocks) for blocks in scheduler.loans._lent.values()]
    return len(set().union(*lent))


def count_early_grants(agent: HandoffAgent) -> int:
    """Grants for requests that have not come."""
    return len(agent._sending._early._grants)


def count_graves(agent: HandoffAgent) -> int:
    """Tickets remembered as dead, on both desks."""
    return len(agent._sending._dead._graves) + len(agent._receiving._given_up._graves)


def count_links(agent: HandoffAgent) -> int:
    """Links to peers."""
    return len(agent._peers._peers)


def state_of(scheduler: Scheduler, block: int) -> BlockState:
    """The state of one block of the engine's."""
    return scheduler.pool._ledger.state(block)


def incoming_blocks(custody: Custody, ticket: TicketId) -> tuple[int, ...]:
    """The blocks into which a ticket's KV may be stored."""
    if ticket in custody._incoming:
        return custody._incoming[ticket].blocks.blocks
    if ticket in custody._quarantined:
        return custody._quarantined[ticket].blocks
    return ()


def outgoing_blocks(custody: Custody, ticket: TicketId) -> list[int]:
    """The blocks that are held for a ticket's reader."""
    sequence = custody._outgoing.get(ticket)
    return [] if sequence is None else sequence.blocks


def is_ending(agent: HandoffAgent, ticket: TicketId) -> bool:
    """Whether a handoff out of a worker only waits for its own writes, or is over."""
    outgoing = agent._sending._outgoing.get(ticket)
    return outgoing is None or outgoing.session.phase in {SendPhase.ENDING, SendPhase.ENDED}


def name_note(ticket: TicketId) -> EntryName:
    """The entry in which a prefill worker says that it is done with a ticket."""
    return note._name(ticket, 0)


def find_reader(process: SimProcess, region: RegionHandle, pages: set[int]) -> TicketId | None:
    """For which ticket a worker reads into these pages of its own."""
    custody, face = process.scheduler.custody, process.face
    for ticket in (*custody._incoming, *custody._quarantined):
        if region == process.pages.region.handle:
            known = incoming_blocks(custody, ticket)
        else:
            known = tuple(staged_pages(face, Holder("receive", ticket)))
        if pages <= set(known):
            return ticket
    return None


def staged_pages(face: ServedFace, holder: Holder) -> list[int]:
    """The staging pages of one handoff."""
    if face.staging_pages is None or holder not in face.staging_pages._held:
        return []
    pages: list[int] = face.staging_pages._held[holder].tolist()
    return pages


def is_staged_for_some(face: ServedFace, pages: set[int]) -> bool:
    """Whether each of these staging pages belongs to some handoff that receives."""
    if face.staging_pages is None:
        return False
    held = (
        h.tolist() for holder, h in face.staging_pages._held.items() if holder.side == "receive"
    )
    return pages <= {page for some in held for page in some}


def is_borrowing(process: SimProcess, ticket: TicketId) -> bool:
    """Whether a worker may read what was lent for a ticket, as its agent or its engine sees it."""
    book, loans = process.agent._borrowing.book, process.scheduler.loans
    return ticket in book._lender_of or ticket in loans._borrowers


def find_owed(process: SimProcess, lender: Epoch) -> int:
    """Returns that a lender has not heard of, or not said that it has."""
    account = process.agent._borrowing.book._account(lender)
    return len(account.owed) + len(account.said)


def find_read_pages(process: SimProcess, lender: Epoch) -> set[int]:
    """The pages of a lender's that sequences of this worker attend over."""
    known = process.agent._borrowing._lenders.get(lender)
    if known is None or known.annex is None:
        return set()
    annex = known.annex
    blocks = {
        block
        for sequence in process.scheduler.loans._borrowers.values()
        for block in sequence.blocks
    }
    return {block - annex.first for block in blocks if annex.first <= block < annex.stop}


def find_unmapped(process: SimProcess, blocks: Iterable[int]) -> int | None:
    """One of these blocks that is neither an own one nor in an annex; None if there is none."""
    annexes, num_own = process.pages.annexes, process.plan.num_blocks
    mapped = [] if annexes is None else annexes._attached
    for block in blocks:
        if block >= num_own and not any(each.first <= block < each.stop for each in mapped):
            return block
    return None


def count_annexes(process: SimProcess) -> int:
    """Peers whose pages are mapped."""
    return 0 if process.pages.annexes is None else len(process.pages.annexes._attached)


def check_books(agent: HandoffAgent) -> None:
    """Have every pure structure check itself.

    Raises:
        AssertionError: one of them contradicts itself.
    """
    for incoming in agent._receiving._incoming.values():
        incoming.session.check_invariants()
    for outgoing in agent._sending._outgoing.values():
        outgoing.session.check_invariants()
    agent._lending.book.check_invariants()
    agent._borrowing.book.check_invariants()
    for face in agent._faces:
        if face.staging_pages is not None:
            face.staging_pages.check_invariants()


def peers_of(agent: HandoffAgent) -> list[Peer]:
    """The peers that have introduced themselves."""
    return [peer for peer in agent._peers if peer.hello is not None]


def describe_ticket(agent: HandoffAgent, named: Ticket) -> tuple[object, ...]:
    """All that an agent knows of a ticket, so that two moments can be compared."""
    ticket = named.id
    incoming = agent._receiving._incoming.get(ticket)
    outgoing = agent._sending._outgoing.get(ticket)
    receive = (
        ()
        if incoming is None
        else (
            incoming.session.phase,
            incoming.session.coverage.num_missing,
            incoming.peer,
            incoming.session.tenancy._until,
            incoming.session.deadline,
        )
    )
    send = (
        ()
        if outgoing is None
        else (
            outgoing.session.phase,
            outgoing.granted,
            int(outgoing.session._sent.sum()),
            outgoing.session.lease._until,
        )
    )
    return (
        receive,
        send,
        agent._sending._early._grants.get(ticket),
        ticket in agent._receiving._renewals._queued,
        agent._lending.book._loans.get(ticket) is None,
        agent._borrowing.book._lender_of.get(ticket),
        [
            graves._graves.get((ticket, by))
            for graves in (agent._sending._dead, agent._receiving._given_up)
            for by in (None, named.prefill.epoch, named.decode.epoch)
        ],
    )


def say(agent: HandoffAgent, peer: Peer, message: Message) -> None:
    """Have an agent say something that it would not."""
    agent._peers.say(peer, message)
