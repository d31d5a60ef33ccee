"""Two engines with threads, real agents and real transports, in one process."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import pytest

pytest.importorskip("transformers")

from baton.auth.credentials import Credentials
from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant, MachineClock
from baton.engines.interface import (
    Colocated,
    DecodeRequest,
    GenerationRequest,
    NewToken,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
)
from baton.engines.transformers import model_runner
from baton.engines.transformers.engine import TransformersEngine
from baton.engines.transformers.options import TransformersOptions
from baton.handoff.agent import HandoffAgent
from baton.handoff.kv_views import KVView
from baton.handoff.options import AgentOptions
from baton.ids import RequestId, WorkerId, new_epoch, new_ticket_id
from baton.telemetry.trace import RequestSpan, Stamp
from baton.transfer.interface import TRANSPORTS, Transport, TransportContext
from baton.transfer.region import allocate_shared_region
from tests.tickets import issue
from tests.unit.engines.harness import make_prompt, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.auth.ticket import HandoffMode
    from baton.engines.interface import EngineUpdate, RequestKind
    from baton.engines.transformers.loading import LoadedModel
    from baton.engines.transformers.sequence import Sequence as EngineSequence
    from baton.handoff.dispatcher import HandoffDispatcher
    from baton.handoff.interface import LandingLayers, SampledToken
    from baton.handoff.messages import TransferOp
    from baton.ids import TicketId
    from baton.transfer.devices.extents import AllocateRegion

CLOCK = MachineClock()
WAIT_TIMEOUT_S = 90.0
NUM_PROMPTS = 12
PROMPTS = {f"r{i}": make_prompt(10 + 9 * i, seed=i % 3) for i in range(NUM_PROMPTS)}


SAMPLING = {
    name: SamplingParams(max_tokens=8, temperature=0.9 * (i % 2), seed=i)
    for i, name in enumerate(PROMPTS)
}


def until(condition: Callable[[], bool]) -> None:
    """Wait for what follows by itself, such as the release of blocks that a peer has read."""
    deadline = time.monotonic() + WAIT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class WithoutFirstToken:
    """An agent to an engine whose peers sample the first token themselves, as vLLM's do."""

    def __init__(self, agent: HandoffAgent) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> object:
        return getattr(self._agent, name)

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        assert first_token is not None
        self._agent.prefill_done(ticket, None)


class Gate:
    """Lets a prefill engine go on from `place` once it is open; its peer sees nothing until then.

    `place`: the layer that its step has computed last, or "end": of the whole prompt.
    """

    def __init__(self, place: int | Literal["end"]) -> None:
        self._place, self._opened = place, threading.Event()
        self.arrived = threading.Event()

    def pass_from(self, place: int | Literal["end"]) -> None:
        if place == self._place:
            self.arrived.set()
            assert self._opened.wait(WAIT_TIMEOUT_S)

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()


class BothGates(Gate):
    """One after the other."""

    def __init__(self, *gates: Gate) -> None:
        self._gates = gates

    def pass_from(self, place: int | Literal["end"]) -> None:
        for gate in self._gates:
            gate.pass_from(place)

    def open(self) -> None:
        for gate in self._gates:
            gate.open()


class GatedSteps:
    """An agent to an engine whose steps stop at a gate, behind what they have reported."""

    def __init__(self, agent: HandoffAgent, gate: Gate) -> None:
        self._agent, self._gate = agent, gate

    def __getattr__(self, name: str) -> object:
        return getattr(self._agent, name)

    def layer_ready(
        self, tickets: Sequence[tuple[TicketId, int]], layer: int, after: object = None
    ) -> None:
        self._agent.layer_ready(tickets, layer, after)
        self._gate.pass_from(layer)

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        self._gate.pass_from("end")
        self._agent.prefill_done(ticket, first_token)


