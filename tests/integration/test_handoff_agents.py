"""Two handoff agents with real links and real transports, in one process.

The engine is played by the test: it writes random bytes into prefill's pages, layer by layer.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest

from baton.auth.credentials import Credentials
from baton.auth.ticket import WorkerRef
from baton.clock import Instant, MachineClock
from baton.errors import ConfigError, TransferError
from baton.handoff import agent, write_batches
from baton.handoff.agent import HandoffAgent, ReadyLayers
from baton.handoff.interface import (
    BlocksQuiescent,
    HandoffEvent,
    KVFailed,
    KVLanded,
    KVSent,
    SendFailed,
)
from baton.handoff.write_batches import WriteBatch, WriteBatchBuilder
from baton.ids import Epoch, WorkerId
from baton.kv.copies import BlockTable
from baton.telemetry.log_limit import WARNINGS
from baton.telemetry.trace import Stamp
from baton.testing.clocks import ManualClock
from baton.transfer.transports.shared.transport import SharedTransport
from tests.integration.handoff_nodes import (
    CLOCK,
    FIRST,
    NUM_LAYERS,
    Node,
    blocks_for,
    make_handoff,
    make_layout,
    node,
)
from tests.integration.test_handoff_untrusted_peers import peers_of
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.handoff.messages import Notification, TransferOp
    from baton.transfer.interface import (
        PagedRegion,
        RegionDescriptor,
        RemoteId,
        TransferEvent,
        Transport,
    )


@pytest.fixture(name="key")
def key_fixture() -> Credentials:
    return Credentials.generate()


@pytest.mark.parametrize("kind", ["shared", "tcp"])
@pytest.mark.parametrize(("src_block", "dst_block"), [(16, 16), (16, 24), (24, 16), (8, 32)])
@pytest.mark.parametrize(("start_blocks", "num_ready"), [(0, 0), (2, 40)])
def test_layers_stream_into_the_decode_workers_pages(
    kind: str, src_block: int, dst_block: int, start_blocks: int, num_ready: int, key: Credentials
) -> None:
    num_tokens, start = 101, start_blocks * dst_block
    with (
        node("p", kinds=(kind,), key=key, block_size=src_block) as prefill,
        node("d", kinds=(kind,), key=key, block_size=dst_block) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        source = blocks_for(num_tokens, src_block, 1)
        target = blocks_for(num_tokens, dst_block, 2, first=start_blocks)
        prefill.scribble(3)
        receiving = receive_order(ticket, start=start, num_tokens=num_tokens, blocks=target)
        sending = send_order(
            ticket, num_tokens=num_tokens, num_ready_tokens=num_ready, blocks=source
        )
        decode.agent.start_receive(receiving)
        prefill.agent.start_send(sending)
        for _, stop in pairwise([num_ready, 57, 100, num_tokens]):
            for layer in range(NUM_LAYERS):
                prefill.agent.layer_ready([(ticket.id, stop)], layer)
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert decode.wait_for() == [KVLanded(ticket.id, FIRST)]
        assert prefill.wait_for() == [KVSent(ticket.id)]
        for layer in range(NUM_LAYERS):
            assert decode.canonical(target, layer, start, num_tokens) == prefill.canonical(
                source, layer, start, num_tokens
            )
        trace = receiving.trace
        assert trace.transport == trace.expected_transport == kind
        assert trace.num_bytes == (num_tokens - start) * decode.layout.bytes_per_token
        assert sending.trace.num_bytes == trace.num_bytes


def test_a_transport_that_only_one_side_has_is_not_expected(key: Credentials) -> None:
    with (
        node("p", kinds=("shared", "tcp"), key=key, block_size=16) as prefill,
        node("d", kinds=("tcp",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        receiving = receive_order(ticket, start=0, num_tokens=10)
        decode.agent.start_receive(receiving)
        prefill.agent.start_send(send_order(ticket, num_tokens=10, num_ready_tokens=10))
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert isinstance(decode.wait_for()[0], KVLanded)
        assert receiving.trace.transport == receiving.trace.expected_transport == "tcp"


def test_the_expected_transport_is_recorded_beside_the_one_used(
    key: Credentials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expose = SharedTransport.expose

    def expose_elsewhere(self: SharedTransport, region: PagedRegion) -> RegionDescriptor:
        """As from another network namespace of this host: a socket's name that is unknown here."""
        return msgspec.structs.replace(expose(self, region), endpoint="baton-" + "0" * 32)

    monkeypatch.setattr(SharedTransport, "expose", expose_elsewhere)
    with (
        node("p", kinds=("shared", "tcp"), key=key, block_size=16) as prefill,
        node("d", kinds=("shared", "tcp"), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        receiving = receive_order(ticket, start=0, num_tokens=10)
        decode.agent.start_receive(receiving)
        prefill.agent.start_send(send_order(ticket, num_tokens=10, num_ready_tokens=10))
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert isinstance(decode.wait_for()[0], KVLanded)
        assert receiving.trace.expected_transport == "shared"
        assert receiving.trace.transport == "tcp"
    assert "d is reached by tcp, not shared" in caplog.text


def test_what_stays_within_a_host_is_not_expected_to_reach_another_one(
    key: Credentials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    domains = iter(["one host", "another host"])
    monkeypatch.setattr("baton.handoff.io_backend.read_clock_domain", lambda: next(domains))
    attached: list[RegionDescriptor] = []

    def attach(_: SharedTransport, descriptor: RegionDescriptor) -> RemoteId:
        attached.append(descriptor)
        raise TransferError("no such socket on this host")

    monkeypatch.setattr(SharedTransport, "attach", attach)
    with (
        caplog.at_level(logging.INFO),
        node("p", kinds=("shared", "tcp"), key=key, block_size=16) as prefill,
        node("d", kinds=("shared", "tcp"), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        receiving = receive_order(ticket, start=0, num_tokens=10)
        decode.agent.start_receive(receiving)
        prefill.agent.start_send(send_order(ticket, num_tokens=10, num_ready_tokens=10))
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert isinstance(decode.wait_for()[0], KVLanded)
        assert receiving.trace.expected_transport == receiving.trace.transport == "tcp"
    assert not attached
    assert "not reached by shared" not in caplog.text


def test_two_hosts_without_a_transport_between_hosts_fail_with_that_reason(
    key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = iter(["one host", "another host"])
    monkeypatch.setattr("baton.handoff.io_backend.read_clock_domain", lambda: next(domains))
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=10))
        prefill.agent.start_send(send_order(ticket, num_tokens=10, num_ready_tokens=10))
        prefill.agent.prefill_done(ticket.id, FIRST)
        failed = decode.wait_for()[0]
        assert isinstance(failed, KVFailed)
        assert "which is on another host: shared here, shared there" in str(failed.error)


class ShiftedClock(MachineClock):
    """Another host's clock: its zero lies elsewhere."""

    def now(self) -> Instant:
        return Instant(super().now() + 1000)


def test_stamps_of_another_clock_are_shifted(
    key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    domains = iter(["one host", "another host"])
    monkeypatch.setattr("baton.handoff.io_backend.read_clock_domain", lambda: next(domains))
    with (
        node("p", kinds=("tcp",), key=key, block_size=16, clock=ShiftedClock()) as prefill,
        node("d", kinds=("tcp",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        receiving = receive_order(ticket, start=0, num_tokens=10)
        sending = send_order(ticket, num_tokens=10, num_ready_tokens=10)
        before = CLOCK.now()
        sending.trace.stamp(Stamp.PREFILL_DONE, ShiftedClock().now())
        decode.agent.start_receive(receiving)
        prefill.agent.start_send(sending)
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert isinstance(decode.wait_for()[0], KVLanded)
        assert receiving.trace.peer_stamps[Stamp.PREFILL_DONE] == pytest.approx(before, abs=0.5)


def test_a_grant_may_come_before_the_offer(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        # One handoff first: its end proves that the link is up, so the next grant is not late.
        for attempt in range(2):
            ticket = make_ticket(prefill.ref, decode.ref)
            decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
            if attempt:
                threading.Event().wait(0.1)
            prefill.agent.start_send(send_order(ticket, num_tokens=20, num_ready_tokens=20))
            prefill.agent.prefill_done(ticket.id, FIRST)
            assert isinstance(decode.wait_for()[0], KVLanded)
            assert isinstance(prefill.wait_for()[0], KVSent)


def test_two_prompts_under_one_ticket_are_refused(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        order = receive_order(ticket, start=0, num_tokens=20)
        decode.agent.start_receive(replace(order, prompt_hash=b"x" * 32))
        prefill.agent.start_send(send_order(ticket, num_tokens=20, num_ready_tokens=20))
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "different prompts" in str(failed.error)
        assert quiescent == BlocksQuiescent(ticket.id)
        assert isinstance(prefill.wait_for()[0], SendFailed)


def test_another_model_is_refused_with_the_difference(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16, fingerprint="model-b") as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "another model" in str(failed.error)
        assert quiescent == BlocksQuiescent(ticket.id)


def test_a_refusal_names_the_traits_that_differ_on_both_sides(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    traits = {"engine": "vllm 0.32", "dtype": "bfloat16"}
    with (
        node("p", kinds=("shared",), key=key, traits=traits) as prefill,
        node(
            "d",
            kinds=("shared",),
            key=key,
            fingerprint="model-b",
            traits=traits | {"dtype": "float16"},
        ) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        failed, _ = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "another model: fingerprint model-b… on d, model-a… on p" in str(failed.error)
        assert "dtype: float16 on d, bfloat16 on p" in str(failed.error)
        assert "engine" not in str(failed.error).replace("[engine]", "")
    assert "link to p ended: the two workers cannot exchange KV: another model" in caplog.text


def test_a_trait_of_any_length_keeps_no_two_workers_apart(key: Credentials) -> None:
    """A model's path may be as long as the system allows."""
    traits = {"model": "/models" * 100}
    with (
        node("p", kinds=("shared",), key=key, traits=traits) as prefill,
        node("d", kinds=("shared",), key=key, traits=traits) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        prefill.agent.start_send(send_order(ticket, num_tokens=20, num_ready_tokens=20))
        prefill.agent.prefill_done(ticket.id, FIRST)
        assert isinstance(decode.wait_for()[0], KVLanded)


def test_another_cluster_key_is_refused(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=Credentials.generate(), block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        events = decode.wait_for(2)
        assert [type(event) for event in events] == [KVFailed, BlocksQuiescent]


def test_a_decline_ends_the_offer(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        prefill.agent.start_send(send_order(ticket, num_tokens=20))
        decode.agent.decline(ticket, "all is cached")
        (failed,) = prefill.wait_for()
        assert isinstance(failed, SendFailed)
        assert "all is cached" in str(failed.error)


def test_an_abort_on_either_side_ends_both(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        first = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(first, start=0, num_tokens=20))
        prefill.agent.start_send(send_order(first, num_tokens=20, num_ready_tokens=10))
        threading.Event().wait(0.1)  # some bytes are under way by then
        decode.agent.abort(first.id, "the client left")
        assert decode.wait_for() == [BlocksQuiescent(first.id)]
        assert isinstance(prefill.wait_for()[0], SendFailed)

        second = make_ticket(prefill.ref, decode.ref)
        decode.agent.start_receive(receive_order(second, start=0, num_tokens=20))
        prefill.agent.start_send(send_order(second, num_tokens=20, num_ready_tokens=10))
        threading.Event().wait(0.1)
        prefill.agent.abort(second.id, "the engine failed")
        assert [type(e) for e in decode.wait_for(2)] == [KVFailed, BlocksQuiescent]
        assert isinstance(prefill.wait_for()[0], SendFailed)


def test_a_write_grant_that_no_transport_opens_ends_the_handoff(key: Credentials) -> None:
    with (
        node("p", kinds=("shared", "tcp"), key=key, block_size=16) as prefill,
        node("d", kinds=("shared", "tcp"), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        beyond = BlockTable(0, np.array([10_000, 10_001], dtype=np.int64))
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20, blocks=beyond))
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert failed.error.stage == "grant"
        assert quiescent == BlocksQuiescent(ticket.id)


def test_giving_up_before_it_is_expected_fails_at_once(key: Credentials) -> None:
    with node("d", kinds=("shared",), key=key, block_size=16) as decode:
        ticket = make_ticket(WorkerRef(WorkerId("p"), Epoch("e"), "127.0.0.1:9"), decode.ref)
        decode.agent.abort_from_peer(ticket.id, "the prefill worker answered 503")
        decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "503" in str(failed.error)
        assert quiescent == BlocksQuiescent(ticket.id)


def test_nothing_arrives_in_time(key: Credentials) -> None:
    with (
        node("p", kinds=("shared",), key=key, block_size=16) as prefill,
        node("d", kinds=("shared",), key=key, block_size=16) as decode,
    ):
        ticket = make_ticket(prefill.ref, decode.ref)
        order = receive_order(ticket, start=0, num_tokens=20)
        decode.agent.start_receive(replace(order, deadline=Instant(CLOCK.now() + 0.3)))
        failed, quiescent = decode.wait_for(2)
        assert isinstance(failed, KVFailed)
        assert "deadline" in str(failed.error)
        assert quiescent == BlocksQuiescent(ticket.id)


def test_an_address_that_no_peer_can_dial_is_refused(key: Credentials) -> None:
    with node("d", kinds=("shared",), key=key, block_size=16) as decode:
        options = replace(decode.agent.options, host="0.0.0.0", transports=())
        with pytest.raises(ConfigError, match="handoff_host"):
            HandoffAgent(options).start(lambda: None)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_worker_that_stops_fails_its_handoffs(kind: str, key: Credentials) -> None:
    with node("d", kinds=(kind,), key=key, block_size=16) as decode:
        with node("p", kinds=(kind,), key=key, block_size=16) as prefill:
            ticket = make_ticket(prefill.ref, decode.ref)
            decode.agent.start_receive(receive_order(ticket, start=0, num_tokens=20))
            prefill.agent.start_send(send_order(ticket, num_tokens=20, num_ready_tokens=10))
            threading.Event().wait(0.1)
        events = decode.wait_for(1)
        assert isinstance(events[0], KVFailed)


def test_a_prompt_of_few_bytes_leaves_when_it_is_computed(key: Credentials) -> None:
    num_bytes = 101 * make_layout(16).bytes_per_token
    with (
        node("p", kinds=("shared",), key=key, layer_batch_bytes=num_bytes) as prefill,
        node("d", kinds=("shared",), key=key) as decode,
    ):
        prefill.scribble(1)
        short = make_handoff(prefill, decode, num_tokens=101)
        short.start_receive()
        short.start_send()
        short.wait_until_granted()
        short.compute(50, 101)
        threading.Event().wait(0.3)
        assert Stamp.FIRST_LAYER_LANDED not in short.receiving.trace.stamps
        short.prefill_done()
        short.check_landed()
        long = make_handoff(prefill, decode, num_tokens=102, seed=2)
        long.start_receive()
        long.start_send()
        long.wait_until_granted()
        long.compute(102)
        deadline = CLOCK.now() + 30
        while Stamp.LAST_LAYER_LANDED not in long.receiving.trace.stamps:
            assert CLOCK.now() < deadline, "a larger prompt waited for its end"
            threading.Event().wait(0.01)
        long.prefill_done()
        long.check_landed()


def count_unexpected() -> float:
    return WARNINGS.labels("handoff.agent_loop", "unexpected")._value.get()


def test_an_order_that_meets_an_unexpected_error_ends_and_others_go_on(
    key: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """Orders of a broken engine: the error comes before there is a session, or after that."""
    num_before = count_unexpected()
    with (
        node("p", kinds=("shared",), key=key) as prefill,
        node("d", kinds=("shared",), key=key) as decode,
    ):
        prefill.scribble(1)
        good = make_handoff(prefill, decode, num_ready=101)
        good.start_receive()
        good.wait_until_granted()  # from here on the two are linked
        nothing: Any = None
        for changes in ({"deadline": nothing}, {"blocks": nothing}):
            broken = make_handoff(prefill, decode)
            decode.agent.start_receive(replace(broken.receiving, **changes))
            failed, quiescent = decode.wait_for(2)
            assert isinstance(failed, KVFailed)
            assert failed.error.stage == "agent"
            assert quiescent == BlocksQuiescent(broken.receiving.ticket.id)
        broken = make_handoff(prefill, decode)
        prefill.agent.start_send(replace(broken.sending, deadline=nothing))
        (failed,) = prefill.wait_for()
        assert isinstance(failed, SendFailed)
        assert failed.ticket == broken.sending.ticket.id
        broken = make_handoff(prefill, decode)
        prefill.agent.start_send(broken.sending)
        loop, ready = prefill.agent.loop, ReadyLayers(broken.sending.ticket.id, nothing, 5)
        loop.call(loop.sending.layers_ready, (ready,), None)
        (failed,) = prefill.wait_for()
        assert isinstance(failed, SendFailed)
        good.start_send()
        good.prefill_done()
        good.check_landed()
    assert count_unexpected() == num_before + 4
    assert caplog.text.count("a command of the engine could not be carried out") == 4


class Broken:
    """Wraps a transport, which fails in a way that no caller expects."""

    readiness_fd = None

    def __init__(self, inner: Transport) -> None:
        self._inner, self.is_broken = inner, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def poll(self) -> list[TransferEvent]:
        if self.is_broken:
            raise RuntimeError("a bug")
        return self._inner.poll()


def test_an_agent_that_can_do_nothing_any_more_ends(
    key: Credentials, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handoffs end with errors, and the worker's health shows it."""
    monkeypatch.setattr(agent, "MAX_FAILED_STEPS", 3)
    made: list[Broken] = []

    def wrap(transport: Transport) -> Transport:
        made.append(Broken(transport))
        return cast("Transport", made[-1])

    with node("d", kinds=("shared",), key=key, wrap=wrap) as decode:
        with node("p", kinds=("shared",), key=key) as prefill:
            handoff = make_handoff(prefill, decode)
            handoff.start_receive()
            handoff.start_send()
            handoff.wait_until_granted()
            made[0].is_broken = True
            failed = decode.wait_for()[0]
            assert isinstance(failed, KVFailed)
        deadline = CLOCK.now() + 30
        while decode.agent.is_alive:
            assert CLOCK.now() < deadline, "the thread runs on"
            threading.Event().wait(0.01)
        decode.agent.abort(handoff.receiving.ticket.id, "calls do no harm")
    assert "the handoff agent ends: 3 steps have failed" in caplog.text


@pytest.mark.parametrize("op", ["READ", "WRITE"])
def test_a_long_prompt_that_is_sent_in_one_step_loses_no_peer(
    op: TransferOp, key: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests take longer than a peer may be silent, and other peers go on meanwhile."""
    clock, digest = ManualClock(), WriteBatchBuilder.digest
    monkeypatch.setattr(write_batches, "MAX_SEGMENTS", 1)  # a batch for each page of a layer
    with (
        node("p", kinds=("tcp",), key=key, clock=clock, is_stepped=True) as prefill,
        node("d", kinds=("tcp",), key=key, clock=clock, is_stepped=True, op=op) as decode,
        node("x", kinds=("tcp",), key=key, clock=clock, is_stepped=True) as other,
    ):

        def step(*nodes: Node) -> None:
            for each in nodes:
                each.agent.loop.call(int)  # or it would sleep
                each.agent.loop.step()

        def digest_slowly(
            builder: WriteBatchBuilder, batch: WriteBatch, *, is_keyed: bool = False
        ) -> Notification:
            clock.advance(0.6)
            step(decode, other)
            return digest(builder, batch, is_keyed=is_keyed)

        def step_until(condition: Callable[[], object]) -> None:
            deadline = CLOCK.now() + 30
            while not condition():
                assert CLOCK.now() < deadline, "not in 30 s"
                step(prefill, decode, other)
                clock.advance(0.01)

        other.agent.decline(make_ticket(prefill.ref, other.ref), "only to meet")
        step_until(lambda: peers_of(prefill, "x") and peers_of(other, "p"))
        (link,) = peers_of(other, "p")
        prefill.scribble(1)
        handoff = make_handoff(prefill, decode, num_tokens=48, num_ready=48, mode="pull")
        handoff.start_send()
        handoff.prefill_done()
        monkeypatch.setattr(WriteBatchBuilder, "digest", digest_slowly)
        began_at, events = clock.now(), list[HandoffEvent]()
        handoff.start_receive()
        step_until(lambda: events.extend(decode.agent.poll()) or events)
        assert events == [KVLanded(handoff.sending.ticket.id, FIRST)]
        handoff.check_bytes()
        assert clock.now() - began_at > 1.5 * decode.agent.options.liveness_timeout_s
        assert peers_of(other, "p") == [link]
