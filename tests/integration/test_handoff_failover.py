"""Real agents whose transports fail in the middle of a handoff: another one finishes it."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.handoff.interface import BlocksQuiescent, KVFailed, SendFailed
from baton.kv.layout import KVLayout
from baton.testing.faulty_transport import Fault, FaultPlan, FaultyTransport
from baton.transfer.transports.tcp.transport import TcpTransport
from tests.integration.handoff_nodes import (
    CLOCK,
    NUM_LAYERS,
    WRITES_ONLY,
    Handoff,
    Node,
    make_handoff,
    node,
    plain_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.handoff.messages import TransferOp
    from baton.telemetry.transfers import Direction, Outcome, PeerSegments, TransferTime
    from baton.transfer.interface import Transport
    from baton.transfer.links.choice import Choice
    from baton.transfer.links.cost_model import LinkModel

BOTH = ("shared", "tcp")


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


class Tally:
    """A `LinkObserver` that counts."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()
        self.mismatches: Counter[tuple[str, str]] = Counter()
        self.failures: Counter[str] = Counter()
        self.probed: dict[tuple[str, str], tuple[float, float]] = {}
        self.outcomes: list[Outcome] = []
        self.transfers: list[TransferTime] = []

    def chosen(self, direction: Direction, choice: Choice) -> None:
        self.used[choice.used] += 1
        if choice.is_mismatch:
            self.mismatches[choice.expected, choice.used] += 1

    def transferred(self, transfer: TransferTime) -> None:
        self.transfers.append(transfer)

    def carried(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def failed(self, direction: Direction, transport: str) -> None:
        self.failures[transport] += 1

    def measured(self, direction: Direction, transport: str, model: LinkModel) -> None:
        self.probed[direction, transport] = model.latency_s, model.bandwidth

    def sent(self, transport: str, segments: Sequence[PeerSegments]) -> None:
        """Not looked at here."""


def cut(worker: Node, kind: str) -> int:
    """Break the connections of one transport from this side to its peers; how many there were."""
    (transport,) = (t for t in worker.agent.options.transports if t.kind == kind)
    num_cut = 0
    for remote in tuple(transport._remotes.values()):
        connection = remote._connection
        if connection is not None and connection.is_open:
            connection.channel.socket.shutdown(socket.SHUT_RDWR)
            num_cut += 1
    return num_cut


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = CLOCK.now() + timeout_s
    while not condition():
        assert CLOCK.now() < deadline, f"not in {timeout_s} s"
        threading.Event().wait(0.005)


def begin(handoff: Handoff, stop: int = 57) -> None:
    """Until the layers up to `stop` are where they belong."""
    handoff.start_receive()
    handoff.start_send()
    handoff.wait_until_granted()
    handoff.compute(stop)
    threading.Event().wait(0.1)


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize(("src_block", "dst_block"), [(16, 16), (16, 24)])
def test_shared_is_cut_in_the_middle_and_tcp_finishes(
    op: TransferOp, src_block: int, dst_block: int, key: Credentials
) -> None:
    tally = Tally()
    with (
        node("p", kinds=BOTH, key=key, block_size=src_block, observer=tally) as prefill,
        node("d", kinds=BOTH, key=key, block_size=dst_block, op=op, observer=tally) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode)
        begin(handoff)
        assert cut(prefill if op == "WRITE" else decode, "shared") == 1
        handoff.compute(100, 101)
        handoff.prefill_done()
        handoff.check_landed()
        for trace in (handoff.receiving.trace, handoff.sending.trace):
            assert (trace.expected_transport, trace.transport) == ("shared", "tcp"), trace.role
        moving = handoff.sending if op == "WRITE" else handoff.receiving
        # A decode worker may have had no read under way, and may have had several.
        assert moving.trace.reroutes or op == "READ"
        assert all(reroute.startswith("shared: ") for reroute in moving.trace.reroutes)
        # What is written again is of all layers, and small: one write.
        assert tally.used["tcp"] >= (1 if op == "WRITE" else NUM_LAYERS)
        again = make_handoff(prefill, decode, num_ready=101, seed=9)
        again.start_receive()
        again.start_send()
        again.prefill_done()
        again.check_landed()


def test_without_another_transport_a_cut_ends_the_handoff(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key) as prefill,
        node("d", kinds=("shared",), key=key) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        begin(handoff)
        assert cut(prefill, "shared") == 1
        assert isinstance(prefill.wait_for()[0], SendFailed)
        assert isinstance(decode.wait_for()[0], KVFailed)


def test_a_transport_that_was_cut_is_used_again_once_it_has_cooled(key: Credentials) -> None:
    with (
        node("p", kinds=BOTH, key=key) as prefill,
        node("d", kinds=BOTH, key=key) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode)
        begin(handoff)
        cut(prefill, "shared")
        handoff.compute(101)
        handoff.prefill_done()
        handoff.check_landed()
        assert handoff.receiving.trace.transport == "tcp"
        threading.Event().wait(0.8)
        again = make_handoff(prefill, decode, num_ready=101, seed=9)
        again.start_receive()
        again.start_send()
        again.prefill_done()
        again.check_landed()
        assert again.receiving.trace.transport == again.receiving.trace.expected_transport
        assert again.receiving.trace.transport == "shared"


class Wrapped:
    """Makes one kind of transport faulty."""

    def __init__(self, kind: str, plan: FaultPlan) -> None:
        self.kind, self.plan = kind, plan
        self.made: list[FaultyTransport] = []

    def __call__(self, transport: Transport) -> Transport:
        if transport.kind != self.kind:
            return transport
        self.made.append(FaultyTransport(transport, self.plan))
        return self.made[-1]


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("fault", [Fault.FAIL_SUBMIT, Fault.FLIP_BIT, Fault.SWAP_PAGES])
@pytest.mark.parametrize("seed", range(3))
def test_what_one_transport_spoils_another_brings(
    op: TransferOp, fault: Fault, seed: int, key: Credentials
) -> None:
    wrapped = Wrapped("shared", FaultPlan(seed, {fault: 0.5}))
    moves = {"WRITE": 0, "READ": 1}[op]
    wraps = [lambda transport: transport, lambda transport: transport]
    wraps[moves] = wrapped
    with (
        node("p", kinds=BOTH, key=key, wrap=wraps[0]) as prefill,
        node("d", kinds=BOTH, key=key, op=op, wrap=wraps[1]) as decode,
    ):
        prefill.scribble(seed)
        handoff = make_handoff(prefill, decode, seed=seed)
        handoff.start_receive()
        handoff.start_send()
        handoff.wait_until_granted()
        handoff.compute(30, 57, 100, 101)
        handoff.prefill_done()
        handoff.check_landed()
        assert wrapped.made[0].injected
        assert handoff.receiving.trace.transport == "tcp"
        assert handoff.sending.trace.transport == "tcp"


@pytest.mark.parametrize("seed", range(3))
def test_of_layers_written_together_the_spoilt_one_alone_is_written_again(
    seed: int, key: Credentials
) -> None:
    wrapped, tally = Wrapped("shared", FaultPlan(seed, {Fault.FLIP_BIT: 1.0})), Tally()
    with (
        node("p", kinds=BOTH, key=key, wrap=wrapped, observer=tally) as prefill,
        node("d", kinds=BOTH, key=key) as decode,
    ):
        prefill.scribble(seed)
        handoff = make_handoff(prefill, decode, num_ready=101, seed=seed)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        handoff.check_landed()
        assert wrapped.made[0].injected == {Fault.FLIP_BIT: 1}
        assert tally.used == {"tcp": 1, "shared": 1}
        trace = handoff.receiving.trace
        assert trace.digest_failures == {"shared": 1}
        assert trace.verified_bytes["shared"] == NUM_LAYERS * trace.verified_bytes["tcp"]


@pytest.mark.parametrize("fault", [Fault.FLIP_BIT, Fault.SWAP_PAGES])
def test_a_spoilt_read_ends_the_handoff_where_nothing_else_reads(
    fault: Fault, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was announced to be read cannot be said again of bytes that are written."""
    monkeypatch.setattr(TcpTransport, "capabilities", WRITES_ONLY)
    wrapped = Wrapped("shared", FaultPlan(0, {fault: 1.0}))
    with (
        node("p", kinds=BOTH, key=key) as prefill,
        node("d", kinds=BOTH, key=key, op="READ", wrap=wrapped) as decode,
    ):
        prefill.scribble(3)
        handoff = make_handoff(prefill, decode, num_ready=101)
        handoff.start_receive()
        handoff.start_send()
        handoff.prefill_done()
        assert isinstance(decode.wait_for()[0], KVFailed)
        assert wrapped.made[0].injected


def test_an_abort_while_it_is_rerouted_leaves_nothing_behind(key: Credentials) -> None:
    with (
        node("p", kinds=BOTH, key=key) as prefill,
        node("d", kinds=BOTH, key=key) as decode,
    ):
        handoff = make_handoff(prefill, decode)
        begin(handoff)
        cut(prefill, "shared")
        decode.agent.abort(handoff.sending.ticket.id, "the client left")
        assert decode.wait_for() == [BlocksQuiescent(handoff.sending.ticket.id)]
        assert isinstance(prefill.wait_for()[0], SendFailed)
        wait_until(lambda: not decode.agent.loop.receiving.num_sessions)


def test_writes_that_a_stalled_peer_does_not_take_are_cut_when_their_pages_are_needed(
    key: Credentials,
) -> None:
    """As vLLM does it when it preempts a prompt: it may wait for no peer."""
    large = KVLayout.gqa(NUM_LAYERS, 32, 128, block_size=16, dtype="float32")
    with (
        plain_pages(large) as source,
        plain_pages(large) as target,
        node("p", kinds=("tcp",), key=key, pages=source) as prefill,
        node("d", kinds=("tcp",), key=key, pages=target) as decode,
    ):
        handoff = make_handoff(prefill, decode, num_tokens=512)
        begin(handoff, stop=16)
        ticket = handoff.sending.ticket.id
        goes_on = threading.Event()
        decode.agent.loop.call(goes_on.wait)
        try:
            handoff.compute(512)
            wait_until(lambda: bool(prefill.agent.loop.sending.transports_of(ticket)))
            prefill.agent.abort(ticket, "preempted")
            assert prefill.stays_silent(), "the writes are done: the peer did not stall"
            prefill.agent.cut_writes(ticket)
            (failed,) = prefill.wait_for()
            assert isinstance(failed, SendFailed)
            assert prefill.agent.loop.sending.transports_of(ticket) == []
        finally:
            goes_on.set()
        lost, quiescent = decode.wait_for(2)
        assert isinstance(lost, KVFailed)
        assert quiescent == BlocksQuiescent(ticket)