@dataclass
class Node:
    """One worker without HTTP."""

    engine: TransformersEngine
    agent: HandoffAgent | HandoffDispatcher
    ref: WorkerRef
    hands_over_first_token: bool = True
    tenant_salt: str = ""
    prompts: dict[str, NDArray[np.int32]] = field(default_factory=lambda: PROMPTS)
    sampling: dict[str, SamplingParams] = field(default_factory=lambda: SAMPLING)
    gate: Gate | None = None

    def __post_init__(self) -> None:
        self.updates: list[EngineUpdate] = []
        self.traces: dict[str, RequestSpan] = {}
        self._changed = threading.Condition()
        self.agent.start(self.engine.wake)
        self.ref = replace_address(self.ref, self.agent.address)
        port = self.agent if self.hands_over_first_token else WithoutFirstToken(self.agent)
        if self.gate is not None:
            port = GatedSteps(self.agent, self.gate)
        self.engine.start(self.sink, port)

    def sink(self, updates: Sequence[EngineUpdate]) -> None:
        with self._changed:
            self.updates += updates
            self._changed.notify_all()

    def submit(self, name: str, leg: RequestKind) -> None:
        """A prefill request computes what its ticket hands over, as a worker has it do."""
        trace = RequestSpan(request_id=name, worker=self.ref.worker, epoch=self.ref.epoch, role="")
        self.traces[name] = trace
        prompt = self.prompts[name]
        if isinstance(leg, PrefillRequest):
            prompt = prompt[: leg.ticket.count_handed_over(len(prompt))]
        self.engine.submit(
            GenerationRequest(
                RequestId(name),
                prompt,
                self.sampling[name],
                leg,
                self.tenant_salt,
                Instant(CLOCK.now() + WAIT_TIMEOUT_S),
                trace,
            )
        )

    def wait_for_ends(self) -> None:
        def ends() -> int:
            return sum(isinstance(u, RequestFailed) or u.finish is not None for u in self.updates)

        with self._changed:
            assert self._changed.wait_for(lambda: ends() == len(self.traces), WAIT_TIMEOUT_S)

    def answers(self) -> dict[str, list[int]]:
        return {
            name: [
                u.token.token_id
                for u in self.updates
                if isinstance(u, NewToken) and u.request == name
            ]
            for name in self.traces
        }


def replace_address(ref: WorkerRef, address: str) -> WorkerRef:
    return WorkerRef(ref.worker, ref.epoch, address)


TransportMaker: TypeAlias = "Callable[[str, TransportContext], Transport]"


def make_transport(kind: str, context: TransportContext) -> Transport:
    return TRANSPORTS.build(kind, {})(context)


@contextmanager
def node(
    name: str,
    kind: str,
    key: Credentials,
    *,
    op: TransferOp = "WRITE",
    hands_over_first_token: bool = True,
    loaded: LoadedModel | None = None,
    timeout_s: float = WAIT_TIMEOUT_S,
    make: TransportMaker = make_transport,
    allocate: AllocateRegion = allocate_shared_region,
    layer_batch_bytes: int = 0,
    gate: Gate | None = None,
    **options: int,
) -> Iterator[Node]:
    engine = TransformersEngine(
        TransformersOptions(**{"num_blocks": 100, "num_threads": 1, **options}),
        loaded or tiny_llama(),
        path="nowhere",
        clock=CLOCK,
        allocate=allocate,
    )
    epoch = new_epoch()
    context = TransportContext(credentials=key, epoch=epoch, bind_host="127.0.0.1", clock=CLOCK)
    agent = HandoffAgent(
        AgentOptions(
            worker=WorkerId(name),
            epoch=epoch,
            fingerprint=engine.info.fingerprint,
            views=(KVView(engine.info.layout, engine.region, peer_mappings=engine.peer_mappings),),
            transports=(make(kind, context),),
            credentials=key,
            clock=CLOCK,
            timeout_s=timeout_s,
            preferred_op=op,
            layer_batch_bytes=layer_batch_bytes,
        )
    )
    ref = WorkerRef(WorkerId(name), epoch, "")
    running = Node(engine, agent, ref, hands_over_first_token, gate=gate)
    try:
        yield running
    finally:
        if gate is not None:
            gate.open()
        agent.stop()
        engine.stop(WAIT_TIMEOUT_S)


