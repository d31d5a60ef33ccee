"""Both sides of the vLLM connector under a model of vLLM's scheduler that asserts as vLLM does.

The model admits, chunks, preempts, aborts and finishes as it likes; the agent lands, fails and
drops handoffs as it likes. What must hold: vLLM is told of each load and each send exactly once and
only when it expects to be; no block is given to somebody else while a handoff may touch it; nothing
is left over in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from baton.auth.ticket import Ticket, WorkerRef
from baton.engines.vllm.handoff_schedule import (
    AwaitingBlocks,
    Ending,
    HandoffSchedule,
    Held,
    LocalCompute,
    Queued,
    Scheduled,
)
from baton.engines.vllm.rank_handoffs import RankHandoffs
from baton.engines.vllm.rank_observer import RankObserver
from baton.engines.vllm.rank_prompts import RankSetting
from baton.engines.vllm.step_orders import NO_ORDERS, Prompt
from baton.engines.vllm.tickets import Refusal
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.kv.layout import KVLayout
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.trace import TraceRing
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock
from tests.examples import examples
from tests.tickets import issue
from tests.unit.engines_vllm.scripted_port import ScriptedPort, SettlingEvent

BLOCK_SIZE = 4
NUM_BLOCKS = 24
NUM_LAYERS = 2
ME = WorkerRef(WorkerId("me"), Epoch("0" * 32), "127.0.0.1:1")
PEER = WorkerRef(WorkerId("peer"), Epoch("1" * 32), "127.0.0.1:2")


class Status(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Request:
    """As in vLLM: `num_computed` tokens are in `blocks`."""

    id: str
    num_prompt_tokens: int
    part: str
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_tokens: int = 0
    is_new: bool = True
    is_loaded: bool = False
    is_held: bool = False
    reported_blocks: int = 0


class VllmMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.port = ScriptedPort(NUM_LAYERS)
        self.wake_event = SettlingEvent(self.port, self.clock)
        self.port.wake_event = self.wake_event
        self.schedule = HandoffSchedule(BLOCK_SIZE)
        layout = KVLayout.gqa(NUM_LAYERS, 1, 8, block_size=BLOCK_SIZE, dtype="float32")
        setting = RankSetting(
            worker=ME.worker,
            epoch=ME.epoch,
            rank=0,
            layout=layout,
            layers={f"layer{n}": n for n in range(NUM_LAYERS)},
        )
        table = TransferTable(ME.epoch, self.clock)
        instruments = HandoffInstruments(CollectorRegistry(), ReceivePaths(("shared",)), (), table)
        self.worker = RankHandoffs(
            setting,
            self.port,
            wake_event=self.wake_event,
            clock=self.clock,
            observer=RankObserver(TraceRing(64), instruments),
        )
        self.free = list(range(NUM_BLOCKS))
        self.requests: dict[str, Request] = {}
        self.finished_ids: set[str] = set()
        self.preempted: list[str] = []
        self.count = 0
        self.sending: set[str] = set()

    # What clients do.

    @rule(
        num_tokens=st.integers(1, 40),
        part=st.sampled_from(["send", "receive", "receive", "refused", "alone"]),
    )
    def arrive(self, num_tokens: int, part: str) -> None:
        self.count += 1
        request = Request(f"r{self.count}", num_tokens, part, num_tokens=num_tokens)
        self.requests[request.id] = request
        ends = (ME, PEER) if part == "send" else (PEER, ME)
        ticket = Ticket(new_ticket_id(), request.id, *ends, "push", issue(600))
        prompt = Prompt(ticket, b"h" * 32, num_tokens, self.clock.now())
        match part:
            case "send":
                self.sending.add(request.id)
                self.schedule.add(request.id, Queued(prompt))
            case "receive":
                self.schedule.add(request.id, AwaitingBlocks(prompt))
            case "refused":
                self.schedule.add(request.id, LocalCompute(Refusal("stale_ticket", "old")))
            case _:
                pass

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._live()))
        is_loading = request.status is Status.LOADING and not request.is_loaded
        self._finish(request, "cancelled", delay=is_loading)

    # What vLLM does.

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        scheduled = self._plan(data)
        orders = self.schedule.step(scheduled, self.preempted)
        self.preempted = []
        for request, stop in ((self.requests[s.request], s.stop) for s in scheduled):
            request.num_computed = stop
        self.worker.prepare(orders)
        self._check_blocks_in_use(scheduled)
        self.worker.begin_step(orders)
        if scheduled:
            names = [f"layer{n}" for n in range(data.draw(st.integers(0, NUM_LAYERS)))]
            for name in (*names, "draft_model.layer0"):
                if self.worker.follows_layers:
                    self.worker.layer_done(name)
            self.worker.forward_launched()
        self.worker.end_step()
        waits = self.wake_event.num_waits
        sent, received = self.worker.get_finished(self.finished_ids, 0.0 if scheduled else 0.01)
        assert scheduled or self.wake_event.num_waits <= waits + 1
        self.finished_ids = set()
        self._update(scheduled, sent, received, self.worker.take_invalid_blocks(), data)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._running()))
        self._free(request)
        request.num_computed = 0
        request.status = Status.WAITING
        self.preempted.append(request.id)

    # What the agent does.

    @precondition(lambda self: self.port.receives or self.port.sends)
    @rule(data=st.data())
    def happen(self, data: st.DataObject) -> None:
        live = [*self.port.receives, *self.port.sends]
        ticket = data.draw(st.sampled_from(live))
        receive, send = self.port.receives.get(ticket), self.port.sends.get(ticket)
        if receive is not None:
            if receive.is_failed or receive.is_aborted:
                self.port.quiesce(ticket)
            elif data.draw(st.booleans()):
                self.port.land(ticket)
            else:
                self.port.fail(ticket)
        elif send is not None and send.is_finished and data.draw(st.booleans()):
            self.port.sent(ticket)
        elif send is not None:
            self.port.fail_send(ticket)

    @precondition(lambda self: self.port.receives or self.port.sends)
    @rule(data=st.data())
    def abort_from_peer(self, data: st.DataObject) -> None:
        live = [*self.port.receives, *self.port.sends]
        self.worker.abort_from_peer(data.draw(st.sampled_from(live)), "the gateway said so")

    @rule()
    def agent_dies(self) -> None:
        if self.count > 6:
            self.port.is_alive = False
            self.port.sends.clear()
            self.port.receives.clear()

    # What must hold.

    @invariant()
    def blocks_are_owned_once(self) -> None:
        owned = [block for r in self.requests.values() for block in r.blocks]
        assert sorted(owned + self.free) == list(range(NUM_BLOCKS))
        self.schedule.check_invariants()

    @invariant()
    def no_load_touches_a_block_of_somebody_else(self) -> None:
        loading = {
            block
            for r in self.requests.values()
            if r.status is Status.LOADING or r.status is Status.FINISHED
            for block in r.blocks
        }
        for receive in self.port.receives.values():
            assert loading.issuperset(receive.order.blocks.blocks.tolist())

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        for request in self._live():
            is_loading = request.status is Status.LOADING and not request.is_loaded
            self._finish(request, "cancelled", delay=is_loading)
        for _ in range(4):
            orders = self.schedule.step([], self.preempted)
            self.preempted = []
            self.worker.prepare(orders)
            self.worker.begin_step(orders)
            self.worker.end_step()
            self.port.settle_aborted()
            for ticket, send in tuple(self.port.sends.items()):
                assert send.is_finished, "a decode worker waits for what is not coming"
                self.port.sent(ticket)
            sent, received = self.worker.get_finished(self.finished_ids, 0.01)
            self.finished_ids = set()
            self._settle(sent, received)
        assert not self.requests
        assert sorted(self.free) == list(range(NUM_BLOCKS))
        assert len(self.schedule) == 0
        assert not self.port.sends
        assert not self.port.receives
        self.worker.begin_step(NO_ORDERS)
        self.worker.forward_launched()
        vouched = self.port.uncomputed[-1:]
        assert vouched in ([], [()]), "a prompt is vouched for that nobody will compute"
        assert self.port.offered == self.sending

    # The model's inside.

    def _plan(self, data: st.DataObject) -> list[Scheduled]:
        scheduled = []
        for request in self._running():
            stop = min(
                request.num_tokens, request.num_computed + data.draw(st.integers(1, 16), "chunk")
            )
            if stop > request.num_computed and self._grow(request, stop):
                scheduled.append(self._report_blocks(request, stop))
        for request in [r for r in self.requests.values() if r.status is Status.WAITING]:
            if request.num_computed == 0 and not self._admit(request, data):
                continue
            stop = min(
                request.num_tokens, request.num_computed + data.draw(st.integers(1, 16), "chunk")
            )
            if self._grow(request, stop):
                request.status = Status.RUNNING
                request.reported_blocks = 0
                scheduled.append(self._report_blocks(request, stop))
        return scheduled

    def _admit(self, request: Request, data: st.DataObject) -> bool:
        """Whether the request may compute now: False where it must wait for KV, or for blocks."""
        most_cached = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        num_cached = BLOCK_SIZE * data.draw(st.integers(0, most_cached), "cached")
        missing = self.schedule.count_missing(request.id, num_cached)
        assert missing == self.schedule.count_missing(request.id, num_cached)
        assert missing in {0, request.num_prompt_tokens - num_cached}
        if data.draw(st.booleans(), "told to ask again"):
            return False
        if not self._grow(request, num_cached + missing or 1):
            return False
        request.num_computed = num_cached + missing
        self.schedule.allocated(request.id, request.blocks, missing)
        if missing:
            assert request.part == "receive"
            request.status = Status.LOADING
            return False
        return True

    def _report_blocks(self, request: Request, stop: int) -> Scheduled:
        blocks = request.blocks[request.reported_blocks :]
        request.reported_blocks = len(request.blocks)
        return Scheduled(request.id, tuple(blocks), request.num_computed, stop)

    def _update(
        self,
        scheduled: list[Scheduled],
        sent: set[str],
        received: set[str],
        invalid: set[int],
        data: st.DataObject,
    ) -> None:
        for request in [r for r in self.requests.values() if r.status is Status.LOADING]:
            bad = [n for n, block in enumerate(request.blocks) if block in invalid]
            if bad:
                assert request.id in received
                request.num_computed = min(bad) * BLOCK_SIZE
            if request.id in received and self.port.is_alive:
                assert bool(bad) == (request.id in self.port.failed)
        for work in scheduled:
            request = self.requests[work.request]
            if request.num_computed < request.num_tokens:
                continue
            request.num_tokens += 1
            if data.draw(st.booleans(), "stops"):
                self._finish(request, "stop", delay=False)
        report = self.worker.take_report()
        for request_id, reason in () if report is None else report.failed_sends:
            self.schedule.send_failed(request_id, reason)
        for request_id in received:
            self.schedule.received(request_id)
        self._settle(sent, received)

    def _settle(self, sent: set[str], received: set[str]) -> None:
        """As `_update_from_kv_xfer_finished` does, with its assertions."""
        for request_id in received:
            assert request_id in self.requests
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                request.is_loaded = True
                if request.num_computed == 0:
                    self._free(request)
                request.num_computed = min(request.num_computed, request.num_tokens - 1)
                request.status = Status.WAITING
            else:
                assert request.status is Status.FINISHED
                self._forget(request)
        for request_id in sent:
            assert request_id in self.requests
            assert self.requests[request_id].is_held
            self._forget(self.requests[request_id])

    def _finish(self, request: Request, outcome: str, *, delay: bool) -> None:
        result = self.schedule.finish(request.id, Ending(outcome, 1))
        request.status = Status.FINISHED
        request.is_held = isinstance(result, Held)
        assert not (request.is_held and delay)
        self.finished_ids.add(request.id)
        if not request.is_held and not delay:
            self._forget(request)

    def _check_blocks_in_use(self, scheduled: list[Scheduled]) -> None:
        """No send reads a block that this step's forward writes for another request."""
        for send in self.port.sends.values():
            request = next(
                (r for r in self.requests.values() if r.id == send.order.ticket.request_id), None
            )
            table = send.order.blocks.blocks
            if len(table) == 0:
                continue  # withdrawn: there is nothing to read
            ready = -(-max(send.ready.values()) // BLOCK_SIZE)
            readable = [b for b in table[:ready].tolist() if b >= 0]
            assert request is not None, "its blocks were freed while it may be read"
            assert request.blocks[: len(readable)] == readable
        assert len({s.request for s in scheduled}) == len(scheduled)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK_SIZE) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop(0))
        return True

    def _free(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []

    def _forget(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.id]

    def _live(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is not Status.FINISHED]

    def _running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is Status.RUNNING]


VllmMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestVllm = VllmMachine.TestCase
