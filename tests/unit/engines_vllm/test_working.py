"""One rank with a scripted agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from baton.authority.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.engines.vllm.congestion import Occupancy
from baton.engines.vllm.meta import (
    Abort,
    Expect,
    Finished,
    Offer,
    Progress,
    Prompt,
    StepOrders,
    Withdraw,
)
from baton.engines.vllm.observing import RankObserver
from baton.engines.vllm.working import RELEASE_TIMEOUT_S, RankHandoffs, RankSetting
from baton.ids import Epoch, TicketId, WorkerId
from baton.kv.layout import KVLayout
from baton.telemetry.metrics import HandoffInstruments
from baton.telemetry.trace import Stamp, TraceRing
from baton.testing.clocks import ManualClock
from tests.unit.engines_vllm.scripted_port import ScriptedPort, SettlingBell

if TYPE_CHECKING:
    from baton.handoff.interface import HandoffEvent

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
class Bench:
    clock: ManualClock
    port: ScriptedPort
    traces: TraceRing
    rank: RankHandoffs
    bell: SettlingBell
    observer: RankObserver


@pytest.fixture
def bench() -> Bench:
    clock, port, traces = ManualClock(), ScriptedPort(NUM_LAYERS), TraceRing(8)
    bell = SettlingBell(port, clock)
    port.bell = bell
    setting = RankSetting(
        worker=WorkerId("me"),
        epoch=Epoch("2" * 32),
        rank=0,
        layout=KVLayout.gqa(NUM_LAYERS, 4, 8, block_size=BLOCK_SIZE, dtype="float32"),
        layers={"a": 0, "b": 1},
    )
    observer = RankObserver(traces, HandoffInstruments(CollectorRegistry(), ("shared",), ()))
    rank = RankHandoffs(setting, port, bell=bell, clock=clock, observer=observer)
    return Bench(clock, port, traces, rank, bell, observer)


def prompt(bench: Bench, num_tokens: int, ends: tuple[WorkerRef, WorkerRef] = ONE_RANK) -> Prompt:
    ticket = Ticket(ID, "req-1", *ends, "push", 1.0)
    return Prompt(ticket, b"h" * 32, num_tokens, bench.clock.now())


def offer(bench: Bench, num_tokens: int, stop: int, blocks: tuple[int, ...]) -> StepOrders:
    return StepOrders(
        offers=(Offer("r", prompt(bench, num_tokens), 0),),
        progress=(Progress("r", 0, blocks, stop, is_last=stop == num_tokens),),
    )


def expect(bench: Bench, ends: tuple[WorkerRef, WorkerRef] = ONE_RANK) -> StepOrders:
    return StepOrders(expected=(Expect("r", prompt(bench, 7, ends), 0, 0, (5, 6)),))


def run(bench: Bench, orders: StepOrders, *layers: str) -> None:
    bench.rank.prepare(orders)
    bench.rank.begin(orders)
    for layer in layers:
        bench.rank.layer_done(layer)
    bench.rank.end()


def test_blocks_of_later_chunks_join_the_order_that_the_agent_has(bench: Bench) -> None:
    run(bench, offer(bench, 7, 3, (5,)), "a", "b")
    send = bench.port.sends[ID]
    assert send.order.blocks.blocks.tolist() == [5, -1]
    assert (send.ready, send.is_finished) == ({0: 3, 1: 3}, False)
    run(bench, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    assert send.order.blocks.blocks.tolist() == [5, 9]
    assert (send.ready, send.is_finished) == ({0: 7, 1: 7}, True)


def test_steps_that_compute_say_what_is_not_computed_yet(bench: Bench) -> None:
    run(bench, StepOrders(arrived=(prompt(bench, 7),)), "a")
    assert bench.port.uncomputed == [(ID,)]
    run(bench, StepOrders())  # nothing ran through the model
    assert bench.port.uncomputed == [(ID,)]
    run(bench, offer(bench, 7, 3, (5,)), "a", "b")
    run(bench, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    assert bench.port.uncomputed == [(ID,)] * 3  # once in each step that computes
    run(bench, StepOrders(), "a")
    assert bench.port.uncomputed[3:] == [()]


@pytest.mark.parametrize("how", ["withdrawn", "preempted", "failed"])
def test_what_will_never_be_computed_is_not_vouched_for(bench: Bench, how: str) -> None:
    run(bench, StepOrders(arrived=(prompt(bench, 7),)))
    if how == "withdrawn":
        run(bench, StepOrders(withdrawn=(Withdraw(prompt(bench, 7), "cancelled"),)))
    else:
        run(bench, offer(bench, 7, 3, (5,)))
    if how == "failed":
        bench.port.fail_send(ID)
        bench.rank.poll(set(), 0.0)
    run(bench, StepOrders(preempted=("r",) if how == "preempted" else ()), "a")
    assert bench.port.uncomputed == [()]


def test_blocks_of_an_offer_are_counted_as_they_come_until_its_handoff_ends(bench: Bench) -> None:
    run(bench, offer(bench, 7, 3, (5,)), "a", "b")
    bench.clock.advance(1.0)
    run(bench, StepOrders(progress=(Progress("r", 1, (9,), 7, is_last=True),)), "a", "b")
    bench.clock.advance(10.0)
    bench.port.sent(ID)
    assert bench.rank.poll({"r"}, 0.0) == ({"r"}, set())
    bench.clock.advance(100.0)
    run(bench, StepOrders())
    sums = bench.observer.held_block_s
    assert (sums["push", "computing"], sums["push", "waiting"]) == (1.0, 20.0)
    assert sum(sums.values()) == 21.0


def test_decode_need_not_wait_for_what_comes_after_the_last_layers_kv(bench: Bench) -> None:
    bench.rank.begin(offer(bench, 4, 4, (5,)))
    bench.rank.layer_done("b")
    assert not bench.port.sends[ID].is_finished
    bench.rank.layer_done("a")
    assert bench.port.sends[ID].is_finished  # before `end`: the MLP and the sampling go on


def test_layers_of_drafters_are_ignored_and_those_without_a_hook_are_not(bench: Bench) -> None:
    orders = offer(bench, 4, 4, (5,))
    bench.rank.begin(orders)
    bench.rank.layer_done("draft_model.0")
    assert bench.port.sends[ID].ready == {0: 0, 1: 0}
    bench.rank.layer_done("a")
    assert bench.port.sends[ID].ready == {0: 4, 1: 0}
    bench.rank.end()
    assert bench.port.sends[ID].ready == {0: 4, 1: 4}


def test_sent_is_told_only_after_the_request_has_finished(bench: Bench) -> None:
    run(bench, offer(bench, 4, 4, (5,)))
    bench.port.sent(ID)
    assert bench.rank.poll(set(), 0.0) == (set(), set())
    assert bench.rank.poll({"r", "alone"}, 0.0) == ({"r"}, set())
    assert bench.rank.poll(set(), 0.0) == (set(), set())


def test_a_failed_load_names_its_blocks_once_nothing_can_land_in_them(bench: Bench) -> None:
    run(bench, expect(bench))
    bench.port.fail(ID)
    assert bench.rank.poll(set(), 0.0) == (set(), set())
    assert bench.rank.take_invalid_blocks() == set()
    bench.port.quiesce(ID)
    assert bench.rank.poll(set(), 0.0) == (set(), {"r"})
    assert bench.rank.take_invalid_blocks() == {5, 6}
    assert bench.rank.take_invalid_blocks() == set()


def test_an_aborted_load_is_told_when_its_blocks_are_quiet(bench: Bench) -> None:
    run(bench, expect(bench))
    run(bench, StepOrders(aborted=(Abort("r", "cancelled"),)))
    assert bench.rank.poll(set(), 0.0) == (set(), set())
    bench.port.settle_aborted()
    assert bench.rank.poll(set(), 0.0) == (set(), {"r"})
    assert bench.rank.take_invalid_blocks() == set()


def test_preempted_blocks_are_waited_for(bench: Bench) -> None:
    run(bench, offer(bench, 7, 3, (5,)))
    bench.rank.prepare(StepOrders(preempted=("r",)))
    assert bench.port.sends == {}
    assert bench.rank.poll({"r"}, 0.0) == (set(), set())


def test_a_held_request_that_lost_its_blocks_is_waited_for_and_reported(bench: Bench) -> None:
    run(bench, offer(bench, 7, 3, (5,)))
    bench.rank.prepare(StepOrders(stripped=("r",)))
    assert bench.port.sends == {}
    assert bench.rank.poll({"r"}, 0.0) == ({"r"}, set())


def test_a_peer_that_goes_on_reading_stops_the_engine_for_a_while_only(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    run(bench, offer(bench, 7, 3, (5,)))
    bench.port.settle_aborted = lambda: None  # type: ignore[method-assign]
    begin = bench.clock.now()
    bench.rank.prepare(StepOrders(preempted=("r",)))
    assert bench.clock.now() - begin == pytest.approx(RELEASE_TIMEOUT_S)
    assert "still being read" in caplog.text


def test_an_idle_step_waits_only_where_something_can_happen(bench: Bench) -> None:
    bench.rank.poll(set(), 0.01)
    assert bench.bell.num_waits == 0
    run(bench, expect(bench))
    bench.rank.poll(set(), 0.01)
    assert bench.bell.num_waits == 1
    bench.port.land(ID)
    bench.rank.poll(set(), 0.0)
    run(bench, offer(bench, 4, 4, (5,)))
    bench.rank.poll(set(), 0.01)
    assert bench.bell.num_waits == 1
    bench.rank.poll({"r"}, 0.01)
    assert bench.bell.num_waits == 2


def test_an_event_that_comes_during_a_look_is_not_slept_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent adds an event, then rings: a bell silenced after the look would lose it."""
    look = bench.port.poll

    def look_and_miss() -> list[HandoffEvent]:
        events = look()
        bench.port.fail(ID)
        return events

    run(bench, expect(bench))
    monkeypatch.setattr(bench.port, "poll", look_and_miss)
    bench.rank.poll(set(), 0.0)
    assert bench.bell.is_set()