def make_ticket(
    prefill: Node, decode: Node, mode: HandoffMode = "push", num_prefix_tokens: int = 0
) -> Ticket:
    return Ticket(
        id=new_ticket_id(),
        request_id="r",
        prefill=prefill.ref,
        decode=decode.ref,
        mode=mode,
        issue=issue(WAIT_TIMEOUT_S),
        num_prefix_tokens=num_prefix_tokens,
    )


@pytest.fixture(scope="module", name="expected")
def expected_fixture() -> dict[str, list[int]]:
    with node("alone", "tcp", Credentials.generate()) as alone:
        for name in PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


@pytest.mark.parametrize(
    ("kind", "op"), [("shared", "WRITE"), ("shared", "READ"), ("tcp", "WRITE")]
)
@pytest.mark.parametrize("with_first_token", [True, False])
def test_many_requests_at_once_give_the_tokens_of_one_engine_alone(
    kind: str, op: TransferOp, with_first_token: bool, expected: dict[str, list[int]]
) -> None:
    key = Credentials.generate()
    with (
        node(
            "p",
            kind,
            key,
            hands_over_first_token=with_first_token,
            block_size=16,
            max_batch_tokens=40,
        ) as prefill,
        node("d", kind, key, op=op, block_size=8) as decode,
    ):
        for name in PROMPTS:
            ticket = make_ticket(prefill, decode)
            decode.submit(name, DecodeRequest(ticket))
            prefill.submit(name, PrefillRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers() == expected
        stats = decode.engine.stats()
        assert stats.received_prompt_tokens > 0
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * NUM_PROMPTS
        assert Stamp.KV_READY in decode.traces["r0"].stamps
        assert Stamp.PREFILL_STARTED not in decode.traces["r0"].stamps


@pytest.mark.parametrize("op", ["WRITE", "READ"])
@pytest.mark.parametrize("mode", ["push", "pull", "reference"])
def test_of_a_prompts_first_tokens_alone(
    op: TransferOp, mode: HandoffMode, expected: dict[str, list[int]]
) -> None:
    """Whatever the number, a block's or not: decode computes the others."""
    key = Credentials.generate()
    lengths = {name: len(prompt) for name, prompt in PROMPTS.items()}
    shares = {
        name: max(1, (num_tokens // 2, num_tokens - 1, num_tokens // 16 * 16, 2**31 - 1)[i % 4])
        for i, (name, num_tokens) in enumerate(lengths.items())
    }
    with (
        node("p", "shared", key, block_size=8, num_blocks=300) as prefill,
        node("d", "shared", key, op=op, block_size=8, min_handoff_tokens=1) as decode,
    ):
        tickets = {name: make_ticket(prefill, decode, mode, shares[name]) for name in PROMPTS}
        for name, ticket in tickets.items():
            prefill.submit(name, PrefillRequest(ticket))
        if mode == "pull":
            prefill.wait_for_ends()
        for name, ticket in tickets.items():
            decode.submit(name, DecodeRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers() == expected
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * NUM_PROMPTS
        received = {name: trace.num_received_tokens for name, trace in decode.traces.items()}
        assert received == {
            name: max(0, min(shares[name], lengths[name]) - trace.num_cached_tokens)
            for name, trace in decode.traces.items()
        }
        assert all(received[name] for name in ("r0", "r1", "r2")), "their beginnings differ"


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_prefix_that_is_cached_is_pushed_and_nothing_computed_for_it(
    op: TransferOp, expected: dict[str, list[int]]
) -> None:
    key = Credentials.generate()
    with (
        node("p", "shared", key, block_size=8, num_blocks=300, max_batch_tokens=16) as prefill,
        node("d", "shared", key, op=op, block_size=8) as decode,
    ):
        prefill.submit("r11", Colocated())
        prefill.wait_for_ends()
        for name in ("r7", "r9", "r10"):
            prefill.submit(name, Colocated())
        ticket = make_ticket(prefill, decode, num_prefix_tokens=104)
        prefill.prompts = {**PROMPTS, "prefix": PROMPTS["r11"]}
        prefill.sampling = {**SAMPLING, "prefix": SAMPLING["r11"]}
        prefill.submit("prefix", PrefillRequest(ticket))
        decode.submit("r11", DecodeRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers()["r11"] == expected["r11"]
        assert decode.traces["r11"].num_received_tokens == 104
        pushed = prefill.traces["prefix"]
        assert pushed.num_cached_tokens == pushed.num_prompt_tokens == 104
        assert Stamp.PREFILL_STARTED not in pushed.stamps
        until(lambda: prefill.engine.stats().num_free_blocks == 300)


def test_answers_survive_the_loss_of_the_prefill_worker(expected: dict[str, list[int]]) -> None:
    key = Credentials.generate()
    with node("d", "tcp", key, block_size=8) as decode:
        with node("p", "tcp", key, block_size=16, max_batch_tokens=20) as prefill:
            for name in PROMPTS:
                ticket = make_ticket(prefill, decode)
                decode.submit(name, DecodeRequest(ticket))
                prefill.submit(name, PrefillRequest(ticket))
        decode.wait_for_ends()
        assert decode.answers() == expected


SPLIT_PROMPTS = {
    f"s{i}": make_prompt(num_tokens, seed=50 + i)
    for i, num_tokens in enumerate((200, 33, 104, 150, 73, 42))
}
"""No two begin alike: nothing of them is cached."""
SPLIT_SAMPLING = {
    name: SamplingParams(max_tokens=8, temperature=0.9 * (i % 2), seed=i)
    for i, name in enumerate(SPLIT_PROMPTS)
}


@pytest.fixture(scope="module", name="expected_of_split")
def expected_of_split_fixture() -> dict[str, list[int]]:
    with node("alone", "tcp", Credentials.generate(), block_size=8) as alone:
        alone.prompts, alone.sampling = SPLIT_PROMPTS, SPLIT_SAMPLING
        for name in SPLIT_PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


@dataclass
class LandingLog:
    """What a decode engine has computed before all KV was there; its scheduler is watched.

    `begun` opens the gate of its peer: that has one layer to compute, or more. So none is late,
    and all that can be computed meanwhile is.
    """

    gate: Gate
    num_begun: int = 0
    num_early_tokens: int = 0
    num_late: int = 0
    has_early_token: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    opens_gate: bool = True

    def watch(self, node: Node) -> None:
        scheduler = node.engine._scheduler
        begin, wait = scheduler.begin_landing, scheduler.await_landing

        def begin_landing(ticket: TicketId, layers: LandingLayers) -> None:
            assert layers.num == 1, "the second one is behind the gate"
            begin(ticket, layers)
            self.num_begun += 1
            self.has_begun.set()
            if self.opens_gate:
                self.gate.open()

        def await_landing(sequence: EngineSequence, token: SampledToken | None = None) -> None:
            wait(sequence, token)
            if token is None:
                self.num_late += 1
            else:
                self.num_early_tokens += 1
                self.has_early_token.set()

        scheduler.begin_landing, scheduler.await_landing = begin_landing, await_landing


def submit_split(prefill: Node, decode: Node, name: str) -> int:
    """Prefill computes the first half, in whole blocks; how many tokens."""
    num_handed = len(SPLIT_PROMPTS[name]) // 16 * 8
    ticket = make_ticket(prefill, decode, num_prefix_tokens=num_handed)
    decode.submit(name, DecodeRequest(ticket))
    until(lambda: Stamp.GRANTED in decode.traces[name].stamps)
    prefill.submit(name, PrefillRequest(ticket))
    return num_handed


@pytest.mark.parametrize(
    ("kind", "op"), [("shared", "WRITE"), ("shared", "READ"), ("tcp", "WRITE")]
)
def test_a_prompt_is_computed_by_two_engines_at_the_same_time(
    kind: str,
    op: TransferOp,
    expected_of_split: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second layer is not computed before the other engine has begun with the first."""
    monkeypatch.setattr(model_runner, "MAX_LANDING_WAIT_S", WAIT_TIMEOUT_S)
    key, gate = Credentials.generate(), Gate(0)
    log = LandingLog(gate)
    with (
        node("p", kind, key, block_size=8, max_batch_tokens=16, gate=gate) as prefill,
        node("d", kind, key, op=op, block_size=8, max_batch_tokens=16) as decode,
    ):
        log.watch(decode)
        for each in (prefill, decode):
            each.prompts, each.sampling = SPLIT_PROMPTS, SPLIT_SAMPLING
        for num_before, name in enumerate(SPLIT_PROMPTS):
            gate.close()
            num_handed = submit_split(prefill, decode, name)
            decode.wait_for_ends()
            prefill.wait_for_ends()
            assert (log.num_begun, log.num_early_tokens) == (num_before + 1, num_before + 1)
            trace = decode.traces[name]
            assert (trace.num_received_tokens, trace.fallbacks) == (num_handed, [])
            assert trace.stamps[Stamp.PREFILL_STARTED] < trace.stamps[Stamp.KV_READY]
        assert decode.answers() == expected_of_split
        assert log.num_late == 0
        until(lambda: decode.engine.stats().num_free_blocks == 100)
        until(lambda: prefill.engine.stats().num_free_blocks == 100)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_many_prompts_at_once_are_each_computed_by_two_engines(
    kind: str, expected_of_split: dict[str, list[int]]
) -> None:
    """Beside one another's answers: some at the same time, others one after the other."""
    key = Credentials.generate()
    with (
        node("p", kind, key, block_size=8, max_batch_tokens=40) as prefill,
        node("d", kind, key, block_size=8, max_batch_tokens=40) as decode,
    ):
        for each in (prefill, decode):
            each.prompts, each.sampling = SPLIT_PROMPTS, SPLIT_SAMPLING
        for name, prompt in SPLIT_PROMPTS.items():
            ticket = make_ticket(prefill, decode, num_prefix_tokens=len(prompt) // 16 * 8)
            decode.submit(name, DecodeRequest(ticket))
            prefill.submit(name, PrefillRequest(ticket))
        decode.wait_for_ends()
        prefill.wait_for_ends()
        assert decode.answers() == expected_of_split
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * len(SPLIT_PROMPTS)
        until(lambda: decode.engine.stats().num_free_blocks == 100)


@pytest.mark.parametrize("place", [0, "end"])
@pytest.mark.parametrize(
    ("kind", "op"), [("shared", "WRITE"), ("shared", "READ"), ("tcp", "WRITE")]
)
def test_the_prefill_worker_is_lost_while_its_layers_land(
    place: int | Literal["end"],
    kind: str,
    op: TransferOp,
    expected_of_split: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its first layer, or after all of them: then a token is there that does not count."""
    monkeypatch.setattr(model_runner, "MAX_LANDING_WAIT_S", WAIT_TIMEOUT_S)
    key, first, name = Credentials.generate(), Gate(0), "s0"
    gate = first if place == 0 else BothGates(first, Gate("end"))
    log = LandingLog(first, opens_gate=place == "end")
    with node("d", kind, key, op=op, block_size=8) as decode:
        log.watch(decode)
        with node("p", kind, key, block_size=8, gate=gate) as prefill:
            for each in (prefill, decode):
                each.prompts, each.sampling = SPLIT_PROMPTS, SPLIT_SAMPLING
            submit_split(prefill, decode, name)
            lost_after = log.has_begun if place == 0 else log.has_early_token
            assert lost_after.wait(WAIT_TIMEOUT_S)
            assert decode.updates == []
            prefill.agent.stop()
            decode.wait_for_ends()
            assert (log.num_begun, log.num_late) == (1, 1 if place == 0 else 0)
        assert decode.answers() == {name: expected_of_split[name]}
        (fallback,) = decode.traces[name].fallbacks
        assert fallback.startswith("computed locally")
        stats = decode.engine.stats()
        assert (stats.computed_prompt_tokens, stats.received_prompt_tokens) == (200, 0)
        if (kind, op) == ("shared", "WRITE"):  # the writer's process, this one, has not ended
            assert stats.num_free_blocks + stats.num_quarantined_blocks == 100
        else:
            until(lambda: decode.engine.stats().num_free_blocks == 100)
