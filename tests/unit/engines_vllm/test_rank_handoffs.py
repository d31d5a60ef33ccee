"""One rank with a scripted agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.engines.vllm.rank_handoffs import (
    MAX_REPORT_DELAY_S,
    MIN_WAIT_S,
    RELEASE_TIMEOUT_S,
    WRITE_GRACE_S,
    RankHandoffs,
)
from baton.engines.vllm.rank_observer import RankObserver
from baton.engines.vllm.rank_prompts import RankSetting, on_host
from baton.engines.vllm.step_orders import (
    Abort,
    Finished,
    Occupancy,
    Progress,
    Prompt,
    StartReceive,
    StartSend,
    StepOrders,
    Withdraw,
)
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.trace import Stamp, TraceRing
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock
from tests.tickets import issue
from tests.unit.engines_vllm.scripted_port import ScriptedPort, SettlingEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.ticket import HandoffMode
    from baton.handoff.interface import HandoffEvent, StreamPosition
    from baton.handoff.read_prefixes import ReadsPrefixes

BLOCK_SIZE, NUM_LAYERS = 4, 2
ID = TicketId(b"t" * 16)
ONE_RANK = (
    WorkerRef(WorkerId("p"), Epoch("0" * 32), "127.0.0.1:1"),
    WorkerRef(WorkerId("d"), Epoch("1" * 32), "127.0.0.1:2"),
)
FROM_TWO = (
    WorkerRef(WorkerId("p"), Epoch("0" * 32), "127.0.0.1:1", ("127.0.0.1:1", "127.0.0.1:3")),
    ONE_RANK[1],
)


@dataclass
class RankHarness:
    clock: ManualClock
    port: ScriptedPort
    traces: TraceRing
    rank: RankHandoffs
    wake_event: SettlingEvent
    observer: RankObserver


@pytest.fixture
def harness() -> RankHarness:
    return make_harness(None)


class ReachedPosition:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is reached."""


HEADS = KVLayout.gqa(NUM_LAYERS, 4, 8, block_size=BLOCK_SIZE, dtype="float32")


def make_harness(
    store: ReadsPrefixes | None,
    record_position: Callable[[], StreamPosition | None] = on_host,
    *,
    rank_number: int = 0,
    layout: KVLayout = HEADS,
) -> RankHarness:
    clock, port, traces = ManualClock(), ScriptedPort(NUM_LAYERS), TraceRing(8)
    port.prefixes = store
    wake_event = SettlingEvent(port, clock)
    port.wake_event = wake_event
    setting = RankSetting(
        worker=WorkerId("me"),
        epoch=Epoch("2" * 32),
        rank=rank_number,
        layout=layout,
        layers={"a": 0, "b": 1},
        record_position=record_position,
    )
    table = TransferTable(Epoch("2" * 32), clock)
    counts = HandoffInstruments(CollectorRegistry(), ReceivePaths(("shared",)), (), table)
    observer = RankObserver(traces, counts)
    rank = RankHandoffs(setting, port, wake_event=wake_event, clock=clock, observer=observer)
    return RankHarness(clock, port, traces, rank, wake_event, observer)


def prompt(
    harness: RankHarness,
    num_tokens: int,
    ends: tuple[WorkerRef, WorkerRef] = ONE_RANK,
    mode: HandoffMode = "push",
) -> Prompt:
    ticket = Ticket(ID, "req-1", *ends, mode, issue(60))
    return Prompt(ticket, b"h" * 32, num_tokens, harness.clock.now())


def offer(
    harness: RankHarness,
    num_tokens: int,
    stop: int,
    blocks: tuple[int, ...],
    mode: HandoffMode = "push",
) -> StepOrders:
    return StepOrders(
        offers=(StartSend("r", prompt(harness, num_tokens, mode=mode), 0),),
        progress=(Progress("r", 0, blocks, stop, is_last=stop == num_tokens),),
    )


def expect(
    harness: RankHarness,
    ends: tuple[WorkerRef, WorkerRef] = ONE_RANK,
    mode: HandoffMode = "push",
) -> StepOrders:
    receive = StartReceive("r", prompt(harness, 7, ends, mode), 0, 0, (5, 6))
    return StepOrders(expected=(receive,))


def run(harness: RankHarness, orders: StepOrders, *layers: str) -> None:
    harness.rank.prepare(orders)
    harness.rank.begin_step(orders)
    for layer in layers:
        harness.rank.layer_done(layer)
    harness.rank.end_step()


