"""Baton's connector under vLLM's own scheduler, with one rank or two.

Clients come and leave, agents land and fail handoffs, stores answer and forget, vLLM preempts,
pauses and resets: at random, from a seed that a failure shows. Each slot of each rank's KV cache
has the token prefix whose KV it holds. What must hold: vLLM's assertions; a request computes on KV
of its own tokens alone, of the weights since the last reset; peers read nothing else from blocks
that are offered; in the end nothing is left over.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
from prometheus_client import CollectorRegistry

from baton.auth.ticket import Ticket, WorkerRef, hash_tenant, seal
from baton.engines.vllm.identity import RankFacts
from baton.engines.vllm.rank_handoffs import RankHandoffs
from baton.engines.vllm.rank_observer import RankObserver
from baton.engines.vllm.rank_prompts import RankSetting
from baton.engines.vllm.step_orders import NO_ORDERS
from baton.errors import StoreError
from baton.handoff.interface import (
    BlocksQuiescent,
    EngineSteps,
    KeepOrder,
    KVLanded,
    KVSent,
    LoadOrder,
    LookupOrder,
    PrefixFound,
)
from baton.ids import Epoch, TicketId, WorkerId, new_ticket_id
from baton.kv.layout import KVLayout
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.trace import TraceRing
from baton.telemetry.transfers import TransferTable
from baton.testing.clocks import ManualClock
from tests.lazy_modules import LazyModule
from tests.tickets import issue
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    configure,
    kv_cache_utils,
    main_layers,
    write_model,
)
from tests.unit.engines_vllm.scripted_port import ScriptedPort, SettlingEvent

if TYPE_CHECKING:
    from pathlib import Path

    from baton.kv.identity import Adapter

connector = LazyModule("baton.engines.vllm.connector")
vllm_config = LazyModule("vllm.config")
aggregation = LazyModule("vllm.distributed.kv_transfer.kv_connector.utils")
hashing = LazyModule("vllm.utils.hashing")
sampling = LazyModule("vllm.sampling_params")
schedulers = LazyModule("vllm.v1.core.sched.scheduler")
async_schedulers = LazyModule("vllm.v1.core.sched.async_scheduler")
outputs = LazyModule("vllm.v1.outputs")
requests = LazyModule("vllm.v1.request")
grammars = LazyModule("vllm.v1.structured_output")

ENTRY_TOKENS: Final = 48
NUM_LAYERS: Final = 3
BLOCK_BYTES: Final = NUM_LAYERS * BLOCK_SIZE * 2 * 2 * 32 * 4
VOCABULARY: Final = 97
NUM_EVENTS: Final = 400
PEER = ("127.0.0.1:50", "127.0.0.1:51")


class Answer:
    """A prompt, then what it is answered with. `prefix(n)` names the first `n + 1` tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.num_prompt_tokens = len(prompt)
        self._tokens: list[int] = []
        self._prefixes: list[int] = []
        for token in prompt:
            self._add(token)

    def token(self, at: int) -> int:
        while len(self._tokens) <= at:
            self._add(self._prefixes[-1] % VOCABULARY)
        return self._tokens[at]

    def prefix(self, at: int) -> int:
        self.token(at)
        return self._prefixes[at]

    def _add(self, token: int) -> None:
        before = self._prefixes[-1] if self._prefixes else 0
        self._tokens.append(token)
        self._prefixes.append(hash((before, token)))