def test_a_dead_agent_fails_everything(bench: Bench) -> None:
    run(bench, expect(bench))
    bench.port.is_alive = False
    assert bench.rank.poll(set(), 0.0) == (set(), {"r"})
    assert bench.rank.take_invalid_blocks() == {5, 6}


def test_parts_of_a_prompt_come_from_two_ranks_and_fail_together(bench: Bench) -> None:
    run(bench, expect(bench, FROM_TWO))
    first, second = bench.port.receives
    assert ID not in {first, second}
    bench.port.land(first)
    assert bench.rank.poll(set(), 0.0) == (set(), set())
    bench.port.fail(second)
    bench.port.quiesce(second)
    assert bench.rank.poll(set(), 0.0) == (set(), {"r"})
    assert bench.rank.take_invalid_blocks() == {5, 6}


def test_one_failed_part_ends_the_others(bench: Bench) -> None:
    run(bench, expect(bench, FROM_TWO))
    first, second = bench.port.receives
    bench.port.fail(first)
    bench.rank.poll(set(), 0.0)
    assert bench.port.receives[second].is_aborted


@pytest.mark.parametrize("is_early", [True, False])
def test_what_the_gateway_says_reaches_all_parts(bench: Bench, *, is_early: bool) -> None:
    if is_early:
        bench.rank.give_up(ID, "prefill is gone")
    run(bench, expect(bench, FROM_TWO))
    if not is_early:
        bench.rank.give_up(ID, "prefill is gone")
    assert set(bench.port.given_up) == set(bench.port.receives)
    assert len(bench.port.given_up) == 2


