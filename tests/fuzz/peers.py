"""Well-formed messages with wrong values, from an authenticated peer, to a real handoff agent.

Three workers without engines: the one that is asked (`victim`), an honest one, and a liar. Between
the victim and each of the others two handoffs are under way, one in each direction. The liar has
the tickets of its own, and the text of the others; it begins its handoffs as it should, or does
not, and sends whatever messages it likes about all of them. Then it goes.

No exception may escape the victim's thread, no page may change that is not the liar's own, what is
held is bounded, and gone after the liar, and the honest handoffs end with the right bytes.
"""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import seal
from baton.errors import ProtocolError
from baton.handoff import messages
from baton.handoff.interface import (
    BlocksQuiescent,
    KVLanded,
    SampledToken,
    TokenLogprob,
)
from baton.handoff.peer_transports import LinkOptions
from baton.handoff.verify import VerificationPolicy
from baton.ids import TicketId
from baton.kv.copies import BlockTable
from baton.telemetry.trace import Stamp
from baton.testing.clocks import ManualClock
from tests.fuzz.mutation import BLOBS, BOUNDARIES, FLOATS, TEXTS
from tests.integration.handoff_nodes import FIRST, LISTED, NUM_BLOCKS, NUM_LAYERS, Handoff, node
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, receive_order, send_order

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.handoff.peers import Peer
    from baton.transfer.interface import PageWrite, Transport
    from tests.integration.handoff_nodes import Node

BLOCK_SIZE: Final = 16
NUM_TOKENS: Final = 5 * BLOCK_SIZE
NUM_ROUNDS: Final = 400
"""Of the three agents' loops, after which an honest handoff must have ended."""
NUM_MESSAGES: Final = 60
STEP_S: Final = 0.001
SENT: Final = (
    messages.Grant, messages.Declined, messages.Available, messages.TransferAck,
    messages.TransportFailed, messages.RetransmitRequest, messages.ExcludeTransport,
    messages.FallbackToWrite, messages.BlocksExported, messages.ExportRefused, messages.Release,
    messages.ReleaseAck, messages.Revoke, messages.Finished, messages.Failed, messages.RenewLease,
    messages.LeaseRenewed, messages.Keepalive, messages.ProbeRequest, messages.ProbeReady,
    messages.ProbeResult, messages.ProbeEnd, messages.Ping, messages.Pong,
    messages.EncodingCosts, messages.EncodingRefused,
)  # fmt: skip
COUNTS: Final = (0, 0, 1, 2, 3, 15, 16, 17, 64, 79, 80, 81, 4096, messages.MAX_TOKENS)
OFTEN_RIGHT: Final = 0.4