class Rank:
    """One rank of the server: what is Baton's is real, its agent and its store play."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.kv: list[list[object]] = [[None] * BLOCK_SIZE for _ in range(world.num_blocks)]
        self.port = ScriptedPort(NUM_LAYERS)
        self.orders: dict[TicketId, LookupOrder | LoadOrder | KeepOrder] = {}
        self.read: dict[TicketId, tuple[int, int]] = {}
        self.entries: set[object] = set()
        self.steps, self.block_size = EngineSteps(), ENTRY_TOKENS
        if world.has_store and world.recomputes:
            self.port.prefixes = self
        wake_event = self.port.wake_event = SettlingEvent(self.port, world.clock)
        worker, epoch = world.identity.of_rank(number)
        table = TransferTable(epoch, world.clock)
        instruments = HandoffInstruments(CollectorRegistry(), ReceivePaths(("shared",)), (), table)
        self.observer = RankObserver(TraceRing(64), instruments)
        self.handoffs = RankHandoffs(
            RankSetting(
                worker=worker,
                epoch=epoch,
                rank=number,
                layout=world.layout,
                layers={f"layer{n}": n for n in range(NUM_LAYERS)},
            ),
            self.port,
            wake_event=wake_event,
            clock=world.clock,
            observer=self.observer,
        )

    def run(self, finished: set[str], *, has_tokens: bool) -> Any:
        """A step, as vLLM's model runner has it, but for the forward pass before it."""
        handoffs, output = self.handoffs, outputs.KVConnectorOutput()
        if has_tokens:
            for layer in range(self.world.random.randrange(NUM_LAYERS + 1)):
                if handoffs.follows_layers:
                    handoffs.layer_done(f"layer{layer}")
            handoffs.forward_launched()
        handoffs.end_step()
        sent, received = handoffs.get_finished(finished, 0.0 if has_tokens else 0.01)
        output.finished_sending, output.finished_recving = sent or None, received or None
        output.invalid_block_ids = handoffs.take_invalid_blocks()
        report = handoffs.take_report()
        handoffs.take_records()
        if report is not None:
            output.kv_connector_worker_meta = connector.RankReport(report)
        return output

    # The agent.

    def land(self, ticket: TicketId) -> None:
        order = self.port.receives[ticket].order
        answer = self.world.answers[order.ticket.request_id]
        for at in range(order.start, order.num_tokens):
            self._set(order.blocks, at, (0, answer.prefix(at)))
        self.port.land(ticket)

    def play(self) -> None:
        live = [*self.port.receives, *self.port.sends]
        if not live:
            return
        ticket, chance = self.world.random.choice(live), self.world.random.random()
        receive, send = self.port.receives.get(ticket), self.port.sends.get(ticket)
        if receive is not None and (receive.is_failed or receive.is_aborted):
            self.port.quiesce(ticket)
        elif receive is not None and chance < 0.75:
            self.land(ticket)
        elif receive is not None:
            self.port.fail(ticket)
        elif send is not None and send.is_finished and chance < 0.8:
            self.port.sent(ticket)
        elif send is not None and (send.is_aborted or chance < 0.3):
            self.port.fail_send(ticket)

    def check_offers(self) -> None:
        """What a peer may read is the KV of the prompt that was offered."""
        for send in self.port.sends.values():
            answer = self.world.answers[send.order.ticket.request_id]
            num_ready = 0 if send.is_aborted else min(send.ready.values())
            for at in range(num_ready):
                found: Any = self._get(send.order.blocks, at)
                assert found[1] == answer.prefix(at), "a peer reads what is another's"

    # The store, as `ReadsPrefixes`.

    def start_lookup(self, order: LookupOrder) -> None:
        self.orders[order.id] = order

    def start_load(self, order: LoadOrder) -> None:
        self.orders[order.id] = order

    def start_keep(self, order: KeepOrder) -> None:
        self.orders[order.id] = order

    def hurry(self, *, is_hurried: bool) -> None:
        """Answers come when they come."""

    def drop(self, num_tokens: int) -> None:
        """Nothing was kept of it."""

    def abort_load(self, order: TicketId) -> None:
        if self.orders.pop(order, None) is not None:
            self.port._emit(BlocksQuiescent(order))

    def release(self, order: TicketId) -> None:
        self.read.pop(order, None)

    def put_in_blocks(self, order: LoadOrder) -> int:
        start, stop = self.read.pop(order.id)
        assert start <= order.start
        assert len(order.prompt_ids) <= stop
        self._load(order, len(order.prompt_ids))
        return len(order.prompt_ids)

    def answer(self) -> None:
        """Answer one order, and forget an entry at times."""
        if self.entries and self.world.random.random() < 0.1:
            self.entries.discard(self.world.random.choice(list(self.entries)))
        if not self.orders:
            return
        order, num_tokens = self.orders.pop(self.world.random.choice(list(self.orders))), 0
        try:
            if isinstance(order, KeepOrder):
                with order.guard:
                    self._keep(order)
            elif isinstance(order, LoadOrder):
                num_tokens = max(order.start, self._count(order))
                with order.guard:
                    self._load(order, num_tokens)
        except StoreError:
            num_tokens = 0
        if isinstance(order, KeepOrder):
            self.port._emit(KVSent(order.id))
        elif isinstance(order, LoadOrder):
            self.port._emit(KVLanded(order.id, None, num_tokens))
        else:
            num_tokens = max(order.start, self._count(order))
            is_read = num_tokens > order.start and self.world.random.random() < 0.6
            if is_read:
                self.read[order.id] = order.start, num_tokens
            self.port._emit(PrefixFound(order.id, num_tokens, 0.0, is_read))

    def _count(self, order: LookupOrder) -> int:
        num_entries, prefix = 0, 0
        for at, token in enumerate(order.prompt_ids.tolist(), 1):
            prefix = hash((prefix, token))
            if at % ENTRY_TOKENS == 0:
                if (order.adapter, prefix) not in self.entries:
                    break
                num_entries += 1
        return num_entries * ENTRY_TOKENS

    def _load(self, order: LoadOrder, stop: int) -> None:
        prefix = 0
        for at, token in enumerate(order.prompt_ids.tolist()[:stop]):
            prefix = hash((prefix, token))
            if at >= order.start:
                self._set(order.blocks, at, (self.world.find_weights(order.adapter), prefix))

    def _keep(self, order: KeepOrder) -> None:
        prefix = 0
        for at, token in enumerate(order.token_ids.tolist()):
            prefix = hash((prefix, token))
            kept = self.world.find_weights(order.adapter), prefix
            assert self._get(order.blocks, at) == kept, "kept as another's"
            if (at + 1) % ENTRY_TOKENS == 0:
                self.entries.add((order.adapter, prefix))

    def _get(self, table: Any, at: int) -> object:
        block = table.blocks[at // BLOCK_SIZE - table.first]
        return self.kv[int(block)][at % BLOCK_SIZE]

    def _set(self, table: Any, at: int, slot: object) -> None:
        block = table.blocks[at // BLOCK_SIZE - table.first]
        self.kv[int(block)][at % BLOCK_SIZE] = slot


@dataclass(frozen=True)
class Work:
    """Tokens `[start, stop)` of a request are computed in `blocks`; `ends`: with the next token."""

    request: str
    start: int
    stop: int
    blocks: list[int]
    ends: bool


class World:
    def __init__(self, seed: int, folder: Path) -> None:
        draw = self.random = random.Random(seed)
        self.is_ahead, self.num_ranks = draw.random() < 0.5, draw.choice((1, 2, 2))
        self.recomputes, self.has_store = draw.random() < 0.7, draw.random() < 0.7
        self.num_blocks = draw.choice((18, 24, 48))
        self.clock = ManualClock()
        self.weights, self._weights_of = 0, dict[Any, int]({None: 0})
        self.layout = KVLayout.gqa(NUM_LAYERS, 4, 32, block_size=BLOCK_SIZE, dtype="float32")
        if draw.random() < 0.3:
            self.layout = KVLayout.mla(NUM_LAYERS, 64, block_size=BLOCK_SIZE, dtype="float32")
        self.scheduler = self._make_scheduler(write_model(folder / "model"))
        self.connector = self.scheduler.connector
        admission = self.admission = self.connector._scheduler
        admission._clock = self.clock
        if admission._prefixes is not None:
            admission._prefixes._clock = self.clock
            admission._prefixes._schedule.cost.answered_at = self.clock.now()
        self.identity = admission._identity
        self.ranks = [Rank(self, number) for number in range(self.num_ranks)]
        modes = ("push", "pull", "pool") if self.has_store else ("push", "pull")
        self.connector.set_xfer_handshake_metadata({
            number: connector.RankHandshake(
                RankFacts(f"127.0.0.1:{number + 1}", "http://rank", "f" * 64, self.layout, modes)
            )
            for number in range(self.num_ranks)
        })
        self._aggregator = aggregation.KVOutputAggregator(self.num_ranks)
        hash_of = hashing.get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_of)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_of)
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.answers: dict[str, Answer] = {}
        self._generated: dict[str, list[int]] = {}
        self._shared = [draw.choices(range(VOCABULARY), k=160) for _ in range(3)]

    def find_weights(self, adapter: Adapter | None) -> int:
        """The weights that an identity of KV stands for: those of its first use."""
        return self._weights_of.setdefault(adapter, self.weights)

    def _make_scheduler(self, model: str) -> Any:
        draw = self.random
        config = configure(
            model,
            max_num_seqs=draw.choice((2, 6)),
            max_num_batched_tokens=draw.choice((64, 128, 512)),
            async_scheduling=False,
            scheduling_policy=draw.choice(("fcfs", "priority")),
            enable_prefix_caching=draw.random() < 0.8,
        )
        config.scheduler_config.async_scheduling = self.is_ahead
        config.parallel_config.tensor_parallel_size = self.num_ranks
        store = {"store": {"tiers": ["host"], "block_size": ENTRY_TOKENS}}
        config.kv_transfer_config = vllm_config.KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="baton.engines.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute" if self.recomputes else "fail",
            kv_connector_extra_config={
                "name": "me",
                "fingerprint": "f" * 64,
                **(store if self.has_store else {}),
            },
        )
        memory = [BLOCK_BYTES * self.num_blocks]
        (cache,) = kv_cache_utils.get_kv_cache_configs(config, [main_layers()], memory)
        assert cache.num_blocks == self.num_blocks
        config.cache_config.num_gpu_blocks = cache.num_blocks
        made = async_schedulers.AsyncScheduler if self.is_ahead else schedulers.Scheduler
        return made(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=grammars.StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )

    # What happens.

    def run(self) -> None:
        """All of it, and then the rest of what was begun."""
        pauses = schedulers.PauseState
        events = (
            (12, self._arrive),
            (3, self._abort),
            (25, lambda: self.random.choice(self.ranks).play()),
            (15, lambda: self.random.choice(self.ranks).answer()),
            (1, self._reset),
            (1, lambda: self.clock.advance(self.random.choice((0.01, 2.0, 10.0)))),
            (1, lambda: self.scheduler.set_pause_state(pauses.PAUSED_NEW)),
            (1, lambda: self.scheduler.set_pause_state(pauses.PAUSED_ALL)),
            (3, lambda: self.scheduler.set_pause_state(pauses.UNPAUSED)),
            (38, self._step),
        )
        weights, actions = zip(*events, strict=True)
        for action in self.random.choices(actions, weights, k=NUM_EVENTS):
            action()
        self.scheduler.set_pause_state(pauses.UNPAUSED)
        for _ in range(1000):
            self._settle()
            self._step()
            self.clock.advance(0.2)
            if not (self._under_way or self.scheduler.has_requests()):
                break
        self._settle()
        self._check_end()

    def _arrive(self) -> None:
        draw, name = self.random, f"r{len(self.answers)}"
        prompt = self.random.choice(self._shared)[: 32 * draw.randrange(6)]
        prompt = prompt + draw.choices(range(VOCABULARY), k=draw.choice((1, 5, 31, 32, 33, 60)))
        params: dict[str, object] | None = None
        part, num_peers = draw.choice(("send", "receive", "alone", "alone")), draw.choice((1, 2))
        addresses = tuple(f"127.0.0.1:{n + 1}" for n in range(self.num_ranks))
        me = WorkerRef(
            self.identity.worker,
            self.identity.epoch,
            addresses[0],
            addresses if self.num_ranks > 1 else (),
        )
        peer = WorkerRef(WorkerId("peer"), Epoch("1" * 32), PEER[0], PEER if num_peers > 1 else ())
        if part != "alone":
            ends, mode = (me, peer) if part == "send" else (peer, me), draw.choice(("push", "pull"))
            ticket = Ticket(new_ticket_id(), name, *ends, mode, issue(60), hash_tenant(""))
            sealed = seal(ticket, self.admission._reader._credentials)
            asks = "do_remote_decode" if part == "send" else "do_remote_prefill"
            params = {"baton_ticket": sealed, asks: True}
        asked = requests.Request(
            name,
            prompt,
            sampling.SamplingParams(
                max_tokens=draw.choice((1, 2, 5, 40)),
                ignore_eos=True,
                extra_args=None if params is None else {"kv_transfer_params": params},
            ),
            None,
            block_hasher=self._hasher,
            priority=draw.randrange(3),
            arrival_time=float(len(self.answers)),
        )
        self.answers[name], self._generated[name] = Answer(prompt), []
        self.scheduler.add_request(asked)

    def _abort(self) -> None:
        live = [name for name, each in self.scheduler.requests.items() if not each.is_finished()]
        if live:
            aborted = requests.RequestStatus.FINISHED_ABORTED
            self.scheduler.finish_requests(self.random.choice(live), aborted)

    def _reset(self) -> None:
        """Weights are replaced where vLLM has reset its caches. Else nothing has changed."""
        before, is_done = self.admission._adapters.last_reset, False
        with suppress(RuntimeError):  # blocks are in use
            is_done = self.scheduler.reset_prefix_cache(
                reset_running_requests=self.random.random() < 0.7, reset_connector=True
            )
        pool = self.scheduler.kv_cache_manager.block_pool
        assert is_done == (pool.get_num_free_blocks() == self.num_blocks - 1)
        assert is_done == (self.admission._adapters.last_reset != before)
        if is_done and not self._under_way:
            self.weights += 1

    def _settle(self) -> None:
        """Everything that a peer or a store has to do is done."""
        for rank in self.ranks:
            rank.port.settle_aborted()
            for ticket, receive in tuple(rank.port.receives.items()):
                if receive.is_failed:
                    rank.port.quiesce(ticket)
                else:
                    rank.land(ticket)
            for ticket, send in tuple(rank.port.sends.items()):
                if send.is_finished:
                    rank.port.sent(ticket)
            while rank.orders:
                rank.answer()

    def _step(self) -> None:
        """As vLLM's engine: with asynchronous scheduling the next step is planned meanwhile."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            planned = scheduler.schedule()
            running = {each.request_id for each in scheduler.running}
            assert not running & self.admission._pressure._waiting
            self._under_way.append((planned, self._execute(planned)))
            is_full = len(self._under_way) == 1 + self.is_ahead
            if not is_full and (planned.total_num_scheduled_tokens or scheduler.has_requests()):
                return
        if not self._under_way:
            return
        if self.random.random() < 0.15:
            self._abort()
        planned, output = self._under_way.popleft()
        for each in scheduler.update_from_output(planned, output).values():
            for part in each.outputs:
                answer, generated = self.answers[part.request_id], self._generated[part.request_id]
                for token in part.new_token_ids:
                    assert token == answer.token(answer.num_prompt_tokens + len(generated))
                    generated.append(token)

    def _execute(self, planned: Any) -> Any:
        works = [self._find_work(*each) for each in planned.num_scheduled_tokens.items()]
        names = [work.request for work in works]
        sampled = [
            [self.answers[work.request].token(work.stop)] if work.ends else [] for work in works
        ]
        found = []
        for rank in self.ranks:
            orders = pickle.loads(pickle.dumps(planned.kv_connector_metadata)).orders
            if orders is not None:
                rank.handoffs.prepare(orders)
            rank.handoffs.begin_step(NO_ORDERS if orders is None else orders)
            for work in works:
                self._compute(rank, work)
            output = rank.run(planned.finished_req_ids, has_tokens=bool(works))
            rank.check_offers()
            if works:
                indices = {name: index for index, name in enumerate(names)}
                made = outputs.ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index=indices,
                    sampled_token_ids=sampled,
                    kv_connector_output=output,
                )
            else:
                made = outputs.ModelRunnerOutput.with_kv_conn_output_only(output)
            found.append(copy(made))  # as from another process
        return found[0] if len(found) == 1 else self._aggregator.aggregate(found)

    def _find_work(self, name: str, num_tokens: int) -> Work:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        stop = request.num_computed_tokens
        return Work(name, stop - num_tokens, stop, blocks, not request.is_prefill_chunk)

    def _compute(self, rank: Rank, work: Work) -> None:
        answer = self.answers[work.request]
        for at in range(work.stop):
            slots, slot = rank.kv[work.blocks[at // BLOCK_SIZE]], at % BLOCK_SIZE
            if at >= work.start:
                slots[slot] = self.weights, answer.prefix(at)
            assert slots[slot] == (self.weights, answer.prefix(at)), f"{work.request}, token {at}"

    def _check_end(self) -> None:
        scheduler, admission = self.scheduler, self.admission
        assert not scheduler.requests
        for _ in range(2):  # one more for what was kept, in an idle server
            self.clock.advance(1.0)
            self._step()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        assert len(admission._schedule) == 0
        assert admission._held.num_blocks == 0
        assert not (admission._pressure._waiting | admission._pressure._held)
        if admission._prefixes is not None:
            assert len(admission._prefixes._schedule) == len(admission._prefixes._kept) == 0
        for rank in self.ranks:
            handoffs = rank.handoffs
            handoffs.get_finished(set(), 0.0)  # what a store answers an idle server
            handoffs.take_report()
            assert handoffs._sends.table.is_empty
            assert handoffs._loads.table.is_empty
            assert handoffs._abort_fanout._derived == rank.observer._open == rank.read == {}
            assert len(rank.observer._held) == 0
            assert handoffs._prefixes.is_idle


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.every) for seed in range(12, 40))]
)
def test_vllms_scheduler_and_the_connector_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    # It would change the logging of all tests behind this one. (The class imports the module.)
    monkeypatch.setattr(sys.modules[connector.BatonConnector.__module__], "join_logging", int)
    World(seed, tmp_path).run()