def test_blocks_of_later_chunks_join_the_order_that_the_agent_has(harness: RankHarness) -> None:
    run(harness, offer(harness, 7, 3, (5,)), "a", "b")
    send = harness.port.sends[ID]
    assert send.order.blocks.blocks.tolist() == [5, -1]
    assert (send.ready, send.is_finished) == ({0: 3, 1: 3}, False)
    run(harness, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    assert send.order.blocks.blocks.tolist() == [5, 9]
    assert (send.ready, send.is_finished) == ({0: 7, 1: 7}, True)


def test_each_layer_is_reported_with_its_position() -> None:
    """The last one that was skipped: with the position after the whole pass."""
    after_a, after_the_pass = ReachedPosition(), ReachedPosition()
    positions = iter((after_a, after_the_pass))
    harness = make_harness(None, lambda: next(positions))
    run(harness, offer(harness, 7, 7, (5, 6)), "a")
    assert harness.port.positions == {0: after_a, 1: after_the_pass}


def test_a_gpus_layers_are_reported_when_all_are_launched() -> None:
    """Each with its own position; until then the agent's thread would slow down the launch."""
    positions = iter(("after a", "after b"))
    harness = make_harness(None, lambda: next(positions))
    harness.rank.begin_step(offer(harness, 7, 7, (5, 6)))
    harness.rank.layer_done("a")
    harness.rank.layer_done("b")
    assert harness.port.positions == {}
    harness.rank.forward_launched()
    assert harness.port.positions == {0: "after a", 1: "after b"}
    assert harness.port.sends[ID].is_finished  # the sampling has yet to be launched


def test_a_launch_that_takes_long_is_not_waited_for() -> None:
    harness = make_harness(None, lambda: "now")
    harness.rank.begin_step(offer(harness, 7, 7, (5, 6)))
    harness.rank.layer_done("a")
    harness.clock.advance(2 * MAX_REPORT_DELAY_S)
    harness.rank.layer_done("b")
    assert harness.port.sends[ID].is_finished


def test_a_step_without_hooks_reports_what_is_not_computed_yet(harness: RankHarness) -> None:
    """A full graph of a decode batch, while a prompt waits in vLLM's queue."""
    harness.rank.begin_step(StepOrders(arrived=(prompt(harness, 7),)))
    harness.rank.forward_launched()
    harness.rank.forward_launched()
    harness.rank.end_step()
    assert harness.port.uncomputed == [(ID,)]


def test_hooks_outside_of_a_step_are_not_asked_for(harness: RankHarness) -> None:
    assert not harness.rank.follows_layers  # warm-up and graph capture, before the first step
    harness.rank.begin_step(offer(harness, 7, 3, (5,)))
    assert harness.rank.follows_layers
    harness.rank.end_step()
    assert not harness.rank.follows_layers


def test_the_step_after_a_load_has_ended_does_not_wait_for_others(harness: RankHarness) -> None:
    """vLLM, scheduling ahead, makes a request run only after that step."""
    run(harness, expect(harness))
    other = Prompt(
        Ticket(TicketId(b"o" * 16), "req-2", *ONE_RANK, "push", issue(60)),
        b"h" * 32,
        4,
        Instant(0),
    )
    run(harness, StepOrders(expected=(StartReceive("o", other, 0, 0, (7,)),)))
    harness.port.land(ID)
    assert harness.rank.get_finished(set(), 0.01) == (set(), {"r"})
    num_waits = harness.wake_event.num_waits
    assert harness.rank.get_finished(set(), 0.01) == (set(), set())
    assert harness.wake_event.num_waits == num_waits
    assert harness.rank.get_finished(set(), 0.01) == (set(), set())
    assert harness.wake_event.num_waits == num_waits + 1


def test_blocks_are_received_behind_the_steps_that_were_begun() -> None:
    harness = make_harness(None, lambda: "now")
    run(harness, expect(harness))
    assert harness.port.receives[ID].order.after == "now"


def test_what_the_prefix_cache_has_is_not_ready_before_the_steps_layers(
    harness: RankHarness,
) -> None:
    """Another prompt of the same step may compute it: vLLM lists blocks that it plans to fill."""
    orders = StepOrders(
        offers=(StartSend("r", prompt(harness, 7), 4),),
        progress=(Progress("r", 0, (5, 6), 7, is_last=True),),
    )
    harness.rank.begin_step(orders)
    assert harness.port.sends[ID].ready == {0: 0, 1: 0}
    harness.rank.layer_done("a")
    assert harness.port.sends[ID].ready == {0: 7, 1: 0}


def test_steps_that_compute_say_what_is_not_computed_yet(harness: RankHarness) -> None:
    run(harness, StepOrders(arrived=(prompt(harness, 7),)), "a")
    assert harness.port.uncomputed == [(ID,)]
    run(harness, StepOrders())  # nothing ran through the model
    assert harness.port.uncomputed == [(ID,)]
    run(harness, offer(harness, 7, 3, (5,)), "a", "b")
    run(harness, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    assert harness.port.uncomputed == [(ID,)] * 3  # once in each step that computes
    run(harness, StepOrders(), "a")
    assert harness.port.uncomputed[3:] == [()]


@pytest.mark.parametrize("how", ["withdrawn", "preempted", "failed"])
def test_what_will_never_be_computed_is_not_vouched_for(harness: RankHarness, how: str) -> None:
    run(harness, StepOrders(arrived=(prompt(harness, 7),)), "a")
    if how == "withdrawn":
        run(harness, StepOrders(withdrawn=(Withdraw(prompt(harness, 7), "cancelled"),)))
    else:
        run(harness, offer(harness, 7, 3, (5,)))
    if how == "failed":
        harness.port.fail_send(ID)
        harness.rank.get_finished(set(), 0.0)
    before = [(ID,)] if how == "withdrawn" else [(ID,)] * 2
    run(harness, StepOrders(preempted=("r",) if how == "preempted" else ()), "a")
    assert harness.port.uncomputed == [*before, ()]
    run(harness, StepOrders(), "a")
    assert harness.port.uncomputed == [*before, ()], "that there is nothing is news once"


def test_blocks_of_an_offer_are_counted_as_they_come_until_its_handoff_ends(
    harness: RankHarness,
) -> None:
    run(harness, offer(harness, 7, 3, (5,)), "a", "b")
    harness.clock.advance(1.0)
    run(harness, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    harness.clock.advance(10.0)
    harness.port.sent(ID)
    assert harness.rank.get_finished({"r"}, 0.0) == ({"r"}, set())
    harness.clock.advance(100.0)
    run(harness, StepOrders())
    sums = harness.observer.held_block_s
    assert (sums["push", "computing"], sums["push", "waiting"]) == (1.0, 20.0)
    assert sum(sums.values()) == 21.0


def test_decode_need_not_wait_for_what_comes_after_the_last_layers_kv(harness: RankHarness) -> None:
    harness.rank.begin_step(offer(harness, 4, 4, (5,)))
    harness.rank.layer_done("b")
    assert not harness.port.sends[ID].is_finished
    harness.rank.layer_done("a")
    assert harness.port.sends[ID].is_finished  # before `end`: the MLP and the sampling go on


def test_layers_of_drafters_are_ignored_and_those_without_a_hook_are_not(
    harness: RankHarness,
) -> None:
    orders = offer(harness, 4, 4, (5,))
    harness.rank.begin_step(orders)
    harness.rank.layer_done("draft_model.0")
    assert harness.port.sends[ID].ready == {0: 0, 1: 0}
    harness.rank.layer_done("a")
    assert harness.port.sends[ID].ready == {0: 4, 1: 0}
    harness.rank.end_step()
    assert harness.port.sends[ID].ready == {0: 4, 1: 4}


def test_sent_is_told_only_after_the_request_has_finished(harness: RankHarness) -> None:
    run(harness, offer(harness, 4, 4, (5,)))
    harness.port.sent(ID)
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    assert harness.rank.get_finished({"r", "alone"}, 0.0) == ({"r"}, set())
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())


def test_a_failed_load_names_its_blocks_once_nothing_can_land_in_them(harness: RankHarness) -> None:
    run(harness, expect(harness))
    harness.port.fail(ID)
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    assert harness.rank.take_invalid_blocks() == set()
    harness.port.quiesce(ID)
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == {5, 6}
    assert harness.rank.take_invalid_blocks() == set()


def test_an_aborted_load_is_told_when_its_blocks_are_quiet(harness: RankHarness) -> None:
    run(harness, expect(harness))
    run(harness, StepOrders(aborted=(Abort("r", "cancelled"),)))
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    harness.port.settle_aborted()
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == set()


def test_preempted_blocks_are_waited_for(harness: RankHarness) -> None:
    run(harness, offer(harness, 7, 3, (5,)))
    harness.rank.prepare(StepOrders(preempted=("r",)))
    assert harness.port.sends == {}
    assert harness.rank.get_finished({"r"}, 0.0) == (set(), set())


def test_a_held_request_that_lost_its_blocks_is_waited_for_and_reported(
    harness: RankHarness,
) -> None:
    run(harness, offer(harness, 7, 3, (5,)))
    harness.rank.prepare(StepOrders(preempted_while_held=("r",)))
    assert harness.port.sends == {}
    assert harness.rank.get_finished({"r"}, 0.0) == ({"r"}, set())


def test_writes_that_a_stalled_peer_does_not_take_are_cut_soon(harness: RankHarness) -> None:
    run(harness, offer(harness, 7, 3, (5,)))
    harness.port.settle_aborted = lambda: None  # type: ignore[method-assign]
    begin = harness.clock.now()
    harness.rank.prepare(StepOrders(preempted=("r",)))
    assert harness.port.cut == [ID]
    assert harness.port.sends == {}
    assert harness.clock.now() - begin == pytest.approx(WRITE_GRACE_S)


def test_writes_that_cannot_be_recalled_stop_the_engine_for_a_while_only(
    harness: RankHarness, caplog: pytest.LogCaptureFixture
) -> None:
    run(harness, offer(harness, 7, 3, (5,)))
    harness.port.settle_aborted = lambda: None  # type: ignore[method-assign]
    harness.port.writes_can_be_cut = False
    begin = harness.clock.now()
    harness.rank.prepare(StepOrders(preempted=("r",)))
    assert harness.clock.now() - begin == pytest.approx(RELEASE_TIMEOUT_S)
    assert harness.port.cut == [ID]
    assert "still being read" in caplog.text
    # The request is over for this server, whatever its peer still does.
    (record,) = harness.rank.take_records()
    assert (record.side, record.failed_stage) == ("sent", "abort")
    assert harness.rank.get_finished({"r"}, 0.0) == (set(), set())


@pytest.mark.parametrize(
    ("orders", "sent"),
    [
        (StepOrders(preempted=("r",)), set()),
        (StepOrders(preempted_while_held=("r",)), {"r"}),
    ],
)
def test_a_store_that_hangs_does_not_stop_the_engine(
    harness: RankHarness, caplog: pytest.LogCaptureFixture, orders: StepOrders, sent: set[str]
) -> None:
    """After the cut nothing is read from the blocks, whenever the store's thread goes on."""
    run(harness, offer(harness, 7, 3, (5,), "pool"))
    harness.port.settle_aborted = lambda: None  # type: ignore[method-assign]
    harness.port.writes_can_be_cut = False
    begin = harness.clock.now()
    harness.rank.prepare(orders)
    assert harness.clock.now() - begin == pytest.approx(WRITE_GRACE_S)
    assert harness.port.cut == [ID]
    assert not caplog.records
    assert harness.rank.get_finished({"r"}, 0.0) == (sent, set())
    harness.port.fail_send(ID, "abort")  # the store's thread goes on
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())


def test_an_idle_step_waits_only_where_something_can_happen(harness: RankHarness) -> None:
    harness.rank.get_finished(set(), 0.01)
    assert harness.wake_event.num_waits == 0
    run(harness, expect(harness))
    harness.rank.get_finished(set(), 0.01)
    assert harness.wake_event.num_waits == 1
    harness.port.land(ID)
    harness.rank.get_finished(set(), 0.0)
    run(harness, offer(harness, 4, 4, (5,)))
    harness.rank.get_finished(set(), 0.01)
    assert harness.wake_event.num_waits == 1
    harness.rank.get_finished({"r"}, 0.01)
    assert harness.wake_event.num_waits == 2


def test_an_idle_step_waits_the_longer_the_longer_nothing_has_happened(
    harness: RankHarness,
) -> None:
    run(harness, expect(harness))
    waited_s = []
    for _ in range(60):
        before = harness.clock.now()
        harness.rank.get_finished(set(), 0.01)
        waited_s.append(harness.clock.now() - before)
        harness.clock.advance(0.002)  # vLLM's own part of a step without tokens
    assert waited_s == sorted(waited_s)
    assert (waited_s[0], waited_s[-1]) == pytest.approx((MIN_WAIT_S, 0.01))
    harness.port.land(ID)
    harness.rank.get_finished(set(), 0.01)
    run(harness, offer(harness, 4, 4, (5,)))
    before = harness.clock.now()
    harness.rank.get_finished({"r"}, 0.01)
    harness.rank.get_finished(set(), 0.01)
    assert harness.clock.now() - before <= 3 * MIN_WAIT_S


def test_an_event_that_comes_during_a_look_is_not_slept_over(
    harness: RankHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent adds an event, then rings: a wake_event silenced after the look would lose it."""
    look = harness.port.poll

    def look_and_miss() -> list[HandoffEvent]:
        events = look()
        harness.port.fail(ID)
        return events

    run(harness, expect(harness))
    monkeypatch.setattr(harness.port, "poll", look_and_miss)
    harness.wake_event.set()
    harness.rank.get_finished(set(), 0.0)
    assert harness.wake_event.is_set()


def test_a_dead_agent_fails_everything(harness: RankHarness) -> None:
    run(harness, expect(harness))
    harness.port.is_alive = False
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == {5, 6}


def test_blocks_that_the_pool_fills_outlive_the_agent(harness: RankHarness) -> None:
    """Its thread runs on and writes to them: vLLM would give them to another prompt."""
    run(harness, expect(harness, mode="pool"))
    harness.port.is_alive = False
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    harness.port.land(ID)
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == set()


def test_blocks_that_the_pool_reads_outlive_the_agent(harness: RankHarness) -> None:
    run(harness, offer(harness, 4, 4, (5,), mode="pool"), "a", "b")
    harness.port.is_alive = False
    assert harness.rank.get_finished({"r"}, 0.0) == (set(), set())
    harness.port.sent(ID)
    assert harness.rank.get_finished(set(), 0.0) == ({"r"}, set())


def test_parts_of_a_prompt_come_from_two_ranks_and_fail_together(harness: RankHarness) -> None:
    run(harness, expect(harness, FROM_TWO))
    first, second = harness.port.receives
    assert ID not in {first, second}
    harness.port.land(first)
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    harness.port.fail(second)
    harness.port.quiesce(second)
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == {5, 6}


def test_one_failed_part_ends_the_others(harness: RankHarness) -> None:
    run(harness, expect(harness, FROM_TWO))
    first, second = harness.port.receives
    harness.port.fail(first)
    harness.rank.get_finished(set(), 0.0)
    assert harness.port.receives[second].is_aborted


@pytest.mark.parametrize("is_early", [True, False])
def test_what_the_gateway_says_reaches_all_parts(harness: RankHarness, *, is_early: bool) -> None:
    if is_early:
        harness.rank.abort_from_peer(ID, "prefill is gone")
    run(harness, expect(harness, FROM_TWO))
    if not is_early:
        harness.rank.abort_from_peer(ID, "prefill is gone")
    assert set(harness.port.given_up) == set(harness.port.receives)
    assert len(harness.port.given_up) == 2


def test_a_failed_send_is_reported_and_a_declined_one_is_not(harness: RankHarness) -> None:
    run(harness, offer(harness, 7, 3, (5,)))
    harness.port.fail_send(ID, "transfer")
    harness.rank.get_finished(set(), 0.0)
    report = harness.rank.take_report()
    assert report is not None
    assert report.failed_sends == (("r", "scripted"),)
    assert harness.rank.take_report() is None
    harness.rank.get_finished({"r"}, 0.0)
    run(harness, offer(harness, 7, 3, (5,)))
    harness.port.fail_send(ID, "declined")
    harness.rank.get_finished(set(), 0.0)
    assert harness.rank.take_report() is None
    assert [r.failed_stage for r in harness.rank.take_records()] == ["transfer", None]


def test_a_decode_leg_is_traced_from_its_blocks_to_its_end(harness: RankHarness) -> None:
    run(harness, expect(harness))
    harness.clock.advance(1.0)
    harness.port.land(ID)
    harness.rank.get_finished(set(), 0.0)
    harness.clock.advance(1.0)
    harness.rank.begin_step(StepOrders(started=("r",)))
    harness.clock.advance(1.0)
    harness.rank.end_step()
    run(harness, StepOrders(finished=(Finished("r", "length", 24),)))
    trace = harness.traces.find("req-1")
    assert trace is not None
    stamps = [trace.stamps[s] - trace.stamps[Stamp.RECEIVED] for s in (
        Stamp.PAGES_RESERVED, Stamp.KV_READY, Stamp.DECODE_SCHEDULED, Stamp.FIRST_TOKEN
    )]  # fmt: skip
    assert stamps == [0.0, 1.0, 2.0, 3.0]
    assert (trace.outcome, trace.num_output_tokens, trace.peer) == ("length", 24, "p")
    assert trace.num_received_tokens == 7
    (record,) = harness.rank.take_records()
    assert (record.side, record.wait_s, record.failed_stage) == ("received", 1.0, None)


@pytest.mark.parametrize(("num_landed", "missing"), [(0, {5, 6}), (3, {5, 6}), (4, {6}), (6, {6})])
def test_a_load_that_came_in_part_names_the_blocks_that_lack_tokens(
    harness: RankHarness, num_landed: int, missing: set[int]
) -> None:
    run(harness, expect(harness))
    harness.port.land(ID, num_landed)
    assert harness.rank.get_finished(set(), 0.0) == (set(), {"r"})
    assert harness.rank.take_invalid_blocks() == missing
    trace = harness.traces.find("req-1")
    assert trace is not None
    assert (trace.num_received_tokens, trace.fallbacks) == (num_landed, [])


def test_a_load_that_failed_is_not_traced_as_received(harness: RankHarness) -> None:
    run(harness, expect(harness))
    harness.port.fail(ID)
    harness.port.quiesce(ID)
    harness.rank.get_finished(set(), 0.0)
    trace = harness.traces.find("req-1")
    assert trace is not None
    assert trace.num_received_tokens == 0
    assert len(trace.fallbacks) == 1


def test_a_request_in_vllms_queue_is_kept_at_every_rank_that_will_send(
    harness: RankHarness,
) -> None:
    run(harness, StepOrders(queued=(prompt(harness, 7, FROM_TWO),)))
    kept = [ticket.id for ticket in harness.port.kept]
    run(harness, expect(harness, FROM_TWO))
    assert kept == list(harness.port.receives)
    assert len(kept) == 2


def test_in_a_stall_the_oldest_held_prompt_is_withdrawn_and_no_other(harness: RankHarness) -> None:
    tickets = [TicketId(bytes([n]) * 16) for n in range(3)]
    for n, ticket in enumerate(tickets):
        asked = Prompt(
            Ticket(ticket, f"req-{n}", *ONE_RANK, "pull", issue(60)), b"h" * 32, 4, Instant(0)
        )
        progress = Progress(f"r{n}", 0, (n,), 4, is_last=True)
        run(harness, StepOrders(offers=(StartSend(f"r{n}", asked, 0),), progress=(progress,)))
    stalled = StepOrders(is_stalled=True)
    harness.rank.get_finished({"r1", "r2"}, 0.0)
    run(harness, stalled)  # r0 is still vLLM's: withdrawing it would make no room
    assert harness.rank.get_finished(set(), 0.0) == ({"r1"}, set())
    assert set(harness.port.sends) == {tickets[0], tickets[2]}
    run(harness, StepOrders())
    assert harness.rank.get_finished(set(), 0.0) == (set(), set())
    run(harness, stalled)
    assert harness.rank.get_finished(set(), 0.0) == ({"r2"}, set())


def test_how_full_vllm_was_at_its_last_step_can_be_asked(harness: RankHarness) -> None:
    assert harness.rank.occupancy is None
    for num_free in (5, 8):
        full = Occupancy(num_waiting=1, num_blocks=8, num_free_blocks=num_free, block_size=4)
        run(harness, StepOrders(occupancy=full))
        assert harness.rank.occupancy == full


@pytest.mark.parametrize("rank_number", [0, 1])
def test_nothing_is_left_of_a_prompt_whose_kv_another_rank_sends(rank_number: int) -> None:
    """All ranks have latent KV, or the only KV head: rank 0 sends it."""
    latent = KVLayout.mla(NUM_LAYERS, 8, block_size=BLOCK_SIZE, dtype="float32")
    harness = make_harness(None, rank_number=rank_number, layout=latent)
    asked = prompt(harness, 7, FROM_TWO)
    run(harness, StepOrders(arrived=(asked,)), "a", "b")
    offers = (StartSend("r", asked, 0),)
    run(harness, StepOrders(offers=offers, progress=(Progress("r", 0, (5,), 3, is_last=False),)))
    run(harness, StepOrders(progress=(Progress("r", 1, (6,), 7, is_last=True),)), "a", "b")
    assert len(harness.port.sends) == 1 - rank_number
    for ticket in tuple(harness.port.sends):
        harness.port.sent(ticket)
    assert harness.rank.get_finished({"r"}, 0.0) == ({"r"}, set())
    trace = harness.traces.find("req-1")
    assert trace is not None
    assert Stamp.PREFILL_STARTED in trace.stamps
    assert harness.rank._sends._uncomputed._derived == {}
    assert harness.rank._abort_fanout._derived == {}
    assert harness.observer._open == {}
    assert len(harness.observer._held) == 0