class Lies:
    """Draws the fields of messages: often what would be right, else what could be there."""

    def __init__(self, rng: Random, tickets: list[Ticket], sealed: list[str]) -> None:
        self._rng, self._sealed = rng, sealed
        self._tickets = [ticket.id for ticket in tickets]

    def message(self) -> messages.AddressedMessage | None:
        kind = self._rng.choice(SENT)
        ticket = self._rng.choice(self._tickets)
        fields = {name: self._field(kind, name, ticket) for name in kind.__struct_fields__}
        try:
            message = kind(**fields)
            messages.decode(messages.encode(message))
        except (ProtocolError, ValueError):
            return None  # not well-formed
        return message

    def _field(self, kind: type, name: str, ticket: TicketId) -> Any:
        rng = self._rng
        match name:
            case "ticket" if kind in {messages.Grant, messages.Declined}:
                return rng.choice(self._sealed)
            case "ticket" | "id":
                return ticket if rng.random() < 0.8 else TicketId(rng.randbytes(16))
            case "tickets":
                num = rng.choice((0, 1, 1, 2, 5, 200, messages.MAX_BATCH))
                return tuple(rng.choice(self._tickets) for _ in range(num))
            case "blocks":
                return self._blocks()
            case "ranges":
                return self._ranges()
            case "digests":
                return bytes(rng.choice((0, 0, 16, 32, 80, 160, 15, 4096)))
            case "layer":
                return rng.choice((0, 1, NUM_LAYERS - 1, NUM_LAYERS, 4096))
            case "num_layers":
                return rng.choice((1, 1, 2, NUM_LAYERS, NUM_LAYERS + 1, 4096))
            case "start" | "stop" | "num_tokens" | "first_block":
                right = {"start": 0, "first_block": 0}.get(name, NUM_TOKENS)
                return right if rng.random() < OFTEN_RIGHT else rng.choice(COUNTS)
            case "prompt_hash":
                return PROMPT_HASH if rng.random() < 0.7 else rng.randbytes(32)
            case "op":
                return rng.choice(("WRITE", "READ", "NONE"))
            case "transport" | "expected_transport":
                return rng.choice(("shared", "shared", "tcp", "", "nixl", "x" * 64))
            case "transports" | "no_digest_transports":
                return tuple(
                    rng.choice(("shared", "tcp", "", "y")) for _ in range(rng.randrange(4))
                )
            case "reason":
                return rng.choice(TEXTS)[: messages.MAX_REASON_CHARS]
            case "first_token":
                return self._token()
            case "stamps":
                return {stamp: rng.choice(FLOATS) for stamp in Stamp if rng.random() < 0.3}
            case "at" | "echo":
                return rng.choice((*FLOATS, 1000.0, 1000.1))
            case "encoding":
                return rng.choice(("raw", "raw", "raw", "int8/1", "", "x" * 64))
            case "encode_byte_s" | "write_byte_s":
                return rng.choice((None, 1e-9, 0.0, -1.0, 1.0, 2.0))
            case "costs":
                byte_s = rng.choice((1e-9, 0.0, 1.0))
                return rng.choice((None, messages.ReceivingCosts(byte_s, {"int8/1": 1e-9})))
            case "raw_s" | "encoded_s" | "prefill_s":
                return rng.choice((0.0, 1.0, 1e9, -1.0, 1e10))
            case "idle_s":
                return rng.choice((0.0, 1.0, 86_400.0))
            case "is_intact" | "plain_digests" | "closes_grant":
                return rng.random() < 0.5
            case _:
                raise AssertionError(f"no lies are known for {kind.__name__}.{name}")

    def _token(self) -> SampledToken | None:
        rng = self._rng
        if rng.random() < 0.3:
            return None
        tokens = tuple(
            TokenLogprob(rng.choice((0, 1 << 30)), -0.5) for _ in range(rng.randrange(3))
        )
        return SampledToken(rng.choice((0, 42, (1 << 31) - 1)), rng.choice((None, -0.5)), tokens)

    def _blocks(self) -> bytes:
        rng = self._rng
        num = rng.choice((0, 0, 1, 4, 5, 5, 5, 6, 2000))
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice((*BLOBS, rng.randbytes(40)))
        ids = [rng.randrange(NUM_BLOCKS + 2) for _ in range(num)]
        if kind == 1 and num:
            ids[rng.randrange(num)] = rng.choice([n for n in BOUNDARIES if n < 1 << 63])
        if kind == 2 and num > 1:
            ids[0] = ids[-1]
        return np.array(ids, "<i8").tobytes()

    def _ranges(self) -> bytes:
        rng = self._rng
        if rng.random() < OFTEN_RIGHT:  # by layer: others are refused
            rows = [(layer, *sorted(rng.sample(COUNTS, 2))) for layer in range(NUM_LAYERS)]
            return np.array(rows, "<i4").tobytes()
        rows = [
            (rng.choice((0, 1, 2, 3, -1, (1 << 31) - 1)), *sorted(rng.choices(COUNTS, k=2)))
            for _ in range(rng.choice((0, 1, 2, 6, 300)))
        ]
        if rng.random() < 0.1:
            return rng.randbytes(rng.choice((12, 13, 24)))
        return np.array(rows, "<i4").tobytes()


