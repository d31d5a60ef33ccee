"""Both sessions of one handoff against an adversarial network, step by step.

The world below owns what the sessions must not lose track of: who may still write into the
decode worker's pages, and who holds the prefill worker's. Faults are counted, so that a run that
claims to have survived one can be seen to have met it. Either side may move the bytes, into the
engine's own blocks or into staging pages. There are three transports: what one fails to carry
another takes over, and what the first one posted may land late, so its pages are watched: a store
into pages that were verified, or given back, is what must never happen.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.errors import ProtocolError
from baton.handoff.interface import (
    BlocksQuiescent,
    HandoffEvent,
    KVFailed,
    KVLanded,
    KVSent,
    SampledToken,
    SendFailed,
)
from baton.handoff.messages import (
    Available,
    EncodingRefused,
    ExcludeTransport,
    Failed,
    FallbackToWrite,
    Finished,
    Grant,
    Notification,
    ReceivingCosts,
    RetransmitRequest,
    TransferAck,
    TransferOp,
    TransportFailed,
)
from baton.handoff.session.actions import (
    AnnounceReadable,
    CloseWriteGrant,
    Emit,
    Fence,
    GatherPages,
    OpenWriteGrant,
    ReadPages,
    ReceiveAction,
    SendAction,
    SendFinished,
    SendMessage,
    SendTransferAck,
    TransferHandle,
    TransferPlan,
    WriteLayers,
)
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import LayersWritten, SendPhase, SendSession
from baton.transfer.interface import TransferId
from tests.examples import examples
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

NUM_LAYERS = 3
GRANTED_ENCODING = "int8/1"
COSTS = ReceivingCosts(1e-9, {GRANTED_ENCODING: 1e-10, "fp8/1": 1e-10})
KINDS = ("first", "second", "third")
"""Transports. What is posted over `first` may land after it failed: only quiescence tells."""
DEADLINE = Instant(100.0)


class HandoffWorld(RuleBasedStateMachine):
    """One handoff, a lossless but arbitrarily slow link, and a transport that may fail."""

    @initialize(
        num_tokens=st.integers(1, 40),
        start_share=st.floats(0, 0.99),
        ready_share=st.floats(0, 1),
        fault_budget=st.sampled_from([0, 1, 2, 4]),
        may_be_doomed=st.booleans(),
        spreads=st.booleans(),
        op=st.sampled_from(["WRITE", "READ"]),
        staged=st.booleans(),
        on_gpu=st.booleans(),
        copies_late=st.booleans(),
        page_tokens=st.sampled_from([1, 4]),
        first_token=st.sampled_from([None, SampledToken(7)]),
        head_start=st.integers(0, 3),
        is_encoded=st.booleans(),
        wanted=st.sampled_from([None, RAW, "fp8/1"]),
    )
    def begin(
        self,
        num_tokens: int,
        start_share: float,
        ready_share: float,
        fault_budget: int,
        may_be_doomed: bool,
        spreads: bool,
        op: TransferOp,
        staged: bool,
        on_gpu: bool,
        copies_late: bool,
        page_tokens: int,
        first_token: SampledToken | None,
        head_start: int,
        is_encoded: bool,
        wanted: str | None,
    ) -> None:
        self.fault_budget = fault_budget
        staged |= is_encoded
        self.encoding = GRANTED_ENCODING if is_encoded else RAW
        self.wanted, self.was_refused = wanted, False  # in place of what is granted
        self.may_be_doomed, self.spreads = may_be_doomed, spreads
        self.op, self.staged, self.page_tokens = op, staged, page_tokens
        self.copies_late = copies_late
        self.is_gathered = staged or on_gpu  # on a GPU, in place: once it has computed them
        self.gathers: list[tuple[GatherPages, range]] = []  # begun, not done
        self.gathered = [0] * NUM_LAYERS
        self.num_scatters = 0  # begun, not done
        self.first_token = first_token
        ticket = make_ticket()
        self.num_tokens = num_tokens
        self.start = int(num_tokens * start_share)
        num_ready = int(num_tokens * ready_share)
        self.receiver = ReceiveSession(
            receive_order(ticket, start=self.start, num_tokens=num_tokens),
            sealed_ticket="sealed",
            num_layers=NUM_LAYERS,
            deadline=DEADLINE,
        )
        self.sender = SendSession(
            send_order(ticket, num_tokens=num_tokens, num_ready_tokens=num_ready),
            num_layers=NUM_LAYERS,
            deadline=DEADLINE,
        )
        self.computed = [num_ready] * NUM_LAYERS
        self.told: list[HandoffEvent] = []  # by the receiver
        self.sent: list[HandoffEvent] = []  # by the sender
        self.to_sender: list[
            Grant | Failed | TransferAck | RetransmitRequest | ExcludeTransport | FallbackToWrite
        ] = []
        self.to_receiver: list[
            Available | Finished | Failed | TransportFailed | EncodingRefused
        ] = []
        self.heard: list[Available] = []
        self.reads: dict[TransferHandle, Available] = {}  # posted, not ended
        self.writes: dict[TransferHandle, Notification] = {}  # posted, not ended
        self.late: dict[
            TransferHandle, Notification
        ] = {}  # ended for the sender, and may still be stored
        self.lost: list[Notification] = []  # stored, and its notice will not come
        self.fencing: set[str] = set()
        self.closed: set[str] = set()
        self.unreadable: set[str] = set()
        self.preferred = "first"
        self.has_route, self.waits = True, False
        self.is_doomed = False  # something happened that no other transport makes good
        self.landed: set[tuple[int, int]] = set()  # (layer, token)
        self.stored: set[TransferHandle] = set()
        self.grant_state = "never opened"
        self.finished_said = False
        self.num_transfers: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.advance(head_start)

    def advance(self, num_stages: int) -> None:
        """The ordinary first steps, so that faults meet handoffs that are well under way too."""
        if num_stages >= 1:
            self.link_comes_up()
            self.sender_hears()
        if num_stages >= 2:
            self.the_way_is_clear()
            for layer in range(NUM_LAYERS):
                self.compute(layer, self.num_tokens)
        while num_stages >= 3 and self.to_receiver:
            self.hear(0)

    def perform_receiver(self, actions: list[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case OpenWriteGrant():
                    before = "quiescent" if self.was_refused and self.op == "WRITE" else None
                    assert self.grant_state in {"never opened", before}
                    self.grant_state = "open"
                case CloseWriteGrant():
                    assert self.grant_state == "open"
                    self.grant_state = "closed"
                case Fence(kind):
                    assert self.grant_state == "open"
                    assert not any(posted.transport == kind for posted in self.writes)
                    self.closed.add(kind)
                    if kind == "first":
                        self.fencing.add(kind)
                    else:
                        self.perform_receiver(self.receiver.fenced(kind))
                case SendTransferAck():
                    self.to_sender.append(TransferAck(self.receiver.ticket, "", ""))
                case SendMessage(message):
                    self.to_sender.append(message)
                case ReadPages(available):
                    assert self.op == "READ"
                    if not self.unreadable:
                        self.post_read(available)
                case Emit(event):
                    self.told.append(event)
                    if isinstance(event, BlocksQuiescent | KVLanded):
                        assert not self.num_scatters, "a copy into the engine's blocks goes on"
                    if isinstance(event, BlocksQuiescent) and not self.staged:
                        assert self.grant_state in {"never opened", "quiescent"}
                        assert not self.late, "quiescent, and a late write may still be stored"
                        assert not self.reads, "quiescent, and a read may still land"
                    if isinstance(event, KVFailed):
                        assert self.grant_state != "closed" or self.encoding != RAW, (
                            "told only after its blocks may be quiet"
                        )
                    if isinstance(event, KVLanded):
                        expected = {
                            (layer, token)
                            for layer in range(NUM_LAYERS)
                            for token in range(self.start, self.num_tokens)
                        }
                        assert self.landed == expected
                        assert not self.fencing, "a late write may still be stored in ready pages"
                        assert not self.late, "a late write may still be stored in ready pages"
                        for posted in self.writes:  # only its end is not known to the sender yet
                            assert posted in self.stored, "a write may land in ready pages"
                        assert not self.reads, "a read may still land in ready pages"
                        assert event.first_token == self.first_token
                case _:
                    pytest.fail(f"{action} from a receiver")

    def perform_sender(self, actions: list[SendAction]) -> None:
        for action in actions:
            match action:
                case GatherPages(layer, start, stop, num_layers):
                    assert self.is_gathered
                    for each in range(layer, layer + num_layers):
                        assert max(self.start, self.gathered[each]) <= start, "gathered twice"
                        self.check_pages(each, start, stop)
                    middle = layer + num_layers // 2  # in two parts
                    for layers in (range(layer, middle), range(middle, layer + num_layers)):
                        if layers:
                            self.sender.gathering()
                            self.gathers.append((action, layers))
                            if not self.copies_late:
                                self.a_gather_ends()
                case WriteLayers(layer, start, stop, num_layers):
                    if self.sender.phase not in {SendPhase.SENDING, SendPhase.DRAINING}:
                        continue
                    if not self.has_route:
                        self.waits = True
                        continue
                    layers = range(layer, layer + num_layers)
                    for each in layers:
                        self.check_range(each, start, stop)
                    posted = self.give_id(self.pick(self.sender.excluded))
                    self.writes[posted] = Notification(layer, start, stop, b"", num_layers)
                    self.perform_sender(
                        self.sender.submitted(posted, LayersWritten(layers, start, stop))
                    )
                case AnnounceReadable(layer, start, stop, num_layers):
                    if self.sender.phase is not SendPhase.SENDING:
                        continue
                    assert not self.sender.is_written, "it was told to write"
                    layers = range(layer, layer + num_layers)
                    for each in layers:
                        self.check_range(each, start, stop)
                    self.to_receiver.append(
                        Available(self.sender.ticket, layer, start, stop, 0, b"", b"", num_layers)
                    )
                    self.perform_sender(self.sender.announced(layers, stop))
                case SendFinished(token):
                    assert not self.finished_said
                    self.finished_said = True
                    self.to_receiver.append(
                        Finished(self.sender.ticket, token, "shared", "shared", {})
                    )
                case SendMessage(message):
                    assert isinstance(message, Failed | TransportFailed)
                    self.to_receiver.append(message)
                case Emit(event):
                    self.sent.append(event)
                    assert not self.writes, "source pages given back under a write"
                    assert not self.gathers, "source pages given back under a copy"
                    if isinstance(event, KVSent):
                        assert not self.reads, "source pages given back under a read"
                        assert any(isinstance(event, KVLanded) for event in self.told)
                case _:
                    pytest.fail(f"{action} from a sender")

    def check_pages(self, layer: int, start: int, stop: int) -> None:
        assert self.start <= start < stop <= self.computed[layer]
        assert stop == self.num_tokens or stop % self.page_tokens == 0

    def check_range(self, layer: int, start: int, stop: int) -> None:
        self.check_pages(layer, start, stop)
        assert not self.is_gathered or stop <= self.gathered[layer], "sent before it was gathered"
        is_again = bool(self.sender.excluded)
        assert is_again or not self.finished_said, "more after Finished"

    def pick(self, avoid: set[str]) -> str:
        """The preferred transport (or each in turn), or the next one that did not fail."""
        if self.spreads:
            turn = self.num_transfers.total() % len(KINDS)
            self.preferred = KINDS[turn]
        return next(kind for kind in (self.preferred, *KINDS) if kind not in avoid)

    def give_id(self, kind: str) -> TransferHandle:
        self.num_transfers[kind] += 1  # two transports give the same ids
        return TransferHandle(kind, TransferId(self.num_transfers[kind]))

    def post_read(self, available: Available) -> None:
        posted = self.give_id(self.pick(self.unreadable))
        self.reads[posted] = available
        self.receiver.reading(posted)

    @rule()
    def no_route_is_up_for_a_while(self) -> None:
        self.has_route = False

    @precondition(lambda self: not self.has_route)
    @rule()
    def a_route_is_up(self) -> None:
        self.has_route = True
        if self.waits:
            self.waits = False
            self.perform_sender(self.sender.resume())

    @rule(kind=st.sampled_from(KINDS))
    def another_transport_is_cheaper(self, kind: str) -> None:
        self.preferred = kind

    @rule()
    def link_comes_up(self) -> None:
        pages = self.receiver.order.blocks
        plan = TransferPlan(self.op, pages, self.staged, encoding=self.encoding, costs=COSTS)
        self.perform_receiver(self.receiver.begin(plan))

    @rule()
    def the_way_is_clear(self) -> None:
        self.perform_sender(self.sender.begin(self.page_tokens, is_gathered=self.is_gathered))

    @precondition(lambda self: self.gathers)
    @rule()
    def a_gather_ends(self) -> None:
        """In the order in which they were begun."""
        gather, layers = self.gathers.pop(0)
        for layer in layers:
            self.gathered[layer] = gather.stop
        self.perform_sender(self.sender.gathered(layers, gather.stop))

    @precondition(lambda self: self.num_scatters)
    @rule()
    def a_scatter_ends(self) -> None:
        self.num_scatters -= 1
        self.perform_receiver(self.receiver.scattered())

    @rule(layer=st.integers(0, NUM_LAYERS - 1), num_tokens=st.integers(1, 40))
    def compute(self, layer: int, num_tokens: int) -> None:
        if layer and self.computed[layer - 1] <= self.computed[layer]:
            return
        limit = self.computed[layer - 1] if layer else self.num_tokens
        self.computed[layer] = min(self.computed[layer] + num_tokens, limit)
        self.perform_sender(self.sender.layers_ready([layer], self.computed[layer]))

    @rule(num_tokens=st.integers(1, 40), num_layers=st.integers(2, NUM_LAYERS))
    def compute_several_layers(self, num_tokens: int, num_layers: int) -> None:
        """The first layers come as far as each other, and are ready at once."""
        stop = min(max(self.computed) + num_tokens, self.num_tokens)
        self.computed[:num_layers] = [stop] * num_layers
        self.perform_sender(self.sender.layers_ready(range(num_layers), stop))

    @precondition(lambda self: min(self.computed) == self.num_tokens)
    @rule()
    def finish(self) -> None:
        self.perform_sender(self.sender.finish(self.first_token))

    @precondition(lambda self: self.to_sender)
    @rule()
    def sender_hears(self) -> None:
        message = self.to_sender.pop(0)
        if isinstance(message, Grant):
            assert (message.op, bool(message.blocks)) == (self.op, self.op == "WRITE")
            if message.encoding != GRANTED_ENCODING or self.wanted is None:
                self.perform_sender(self.sender.granted(message))
            elif not self.sender.over:
                self.to_receiver.append(
                    EncodingRefused(self.sender.ticket, self.wanted, 1.0, 2.0, 0.5)
                )
        elif isinstance(message, TransferAck):
            self.perform_sender(self.sender.acked())
        elif isinstance(message, RetransmitRequest):
            self.perform_sender(self.sender.retransmit(message))
        elif isinstance(message, FallbackToWrite):
            self.perform_sender(self.sender.fall_back_to_write(message))
        elif isinstance(message, ExcludeTransport):
            if message.transport in self.sender.excluded or not self.is_last(message.transport):
                self.perform_sender(self.sender.fail_over(message.transport))
            else:
                self.is_doomed = True
                self.perform_sender(self.sender.fail("no other transport", stage="transfer"))
        else:
            self.perform_sender(self.sender.peer_failed(message.reason, stage="decode"))

    @precondition(lambda self: self.to_receiver)
    @rule(data=st.data())
    def receiver_hears(self, data: st.DataObject) -> None:
        """In any order: nothing is assumed of it, though a link keeps it."""
        self.hear(data.draw(st.integers(0, len(self.to_receiver) - 1)))

    def hear(self, place: int) -> None:
        message = self.to_receiver.pop(place)
        if isinstance(message, Finished):
            if self.writes or self.to_receiver:  # Finished may overtake writes on the wire
                self.faults["finished overtook writes"] += 1
            self.perform_receiver(self.receiver.finished(message))
        elif isinstance(message, TransportFailed):
            self.perform_receiver(self.receiver.transport_failed(message))
        elif isinstance(message, EncodingRefused):
            assert not self.landed, "it was refused once some had come"
            self.perform_receiver(self.receiver.encoding_refused(message.encoding))
            self.take_other_terms()
        elif isinstance(message, Available):
            self.heard.append(message)
            self.perform_receiver(self.receiver.available(message))
        else:
            self.perform_receiver(self.receiver.fail(message.reason, stage="prefill"))

    def take_other_terms(self) -> None:
        """Once nothing can land in the encoded pages."""
        if self.wanted is None or self.encoding != GRANTED_ENCODING:
            return
        if self.receiver.phase is ReceivePhase.WAITING:
            self.encoding, self.was_refused = self.wanted, True

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def a_read_completes(self, data: st.DataObject) -> None:
        self.end_read(data.draw(st.sampled_from(sorted(self.reads))))

    def end_read(self, posted: TransferHandle) -> None:
        read = self.reads.pop(posted)
        notification = Notification(
            read.layer, read.start, read.stop, read.digests, read.num_layers
        )
        self.perform_receiver(self.receiver.read_ended(posted))
        if self.receiver.phase is ReceivePhase.GRANTED:
            if self.sender.over:  # the source changed under the read: digests tell
                self.perform_receiver(self.receiver.fail("digest mismatch", stage="verify"))
                return
            self.land_tokens(notification)
        self.try_reverse()

    def land_tokens(self, notification: Notification) -> None:
        layers = range(notification.layer, notification.layer + notification.num_layers)
        self.landed |= set(product(layers, range(notification.start, notification.stop)))
        if self.staged and self.copies_late:
            self.num_scatters += 1
            self.receiver.scattering()
        self.perform_receiver(self.receiver.landed(notification))

    def try_reverse(self) -> None:
        if self.unreadable and self.receiver.phase is ReceivePhase.GRANTED and not self.reads:
            before = self.receiver.plan
            self.perform_receiver(self.receiver.fall_back_to_write(self.unreadable))
            self.faults["reversed"] += self.receiver.plan != before
            self.op = "WRITE"

    @precondition(lambda self: self.reads and self.fault_budget)
    @rule(data=st.data(), how=st.sampled_from(["fail", "read again", "reverse"]))
    def a_read_fails(self, data: st.DataObject, how: str) -> None:
        self.fault_budget -= 1
        if how == "fail" and not self.may_be_doomed:
            return
        posted = data.draw(st.sampled_from(sorted(self.reads)))
        read = self.reads.pop(posted)
        is_open = self.receiver.phase is ReceivePhase.GRANTED
        self.is_doomed |= how == "fail"
        if how == "fail":
            self.perform_receiver(self.receiver.fail("the mapping is gone", stage="read"))
        elif how == "read again" and is_open and not self.unreadable:
            self.post_read(read)
        elif is_open and len(self.unreadable) < 2:
            self.unreadable.add(posted.transport)
        elif is_open:
            self.is_doomed = True
            self.perform_receiver(self.receiver.fail("nothing reads any more", stage="read"))
        self.perform_receiver(self.receiver.read_ended(posted))
        self.try_reverse()

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def available_comes_twice(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.heard))
        plan = self.receiver.plan
        reads = plan is not None and plan.op == "READ"
        if self.receiver.phase is ReceivePhase.GRANTED and reads:
            with pytest.raises(ProtocolError):
                self.receiver.available(again)
        else:
            assert self.receiver.available(again) == []

    @precondition(lambda self: self.finished_said)
    @rule()
    def finished_comes_twice(self) -> None:
        again = Finished(self.sender.ticket, SampledToken(99), "", "", {})
        if not any(isinstance(message, Finished) for message in self.to_receiver):
            assert self.receiver.finished(again) == []

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def a_write_lands(self, data: st.DataObject) -> None:
        self.finish_write(data.draw(st.sampled_from(sorted(self.writes))))

    def land(self, posted: TransferHandle) -> None:
        notification = self.writes[posted]
        self.store(posted, notification)
        self.arrive(posted, notification)
        self.sender_hears_of_the_end(posted)

    def store(self, posted: TransferHandle, notification: Notification) -> None:
        """Bytes land: never where they could do harm."""
        if posted.transport in self.closed and posted.transport != "first":
            return  # the receiver's side drops it
        if self.grant_state in {"open", "closed"}:
            assert posted.transport not in self.closed or self.fencing, "stored behind a fence"
        self.stored.add(posted)

    def arrive(self, posted: TransferHandle, notification: Notification) -> None:
        """The notice is here: it counts if the window is open."""
        if self.grant_state != "open" or posted.transport in self.closed:
            return
        if self.receiver.expects(notification):
            self.land_tokens(notification)

    def sender_hears_of_the_end(self, posted: TransferHandle) -> None:
        if self.writes.pop(posted, None) is not None:
            self.perform_sender(self.sender.ended(posted))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def a_write_lands_and_its_end_is_not_heard_of_yet(self, data: st.DataObject) -> None:
        posted = data.draw(st.sampled_from(sorted(self.writes)))
        if posted not in self.stored and posted.transport not in self.closed:
            self.store(posted, self.writes[posted])
            self.arrive(posted, self.writes[posted])

    @precondition(lambda self: self.stored & self.writes.keys())
    @rule(data=st.data())
    def the_end_of_a_write_is_heard_of(self, data: st.DataObject) -> None:
        landed = sorted(self.stored & self.writes.keys())
        self.sender_hears_of_the_end(data.draw(st.sampled_from(landed)))

    def is_last(self, kind: str) -> bool:
        """Whether the sender would have no other, once it has heard all."""
        told = {
            message.transport for message in self.to_sender if isinstance(message, ExcludeTransport)
        }
        return self.sender.excluded | told | {kind} >= set(KINDS)

    @precondition(lambda self: self.writes and self.fault_budget)
    @rule(data=st.data(), takes_over=st.booleans())
    def a_write_fails(self, data: st.DataObject, takes_over: bool) -> None:
        """It may have landed all the same, with or without its notice, or land later."""
        self.fault_budget -= 1
        posted = data.draw(st.sampled_from(sorted(self.writes)))
        takes_over |= not self.may_be_doomed
        if takes_over and self.is_last(posted.transport):
            return
        notification = self.writes.pop(posted)
        self.faults["write failed"] += 1
        if posted.transport == "first" and posted not in self.stored:
            self.late[posted] = notification
        if takes_over:
            self.perform_sender(self.sender.fail_over(posted.transport))
        else:
            self.is_doomed = True
            self.perform_sender(self.sender.fail("the transport broke", stage="transfer"))
        self.perform_sender(self.sender.ended(posted))

    @precondition(lambda self: self.writes and self.fault_budget)
    @rule(data=st.data())
    def a_transport_breaks(self, data: st.DataObject) -> None:
        """All of its writes fail; of those that had ended well, notices may be lost."""
        self.fault_budget -= 1
        kind = data.draw(st.sampled_from(sorted({p.transport for p in self.writes})))
        if self.is_last(kind):
            return
        self.faults["transport broke"] += 1
        self.perform_sender(self.sender.fail_over(kind))
        for posted in sorted(p for p in self.writes if p.transport == kind):
            if kind == "first" and posted not in self.stored:
                self.late[posted] = self.writes[posted]
            self.sender_hears_of_the_end(posted)

    @precondition(lambda self: self.writes and self.fault_budget)
    @rule(data=st.data())
    def a_notice_is_lost_and_then_its_transport_breaks(self, data: st.DataObject) -> None:
        self.fault_budget -= 1
        posted = data.draw(st.sampled_from(sorted(self.writes)))
        if posted in self.stored or self.is_last(posted.transport):
            return
        self.faults["notice lost"] += 1
        self.store(posted, self.writes[posted])
        self.sender_hears_of_the_end(posted)  # it thinks that all is well
        self.perform_sender(self.sender.fail_over(posted.transport))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def a_failed_write_is_stored_late(self, data: st.DataObject) -> None:
        posted = data.draw(st.sampled_from(sorted(self.late)))
        notification = self.late.pop(posted)
        self.store(posted, notification)
        self.faults["stored late"] += 1
        self.arrive(posted, notification)

    @precondition(lambda self: self.fencing)
    @rule()
    def a_fence_stands(self) -> None:
        """Quiescence of the transport that posts: what is late lands before, or never."""
        kind = self.fencing.pop()
        for posted in [p for p in self.late if p.transport == kind]:
            del self.late[posted]
        self.perform_receiver(self.receiver.fenced(kind))

    @precondition(lambda self: self.writes and self.fault_budget)
    @rule(data=st.data())
    def what_landed_is_wrong(self, data: st.DataObject) -> None:
        """Digests tell: the peer is to take another transport."""
        self.fault_budget -= 1
        posted = data.draw(st.sampled_from(sorted(self.writes)))
        if posted in self.stored or self.is_last(posted.transport):
            return
        self.store(posted, self.writes[posted])
        if self.grant_state == "open" and posted.transport not in self.closed:
            self.faults["suspected"] += 1
            self.perform_receiver(self.receiver.exclude(posted.transport, "digest mismatch"))
        self.sender_hears_of_the_end(posted)

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def a_notice_comes_twice(self, data: st.DataObject) -> None:
        layer, token = data.draw(st.sampled_from(sorted(self.landed)))
        notification = Notification(layer, token, token + 1, b"")
        if self.receiver.phase is ReceivePhase.GRANTED:
            with pytest.raises(ProtocolError):
                self.receiver.expects(notification)
            self.faults["duplicate refused"] += 1
        else:
            assert not self.receiver.expects(notification)

    @precondition(lambda self: self.grant_state == "closed" and not self.writes)
    @rule()
    def grant_becomes_quiescent(self) -> None:
        self.grant_state = "quiescent"
        self.late.clear()
        self.fencing.clear()
        self.perform_receiver(self.receiver.grant_quiescent())
        self.take_other_terms()

    @precondition(lambda self: self.fault_budget and self.may_be_doomed)
    @rule()
    def receiver_aborts(self) -> None:
        self.fault_budget -= 1
        self.is_doomed = True
        self.perform_receiver(self.receiver.abort("the client left"))

    @precondition(lambda self: self.fault_budget and self.may_be_doomed)
    @rule()
    def sender_aborts(self) -> None:
        self.fault_budget -= 1
        self.is_doomed = True
        self.perform_sender(self.sender.fail("the client left", stage="abort"))

    @precondition(lambda self: self.fault_budget and self.may_be_doomed)
    @rule()
    def digest_is_wrong(self) -> None:
        self.fault_budget -= 1
        self.is_doomed = True
        self.perform_receiver(self.receiver.fail("digest mismatch", stage="verify"))

    @precondition(lambda self: self.fault_budget and self.may_be_doomed)
    @rule(now=st.floats(0, 200))
    def time_passes(self, now: float) -> None:
        self.fault_budget -= now >= DEADLINE
        self.is_doomed |= now >= DEADLINE
        self.perform_receiver(self.receiver.expire(Instant(now)))
        self.perform_sender(self.sender.expire(Instant(now)))

    @invariant()
    def each_end_is_told_once(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.receiver.check_invariants()
        self.sender.check_invariants()
        if self.receiver.over:
            assert not self.reads, "staging pages given back under a read"
            assert self.grant_state in {"never opened", "quiescent"}
        told = Counter(type(event) for event in self.told)
        assert told[KVLanded] + told[KVFailed] <= 1
        assert told[BlocksQuiescent] <= 1
        assert not (told[KVLanded] and told[BlocksQuiescent])
        if self.staged:
            is_quiet = self.num_scatters or told[KVFailed] <= told[BlocksQuiescent]
            assert is_quiet, "the engine's blocks are quiet once no copy goes on"
        assert len(self.sent) <= 1
        assert bool(self.sent) == self.sender.over
        if self.receiver.phase is ReceivePhase.WAITING:
            assert self.grant_state in {"never opened", "quiescent" if self.was_refused else None}
            assert not self.told

    def carry_through(self) -> None:
        """What no fault dooms reaches its end by the ordinary steps alone."""
        self.a_route_is_up()
        self.link_comes_up()
        while self.to_sender:
            self.sender_hears()
        if self.encoding == GRANTED_ENCODING and self.wanted is not None:
            for place in [
                place
                for place, message in enumerate(self.to_receiver)
                if isinstance(message, EncodingRefused)
            ]:
                self.hear(place)
            if self.grant_state == "closed":
                self.grant_becomes_quiescent()
            assert self.was_refused
            self.link_comes_up()
            while self.to_sender:
                self.sender_hears()
        self.the_way_is_clear()
        for layer in range(NUM_LAYERS):
            self.computed[layer] = self.num_tokens
            self.perform_sender(self.sender.layers_ready([layer], self.num_tokens))
        self.finish()
        while self.is_under_way:
            self.copies_end()
            while self.to_receiver:
                self.hear(-1)
            for posted in sorted(self.writes, reverse=True):
                self.finish_write(posted)
            for posted in sorted(self.reads, reverse=True):
                self.end_read(posted)
            while self.to_sender:
                self.sender_hears()
            if self.fencing and not (self.to_receiver or self.writes or self.reads):
                self.a_fence_stands()  # as late as can be
        assert [type(event) for event in self.told] == [KVLanded]
        assert [type(event) for event in self.sent] == [KVSent]

    @property
    def is_under_way(self) -> bool:
        is_sent = self.to_receiver or self.to_sender or self.writes or self.reads
        return bool(is_sent or self.fencing or self.gathers or self.num_scatters)

    def copies_end(self) -> None:
        while self.gathers:
            self.a_gather_ends()
        while self.num_scatters:
            self.a_scatter_ends()

    def finish_write(self, posted: TransferHandle) -> None:
        if posted in self.stored:
            self.sender_hears_of_the_end(posted)
        else:
            self.land(posted)

    def teardown(self) -> None:
        """Whatever happened, time ends it: nothing stays reserved, nobody waits."""
        if not hasattr(self, "receiver"):
            return
        if not self.is_doomed:
            self.carry_through()
        self.perform_receiver(self.receiver.expire(DEADLINE))
        self.perform_sender(self.sender.expire(DEADLINE))
        self.copies_end()
        while self.writes:
            posted = next(iter(self.writes))
            self.perform_sender(self.sender.fail("the end", stage="transfer"))
            self.sender_hears_of_the_end(posted)
        if self.grant_state == "closed":
            self.grant_becomes_quiescent()
        while self.reads:
            self.end_read(next(iter(self.reads)))
        self.copies_end()
        assert self.receiver.over
        assert self.sender.over
        self.each_end_is_told_once()
        assert isinstance(self.sent[0], KVSent | SendFailed)
        ends = [event for event in self.told if isinstance(event, KVLanded | BlocksQuiescent)]
        assert len(ends) == 1


HandoffWorld.TestCase.settings = settings(
    max_examples=examples(300),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHandoffWorld = HandoffWorld.TestCase