def test_a_failed_send_is_reported_and_a_declined_one_is_not(bench: Bench) -> None:
    run(bench, offer(bench, 7, 3, (5,)))
    bench.port.fail_send(ID, "transfer")
    bench.rank.poll(set(), 0.0)
    report = bench.rank.take_report()
    assert report is not None
    assert report.failed_sends == (("r", "scripted"),)
    assert bench.rank.take_report() is None
    bench.rank.poll({"r"}, 0.0)
    run(bench, offer(bench, 7, 3, (5,)))
    bench.port.fail_send(ID, "declined")
    bench.rank.poll(set(), 0.0)
    assert bench.rank.take_report() is None
    assert [r.failed_stage for r in bench.rank.take_records()] == ["transfer", None]


def test_a_decode_leg_is_traced_from_its_blocks_to_its_end(bench: Bench) -> None:
    run(bench, expect(bench))
    bench.clock.advance(1.0)
    bench.port.land(ID)
    bench.rank.poll(set(), 0.0)
    bench.clock.advance(1.0)
    bench.rank.begin(StepOrders(started=("r",)))
    bench.clock.advance(1.0)
    bench.rank.end()
    run(bench, StepOrders(finished=(Finished("r", "length", 24),)))
    trace = bench.traces.find("req-1")
    assert trace is not None
    stamps = [trace.stamps[s] - trace.stamps[Stamp.RECEIVED] for s in (
        Stamp.PAGES_RESERVED, Stamp.KV_READY, Stamp.DECODE_SCHEDULED, Stamp.FIRST_TOKEN
    )]  # fmt: skip
    assert stamps == [0.0, 1.0, 2.0, 3.0]
    assert (trace.outcome, trace.num_output_tokens, trace.peer) == ("length", 24, "p")
    assert trace.num_received_tokens == 7
    (record,) = bench.rank.take_records()
    assert (record.side, record.wait_s, record.failed_stage) == ("received", 1.0, None)