class LyingWrites:
    """A transport of the liar, whose writes are notified in wrong ways now and then."""

    def __init__(self, inner: Transport, rng: Random) -> None:
        self._inner, self._rng = inner, rng

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def submit(self, write: PageWrite) -> object:
        rng = self._rng
        if rng.random() < 0.5:
            choices = (rng.choice(BLOBS), rng.randbytes(30), self._wrong_notification())
            write = msgspec.structs.replace(write, notification=rng.choice(choices))
        return self._inner.submit(write)

    def _wrong_notification(self) -> bytes:
        rng = self._rng
        return messages.encode(
            messages.Notification(
                rng.choice((0, 2, 3, 4096)),
                rng.choice(COUNTS),
                rng.choice(COUNTS),
                bytes(rng.choice((0, 16, 80, 81, 4096))),
                rng.choice((1, 2, 3, 4, 4096)),
                self._end() if rng.random() < 0.5 else None,
            )
        )

    def _end(self) -> messages.Finished:
        rng = self._rng
        stamps = {stamp: rng.choice(FLOATS) for stamp in Stamp if rng.random() < 0.3}
        names = (rng.choice(("shared", "tcp", "", "x" * 2000)) for _ in range(2))
        return messages.Finished(TicketId(rng.randbytes(16)), None, *names, stamps)


