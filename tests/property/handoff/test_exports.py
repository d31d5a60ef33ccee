"""A lender and a borrower over links that break: no page is reused while somebody may read it.

The world owns what neither side can see: whose pages are held, and who reads them. A link loses
what was on its way when it breaks, and its two ends hear of that at different times; the borrower
dials another meanwhile. The borrower's process may be killed, which only proof of its end tells.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from baton.clock import Instant
from baton.handoff.interface import KVFailed, KVLanded, SampledToken, SendFailed
from baton.handoff.messages import (
    BlocksExported,
    ExportRefused,
    Failed,
    FallbackToWrite,
    Finished,
    Grant,
    Message,
    Release,
    ReleaseAck,
    Revoke,
)
from baton.handoff.reference.exports import REVOKE_INTERVAL_S, ExportLimits, ExportTable
from baton.handoff.reference.imports import ImportTable
from baton.handoff.session.actions import (
    CloseWriteGrant,
    Emit,
    ExportBlocks,
    ImportBlocks,
    OpenWriteGrant,
    ReceiveAction,
    SendAction,
    SendMessage,
    TransferPlan,
    WriteLayers,
)
from baton.handoff.session.receive import ReceiveSession
from baton.handoff.session.send import SendSession
from baton.ids import Epoch, TicketId, WorkerId
from tests.examples import examples
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

BORROWER, LENDER = (WorkerId("d"), Epoch("ed")), Epoch("ep")
NUM_TOKENS = 24
NUM_BLOCKS = 3
DEADLINE = Instant(100.0)
FIRST = SampledToken(7)


@dataclass(eq=False)
class Link:
    """One connection. A side that knows of its end neither says nor hears anything over it."""

    to_lender: list[Message] = field(default_factory=list)
    to_borrower: list[Message] = field(default_factory=list)
    borrower_knows_end: bool = False
    lender_knows_end: bool = False
    is_broken: bool = False

    def breaks(self) -> None:
        self.is_broken = True
        self.to_lender.clear()
        self.to_borrower.clear()


class LoanWorld(RuleBasedStateMachine):
    """One lender, one life of a borrower, some handoffs."""

    @initialize(in_total=st.integers(1, 12), per_importer=st.integers(1, 12))
    def begin(self, in_total: int, per_importer: int) -> None:
        self.loans = ExportTable(ExportLimits(per_importer, in_total))
        self.borrowings = ImportTable()
        self.now = Instant(0.0)
        self.links: list[Link] = [Link()]
        self.senders: dict[TicketId, SendSession] = {}
        self.granted_over: dict[TicketId, Link] = {}
        self.receivers: dict[TicketId, ReceiveSession] = {}
        self.asked_over: dict[TicketId, Link] = {}
        self.held: set[TicketId] = set()  # pages that the lender's engine does not reuse
        self.reading: set[TicketId] = set()  # pages that the borrower's engine reads
        self.revoked: Counter[TicketId] = Counter()
        self.is_killed = False
        self.num_requests = 0
        self.seen: Counter[str] = Counter()

    @property
    def link(self) -> Link | None:
        """The borrower's own."""
        return next((each for each in self.links if not each.borrower_knows_end), None)

    # The borrower's side, as its desks do it.

    def perform_receiver(self, session: ReceiveSession, actions: list[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(message):
                    self.say_to_lender(message, self.asked_over[session.ticket])
                case ImportBlocks():
                    self.borrowings.add(session.ticket, LENDER)
                    self.perform_receiver(session, session.imported((40, 41)))
                case Emit(KVLanded(ticket, _, imported=imported)):
                    if imported:
                        self.reading.add(ticket)
                        self.seen["read"] += 1
                case Emit(KVFailed()) | Emit() | OpenWriteGrant():
                    pass
                case CloseWriteGrant():
                    self.perform_receiver(session, session.grant_quiescent())
                case _:
                    raise AssertionError(f"{action} from a receiver")
        if session.over and self.receivers.pop(session.ticket, None) and session.may_hold_export:
            self.borrowings.queue_release(session.ticket, LENDER)
            self.tell()

    def say_to_lender(self, message: Message, link: Link) -> None:
        if not (link.is_broken or link.borrower_knows_end):
            link.to_lender.append(message)

    def tell(self) -> None:
        link = self.link
        if link is not None:
            while tickets := self.borrowings.take_pending(LENDER, 2):
                self.say_to_lender(Release(tuple(tickets)), link)

    # The lender's side.

    def perform_sender(self, session: SendSession, actions: list[SendAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(message):
                    link = self.granted_over.get(session.ticket)
                    if link is not None:
                        self.say_to_borrower(message, link)
                case ExportBlocks(start, token):
                    assert start == 0
                    self.loans.export(session.ticket, DEADLINE)
                    link = self.granted_over[session.ticket]
                    self.say_to_borrower(BlocksExported(session.ticket, 0, bytes(24)), link)
                    self.say_to_borrower(Finished(session.ticket, token, "", "", {}), link)
                    self.seen["lent"] += 1
                case Emit(SendFailed(ticket)):
                    self.free(ticket)
                case WriteLayers():
                    pass  # what is written is no matter of this test
                case _:
                    raise AssertionError(f"{action} from a sender")
        if session.over and self.senders.pop(session.ticket, None) is not None:
            self.loans.forget(session.ticket)

    def say_to_borrower(self, message: Message, link: Link) -> None:
        if not (link.is_broken or link.lender_knows_end or self.is_killed):
            link.to_borrower.append(message)

    def free(self, ticket: TicketId) -> None:
        assert ticket in self.held, "freed twice"
        assert ticket not in self.reading, "a page is reused while somebody reads it"
        self.held.discard(ticket)

    # What happens.

    @precondition(lambda self: self.link is not None and not self.is_killed)
    @rule(is_early=st.booleans())
    def a_request(self, is_early: bool) -> None:
        self.num_requests += 1
        ticket = replace(make_ticket(), id=TicketId(self.num_requests.to_bytes(16, "big")))
        if is_early:
            self.offer(ticket.id, ticket)
        session = ReceiveSession(
            receive_order(ticket, start=0, num_tokens=NUM_TOKENS),
            sealed_ticket="sealed",
            num_layers=2,
            deadline=DEADLINE,
        )
        self.receivers[ticket.id], self.asked_over[ticket.id] = session, self.link
        self.perform_receiver(
            session, session.begin(TransferPlan("NONE", session.order.blocks, staged=False))
        )
        if not is_early:
            self.offer(ticket.id, ticket)

    def offer(self, name: TicketId, ticket: object) -> None:
        self.senders[name] = SendSession(
            send_order(ticket, num_tokens=NUM_TOKENS), num_layers=2, deadline=DEADLINE
        )
        self.held.add(name)

    @precondition(lambda self: self.senders)
    @rule(data=st.data())
    def prefill_is_done(self, data: st.DataObject) -> None:
        session = self.senders[data.draw(st.sampled_from(list(self.senders)))]
        for layer in range(2):
            self.perform_sender(session, session.layers_ready([layer], NUM_TOKENS))
        self.perform_sender(session, session.finish(FIRST))

    @precondition(lambda self: any(each.to_lender for each in self.links))
    @rule(data=st.data())
    def the_lender_hears(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([each for each in self.links if each.to_lender]))
        self.lender_hears(link)

    def lender_hears(self, link: Link) -> None:
        message = link.to_lender.pop(0)
        match message:
            case Grant(id=name):
                session = self.senders.get(name)
                if session is None:
                    return
                self.granted_over[name] = link
                self.perform_sender(session, session.granted(message))
                if self.loans.reserve(name, BORROWER, NUM_BLOCKS) is None:
                    self.perform_sender(session, session.begin(1))
                else:
                    self.seen["unlent"] += 1
                    self.say_to_borrower(ExportRefused(name, "enough"), link)
            case Failed(name) | FallbackToWrite(name):
                self.withdraw(name, link)
            case Release(names):
                for name in names:
                    self.withdraw(name, link)
                for name in self.loans.released(BORROWER, names):
                    self.free(name)
                self.say_to_borrower(ReleaseAck(names), link)
            case _:
                raise AssertionError(f"the lender was told {message}")

    def withdraw(self, name: TicketId, link: Link) -> None:
        """What would have been written ends here, too: it is no matter of this test."""
        session = self.senders.get(name)
        if session is not None:
            self.perform_sender(session, session.peer_failed("told so", stage="decode"))

    @precondition(lambda self: self.link and self.link.to_borrower and not self.is_killed)
    @rule()
    def the_borrower_hears(self) -> None:
        link = self.link
        message = link.to_borrower.pop(0)
        match message:
            case ReleaseAck(names):
                self.borrowings.acked(LENDER, names)
                return
            case Revoke(names):
                self.revoked.update(self.borrowings.revoked(LENDER, names))
                return
            case _:
                session = self.receivers.get(message.ticket)
        if session is None:
            return
        match message:
            case BlocksExported():
                self.perform_receiver(session, session.exported(message))
            case ExportRefused(_, reason):
                self.perform_receiver(session, session.export_refused(reason))
            case Finished():
                self.perform_receiver(session, session.finished(message))
            case Failed(_, reason):
                self.perform_receiver(session, session.fail(reason, stage="prefill"))
            case _:
                raise AssertionError(f"the borrower was told {message}")

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def an_answer_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reading)))
        self.reading.discard(ticket)
        assert self.borrowings.release(ticket) == LENDER
        self.tell()

    @precondition(lambda self: self.receivers)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        session = self.receivers[data.draw(st.sampled_from(list(self.receivers)))]
        self.perform_receiver(session, session.abort("the client left"))

    @precondition(lambda self: self.senders)
    @rule(data=st.data())
    def prefill_gives_up(self, data: st.DataObject) -> None:
        session = self.senders[data.draw(st.sampled_from(list(self.senders)))]
        self.perform_sender(session, session.fail("cancelled", stage="abort"))

    @rule(seconds=st.sampled_from([0.0, 0.5, REVOKE_INTERVAL_S, 60.0]), wanted=st.booleans())
    def time_passes(self, seconds: float, wanted: bool) -> None:
        self.now = Instant(self.now + seconds)
        for session in list(self.receivers.values()):
            self.perform_receiver(session, session.expire(self.now))
        for session in list(self.senders.values()):
            self.perform_sender(session, session.expire(self.now))
        due = self.loans.revoke(self.now) if wanted else self.loans.tick(self.now)
        for names in due.values():
            for link in self.links:
                self.say_to_borrower(Revoke(tuple(names)), link)

    @precondition(lambda self: self.links and not self.is_killed)
    @rule(data=st.data())
    def a_link_breaks(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.links)).breaks()

    @precondition(lambda self: self.link and self.link.is_broken and not self.is_killed)
    @rule()
    def the_borrower_knows(self) -> None:
        link = self.link
        link.borrower_knows_end = True
        for session in [s for t, s in self.receivers.items() if self.asked_over[t] is link]:
            self.perform_receiver(session, session.fail("the link broke", stage="link"))
        self.borrowings.link_lost(LENDER)

    @precondition(lambda self: any(x.is_broken and not x.lender_knows_end for x in self.links))
    @rule()
    def the_lender_knows(self) -> None:
        for link in self.links:
            if link.is_broken:
                link.lender_knows_end = True
                for session in [
                    s for t, s in self.senders.items() if self.granted_over.get(t) is link
                ]:
                    self.perform_sender(session, session.peer_failed("it broke", stage="link"))

    @precondition(lambda self: self.link is None and not self.is_killed)
    @rule()
    def the_borrower_dials_again(self) -> None:
        self.links.append(Link())
        self.tell()

    @rule()
    def the_borrower_is_killed(self) -> None:
        if not self.is_killed and self.reading:
            self.is_killed = True
            for link in self.links:
                link.breaks()
            self.receivers.clear()
            self.reading.clear()
            self.seen["killed"] += 1

    @precondition(lambda self: self.is_killed)
    @rule()
    def its_end_is_proved(self) -> None:
        for ticket in self.loans.importer_died(BORROWER):
            self.free(ticket)

    @invariant()
    def nothing_is_read_that_may_change(self) -> None:
        if hasattr(self, "loans"):
            self.loans.check_invariants()
            self.borrowings.check_invariants()
            assert self.reading <= self.held
            assert max(self.revoked.values(), default=0) <= 1

    def teardown(self) -> None:
        """However it went: once all answers have ended, all pages are the lender's again."""
        if not hasattr(self, "loans"):
            return
        for session in list(self.receivers.values()):
            self.perform_receiver(session, session.abort("the end"))
        for ticket in sorted(self.reading):
            self.reading.discard(ticket)
            self.borrowings.release(ticket)
        if self.is_killed:
            self.its_end_is_proved()
        else:
            while self.link is not None and self.link.is_broken:
                self.the_borrower_knows()
            if self.link is None:
                self.the_borrower_dials_again()
            self.tell()
            for link in self.links:
                while link.to_lender:
                    self.lender_hears(link)
            while self.link.to_borrower:
                self.the_borrower_hears()
            assert not self.borrowings.exporters
        for session in list(self.senders.values()):
            self.perform_sender(session, session.fail("the end", stage="stop"))
        assert not self.held, "pages are held for nobody"
        assert self.loans.num_blocks == 0
        assert bool(self.seen["read"]) <= bool(self.seen["lent"])


LoanWorld.TestCase.settings = settings(
    max_examples=examples(75),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLoanWorld = LoanWorld.TestCase