@pytest.mark.parametrize(("num_landed", "missing"), [(0, {5, 6}), (3, {5, 6}), (4, {6}), (6, {6})])
def test_a_load_that_came_in_part_names_the_blocks_that_lack_tokens(
    bench: Bench, num_landed: int, missing: set[int]
) -> None:
    run(bench, expect(bench))
    bench.port.land(ID, num_landed)
    assert bench.rank.poll(set(), 0.0) == (set(), {"r"})
    assert bench.rank.take_invalid_blocks() == missing
    trace = bench.traces.find("req-1")
    assert trace is not None
    assert (trace.num_received_tokens, trace.fallbacks) == (num_landed, [])


def test_a_load_that_failed_is_not_traced_as_received(bench: Bench) -> None:
    run(bench, expect(bench))
    bench.port.fail(ID)
    bench.port.quiesce(ID)
    bench.rank.poll(set(), 0.0)
    trace = bench.traces.find("req-1")
    assert trace is not None
    assert trace.num_received_tokens == 0
    assert len(trace.fallbacks) == 1


def test_a_request_in_vllms_queue_is_kept_at_every_rank_that_will_send(bench: Bench) -> None:
    run(bench, StepOrders(queued=(prompt(bench, 7, FROM_TWO),)))
    kept = [ticket.id for ticket in bench.port.kept]
    run(bench, expect(bench, FROM_TWO))
    assert kept == list(bench.port.receives)
    assert len(kept) == 2


def test_in_a_stall_the_oldest_held_prompt_is_withdrawn_and_no_other(bench: Bench) -> None:
    tickets = [TicketId(bytes([n]) * 16) for n in range(3)]
    for n, ticket in enumerate(tickets):
        asked = Prompt(Ticket(ticket, f"req-{n}", *ONE_RANK, "pull", 1.0), b"h" * 32, 4, Instant(0))
        progress = Progress(f"r{n}", 0, (n,), 4, is_last=True)
        run(bench, StepOrders(offers=(Offer(f"r{n}", asked, 0),), progress=(progress,)))
    stalled = StepOrders(is_stalled=True)
    bench.rank.poll({"r1", "r2"}, 0.0)
    run(bench, stalled)  # r0 is still vLLM's: withdrawing it would make no room
    assert bench.rank.poll(set(), 0.0) == ({"r1"}, set())
    assert set(bench.port.sends) == {tickets[0], tickets[2]}
    run(bench, StepOrders())
    assert bench.rank.poll(set(), 0.0) == (set(), set())
    run(bench, stalled)
    assert bench.rank.poll(set(), 0.0) == ({"r2"}, set())


def test_how_full_vllm_was_at_its_last_step_can_be_asked(bench: Bench) -> None:
    assert bench.rank.occupancy is None
    for num_free in (5, 8):
        full = Occupancy(num_waiting=1, num_blocks=8, num_free_blocks=num_free, block_size=4)
        run(bench, StepOrders(occupancy=full))
        assert bench.rank.occupancy == full