class Episode:
    """One run, which follows from `rng`."""

    def __init__(self, rng: Random, stack: ExitStack) -> None:
        self.rng, self.clock, self.key = rng, ManualClock(), Credentials.of(ClusterKey(bytes(32)))
        self.nodes: list[Node] = []
        kind = rng.choice((("shared",), ("tcp", "shared"), ("shared", "tcp"), ("tcp",)))
        levels = [rng.choice(("full", "full", "sampled", "identity")) for _ in range(3)]
        links = LISTED if rng.random() < 0.7 else LinkOptions()
        for name in ("victim", "honest", "liar"):
            made = stack.enter_context(
                node(
                    name,
                    kinds=kind,
                    key=self.key,
                    op=rng.choice(("WRITE", "READ")),
                    clock=self.clock,
                    is_stepped=True,
                    links=links,
                    verification=VerificationPolicy(*levels) if name == "victim" else None,
                    wrap=(lambda t: LyingWrites(t, rng)) if name == "liar" else (lambda t: t),
                )
            )
            made.agent.loop.reraises = name != "liar"
            made.scribble(len(self.nodes))
            self.nodes.append(made)
        self.victim, self.honest, self.liar = self.nodes
        self.events: dict[str, list[object]] = {made.name: [] for made in self.nodes}
        self._plan()

    def _plan(self) -> None:
        rng = self.rng
        free = {made.name: iter(rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)) for made in self.nodes}

        def handoff(prefill: Node, decode: Node) -> Handoff:
            mode = rng.choice(("push", "pull", "reference"))
            ticket = make_ticket(prefill.ref, decode.ref, mode)
            tables = [
                BlockTable(0, np.array([next(free[made.name]) for _ in range(5)], np.int64))
                for made in (prefill, decode)
            ]
            return Handoff(
                prefill,
                decode,
                send_order(ticket, num_tokens=NUM_TOKENS, blocks=tables[0]),
                receive_order(ticket, start=0, num_tokens=NUM_TOKENS, blocks=tables[1]),
            )

        victim, honest, liar = self.nodes
        self.honest_handoffs = [handoff(honest, victim), handoff(victim, honest)]
        self.false_handoffs = [handoff(liar, victim), handoff(victim, liar)]
        tickets = [each.sending.ticket for each in (*self.honest_handoffs, *self.false_handoffs)]
        sealed = [seal(ticket, self.key) for ticket in tickets]
        self.lies = Lies(rng, tickets, [*sealed, sealed[2], sealed[3], sealed[0][:-2], ""])
        self.may_change = set(self.false_handoffs[0].receiving.blocks.blocks.tolist()) | set(
            self.honest_handoffs[0].receiving.blocks.blocks.tolist()
        )
        self.before = [pages.copy() for pages in victim.pages.own]

    def run(self) -> None:
        self._begin()
        for _ in range(NUM_MESSAGES):
            for peer in self._links():
                message = self.lies.message()
                if message is not None:
                    self.liar.agent.loop._peers.send(peer, message)
            self._turn()
            self._check_pages()
        self._end_honest()
        self.liar.agent.loop._peers.close()
        self._end_false()

    def _begin(self) -> None:
        sends = [each.start_send for each in (*self.honest_handoffs, self.false_handoffs[1])]
        receives = [
            (each.start_receive, each.sending.ticket.mode)
            for each in (*self.honest_handoffs, self.false_handoffs[0])
        ]
        if self.rng.random() < 0.6:
            sends.append(self.false_handoffs[0].start_send)
        if self.rng.random() < 0.6:
            receives.append((self.false_handoffs[1].start_receive, "pull"))
        steps = [*sends, *(step for step, mode in receives if mode != "pull")]
        self.rng.shuffle(steps)
        steps += [step for step, mode in receives if mode == "pull"]  # what is pulled is held
        # So that it has a link to the victim, whatever else it begins.
        meet = make_ticket(self.victim.ref, self.liar.ref)
        self.liar.agent.decline(meet, "only to meet")
        for step in steps:
            step()
            self._turn()
        for _ in range(20):
            self._turn()
        if self.rng.random() < 0.5:
            self._compute(self.false_handoffs[1])

    def _links(self) -> list[Peer]:
        return [
            peer for peer in self.liar.agent.loop._peers
            if peer.hello is not None and peer.name == "victim"
        ]  # fmt: skip

    def _turn(self) -> None:
        for each in self.nodes:
            each.agent.loop.call(_nothing)  # or it would sleep
            each.agent.loop.step()
            self.events[each.name] += each.agent.poll()
        self.clock.advance(STEP_S)

    def _compute(self, handoff: Handoff) -> None:
        handoff.compute(NUM_TOKENS)
        handoff.prefill_done()

    def _check_pages(self) -> None:
        for now, before in zip(self.victim.pages.own, self.before, strict=True):
            changed = np.flatnonzero((now != before).any(axis=1)).tolist()
            wrong = set(changed) - self.may_change
            assert not wrong, f"pages {sorted(wrong)} changed, which nobody may write"

    def _end_honest(self) -> None:
        for handoff in self.honest_handoffs:
            self._compute(handoff)
        for handoff in self.honest_handoffs:
            ticket = handoff.sending.ticket.id
            for _ in range(NUM_ROUNDS):
                ended = [
                    event for event in self.events[handoff.decode.name]
                    if getattr(event, "ticket", None) == ticket
                    and not isinstance(event, BlocksQuiescent)
                ]  # fmt: skip
                if ended:
                    break
                self._turn()
            else:
                raise AssertionError(f"an honest handoff has not ended: {self.events}")
            assert isinstance(ended[0], KVLanded), f"an honest handoff ended so: {ended}"
            assert ended[0].first_token == FIRST
            if handoff.sending.ticket.mode != "reference":
                handoff.check_bytes()
        self._check_pages()

    def _end_false(self) -> None:
        for _ in range(20):
            self._turn()
        self.clock.advance(700.0)  # every deadline, every lease, every ticket
        for _ in range(20):
            self._turn()
        loop = self.victim.agent.loop
        held = {
            "handoffs that receive": loop.receiving.num_sessions,
            "writes": len(loop.sending.writes),
            "reads": len(loop.receiving._reads.pending),
            "early grants": len(loop.sending._early._grants),
            "queued renewals": len(loop.receiving._lease_renewer._queued),
        }
        left = {what: num for what, num in held.items() if num}
        assert not left, f"held after the liar is gone: {left}"
        of_liar = self.false_handoffs[0].receiving.ticket.id
        ended = [e for e in self.events["victim"] if e.ticket == of_liar]  # type: ignore[attr-defined]
        given_back = [event for event in ended if isinstance(event, BlocksQuiescent | KVLanded)]
        assert len(given_back) == 1, f"its pages were given back so: {ended}"


def _nothing() -> None:
    """So that a loop does not sleep."""


def run_episode(data: bytes) -> str:
    """An episode that follows from these bytes."""
    with ExitStack() as stack:
        episode = Episode(Random(data), stack)
        episode.run()
        return " ".join(sorted({type(event).__name__ for event in episode.events["victim"]}))
