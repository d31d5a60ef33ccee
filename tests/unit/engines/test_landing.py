"""The rest of a prompt is computed while KV of its first tokens lands, layer by layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import pytest

pytest.importorskip("transformers")

from baton.engines.interface import DecodeRequest, FinishReason, PrefillRequest
from baton.engines.transformers import model_runner
from baton.engines.transformers.sequence import Status
from baton.errors import EngineError, HandoffError
from baton.handoff.interface import (
    BlocksQuiescent,
    KVFailed,
    KVLanded,
    LandingLayers,
    LayersLanding,
)
from baton.telemetry.trace import Stamp
from baton.transfer.region import view_pages
from tests.unit.engines.harness import (
    Driver,
    RecordingHandoff,
    make_model,
    make_prompt,
    make_ticket,
    prepare,
    tiny_llama,
)
from tests.unit.engines.test_prefill_decode_requests import count_by_source

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.auth.ticket import Ticket
    from baton.engines.transformers.loading import LoadedModel
    from baton.engines.transformers.sequence import Sequence
    from baton.handoff.interface import ReceiveOrder

BLOCK_SIZE, NUM_LAYERS = 8, 2
NUM_HANDED, NUM_PROMPT = 32, 60
NUM_BLOCKS = 8
"""Of the prompt."""
PROMPT = make_prompt(NUM_PROMPT)
TICKET = msgspec.structs.replace(make_ticket(), num_prefix_tokens=NUM_HANDED)
LOST = HandoffError("the peer left", stage="landing")
LONG_S = 60.0
GARBAGE = 50.0


@pytest.fixture(autouse=True)
def _long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits as long as a thread of a test may take on a machine that is busy."""
    monkeypatch.setattr(model_runner, "MAX_LANDING_WAIT_S", LONG_S)


@cache
def load(family: str) -> LoadedModel:
    return tiny_llama() if family == "llama" else prepare(make_model(family))


@cache
def compute_alone(seed: int = 0, num_tokens: int = NUM_PROMPT, max_tokens: int = 8) -> list[int]:
    """What one engine answers."""
    driver = Driver(tiny_llama(), block_size=BLOCK_SIZE)
    driver.submit("r", make_prompt(num_tokens, seed), max_tokens=max_tokens)
    driver.run()
    return driver.tokens("r")


@dataclass
class Landing:
    """A decode engine, and one that has computed the first tokens: their KV is copied by hand.

    The pages it is to land in hold garbage before.
    """

    driver: Driver
    name: str = "d"
    ticket: Ticket = TICKET
    seed: int = 0

    def __post_init__(self) -> None:
        self.prompt, self.handoff = make_prompt(NUM_PROMPT, self.seed), self.driver.handoff
        self.source = Driver(self.driver.loaded, RecordingHandoff(), block_size=BLOCK_SIZE)
        self.source.submit("p", self.prompt[:NUM_HANDED], PrefillRequest(self.ticket))
        self.source.run()

    def submit(self, **sampling: object) -> None:
        self.driver.submit(self.name, self.prompt, DecodeRequest(self.ticket), **sampling)

    def expect(self, **sampling: object) -> LandingLayers:
        """Submit the request; its blocks are set aside."""
        self.submit(**sampling)
        self.driver.step()
        self._spoil()
        return self.layers

    @property
    def order(self) -> ReceiveOrder:
        (order,) = (each for each in self.handoff.receives if each.ticket.id == self.ticket.id)
        return order

    @property
    def layers(self) -> LandingLayers:
        assert self.order.layers is not None
        return self.order.layers

    @property
    def sequence(self) -> Sequence:
        found = self.driver.loop._sequences.find(self.name)
        assert found is not None
        return found

    @property
    def answer(self) -> list[int]:
        return self.driver.tokens(self.name)

    def copy(self, *layers: int) -> None:
        """What lands in these layers, from the first block that is asked for."""
        (send,) = self.source.handoff.sends
        table = self.order.blocks
        source = send.blocks.blocks[table.first : table.first + len(table.blocks)]
        for layer in layers:
            theirs, ours = (self._pages(each, layer) for each in (self.source, self.driver))
            ours[table.blocks] = theirs[source]

    def begin(self, num_layers: int = 1) -> None:
        """So many layers land, and the engine is notified: its next step computes the others."""
        self.copy(*range(num_layers))
        self.layers.advance(num_layers)
        self.handoff.events += [LayersLanding(self.ticket.id, self.layers)]

    def begin_upon_garbage(self) -> None:
        """As if all layers had landed: what follows them is computed upon what lies there."""
        self.layers.advance(NUM_LAYERS)
        self.handoff.events += [LayersLanding(self.ticket.id, self.layers)]

    def land(self) -> None:
        """All is in place and the engine is notified."""
        self.handoff.events += [KVLanded(self.ticket.id, None)]

    def fail(self) -> None:
        """No more lands."""
        self.handoff.events += [KVFailed(self.ticket.id, LOST)]

    def _spoil(self) -> None:
        for layer in range(NUM_LAYERS):
            self._pages(self.driver, layer)[self.order.blocks.blocks] = GARBAGE

    @staticmethod
    def _pages(driver: Driver, layer: int) -> NDArray[np.float32]:
        region = driver.engine.region
        return view_pages(region.memory, region.arrays[layer]).view("float32")

    def check_quarantine_ends(self) -> None:
        """The blocks are in quarantine until they are quiescent, and then free."""
        assert self.driver.loop.stats().num_quarantined_blocks == NUM_BLOCKS
        self.handoff.events += [BlocksQuiescent(self.ticket.id)]
        self.driver.step()
        self.driver.check_all_blocks_are_free()


def start(family: str = "llama", **options: object) -> Landing:
    """A decode engine, and what is to land there."""
    loaded = load(family)
    return Landing(Driver(loaded, RecordingHandoff(), **{"block_size": BLOCK_SIZE, **options}))


@dataclass
class Waits:
    """Calls of `LandingLayers.wait` for what is not there: `begun` is set by the first one."""

    begun: threading.Event = field(default_factory=threading.Event)
    layers: list[int] = field(default_factory=list)


@pytest.fixture(name="waits")
def waits_fixture(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits, wait = Waits(), LandingLayers.wait

    def watched(self: LandingLayers, layer: int, timeout_s: float) -> bool:
        if layer >= self.num:
            waits.layers.append(layer)
            waits.begun.set()
        return wait(self, layer, timeout_s)

    monkeypatch.setattr(LandingLayers, "wait", watched)
    return waits


def step_meanwhile(driver: Driver, waits: Waits, action: Callable[[], None]) -> None:
    """One turn; another thread acts once the turn waits for a layer."""

    def act() -> None:
        assert waits.begun.wait(LONG_S)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    driver.step()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}])
def test_a_layer_that_lands_while_the_step_waits_for_it(
    family: str, sampling: dict[str, object], waits: Waits
) -> None:
    alone = Driver(load(family), block_size=BLOCK_SIZE)
    alone.submit("r", PROMPT, **sampling)
    alone.run()
    landing = start(family)
    layers, driver = landing.expect(**sampling), landing.driver
    landing.begin()

    def arrive() -> None:
        landing.copy(1)
        layers.advance(NUM_LAYERS)

    step_meanwhile(driver, waits, arrive)
    assert waits.layers == [1], "the step has waited for the second layer, and for no other"
    assert landing.sequence.early_token is not None
    assert driver.updates == [], "a token before all KV is accepted"
    assert not driver.loop.step(), "it goes on without its KV"
    landing.land()
    driver.step()
    assert driver.tokens("d"), "the token that was computed meanwhile"
    driver.run()
    assert driver.tokens("d") == alone.tokens("r")
    assert driver.finish("d") is FinishReason.LENGTH
    trace = driver.traces["d"]
    assert (trace.num_received_tokens, trace.num_cached_tokens) == (NUM_HANDED, 0)
    assert trace.fallbacks == []
    assert trace.stamps[Stamp.PREFILL_STARTED] <= trace.stamps[Stamp.KV_READY]
    driver.check_all_blocks_are_free()


def test_an_answer_of_one_token_ends_when_all_has_landed() -> None:
    landing = start()
    landing.expect(max_tokens=1)
    landing.begin(NUM_LAYERS)
    landing.driver.step()
    assert landing.driver.updates == []
    landing.land()
    landing.driver.step()
    assert landing.answer == compute_alone()[:1]
    assert landing.driver.finish("d") is FinishReason.LENGTH
    landing.driver.check_all_blocks_are_free()


def test_what_is_cached_already_is_not_received() -> None:
    """It is in blocks of its own, before those in which the rest lands."""
    landing = start()
    landing.driver.submit("first", PROMPT[: BLOCK_SIZE + 3])
    landing.driver.run()
    landing.expect()
    assert landing.order.start == BLOCK_SIZE
    landing.begin(NUM_LAYERS)
    landing.driver.step()
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()
    trace = landing.driver.traces["d"]
    assert (trace.num_cached_tokens, trace.num_received_tokens) == (8, NUM_HANDED - 8)
    landing.driver.check_all_blocks_are_free()


def test_all_lands_before_the_engine_has_computed_anything() -> None:
    landing = start()
    landing.expect()
    landing.begin(NUM_LAYERS)
    landing.handoff.events.append(KVLanded(TICKET.id, None))
    landing.driver.run()
    assert landing.answer == compute_alone()
    assert landing.driver.traces["d"].num_received_tokens == NUM_HANDED
    landing.driver.check_all_blocks_are_free()


def test_every_token_of_the_prompt_counts_once() -> None:
    """Received, or computed while the others landed, or computed after them."""
    for waits_for_all in (False, True):
        landing = start()
        landing.expect()
        landing.begin(NUM_LAYERS)
        if waits_for_all:
            landing.handoff.events = []
        landing.driver.step()
        landing.land()
        landing.driver.run()
        counted = {"computed": NUM_PROMPT - NUM_HANDED, "cached": 0, "received": NUM_HANDED}
        assert count_by_source(landing.driver) == counted


def test_a_layer_that_never_lands_ends_the_wait_and_the_request_waits(waits: Waits) -> None:
    landing = start()
    layers, driver = landing.expect(), landing.driver
    landing.begin()
    step_meanwhile(driver, waits, layers.end)
    assert waits.layers == [1], "it has waited"
    assert landing.sequence.status is Status.AWAITING_KV
    assert landing.sequence.early_token is None
    assert (driver.updates, driver.loop.stats().num_awaiting_kv) == ([], 1)
    assert not driver.loop.step(), "it waits in no second step"
    landing.copy(1)
    landing.land()
    driver.run()
    assert driver.tokens("d") == compute_alone()
    counted = {"computed": NUM_PROMPT - NUM_HANDED, "cached": 0, "received": NUM_HANDED}
    assert count_by_source(driver) == counted
    driver.check_all_blocks_are_free()


def test_a_step_waits_for_a_layer_so_long_and_no_longer(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "MAX_LANDING_WAIT_S", 0.0)
    landing = start()
    layers = landing.expect()
    landing.begin()
    landing.driver.step()
    assert (waits.layers, layers.is_over) == ([1], False)
    assert landing.sequence.status is Status.AWAITING_KV
    layers.advance(NUM_LAYERS)
    assert not landing.driver.loop.step(), "what lands later is for `KVLanded`"
    landing.copy(1)
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()
    landing.driver.check_all_blocks_are_free()


def test_kv_that_fails_after_the_rest_was_computed_is_computed_elsewhere() -> None:
    """Nothing of it counts, here what was computed upon garbage."""
    landing = start()
    landing.expect()
    driver = landing.driver
    landing.begin_upon_garbage()
    driver.step()
    early = landing.sequence.early_token
    assert early is not None
    assert early.token_id != compute_alone()[0], "it was computed upon what landed"
    landing.fail()
    driver.run()
    assert driver.tokens("d") == compute_alone()
    assert driver.traces["d"].fallbacks == ["computed locally: the peer left"]
    assert count_by_source(driver) == {"computed": NUM_PROMPT, "cached": 0, "received": 0}
    landing.check_quarantine_ends()


def begin_beside_an_answer(num_layers: int = NUM_LAYERS, num_tokens: int = 40) -> Landing:
    """Another request decodes, and has no layers to wait for."""
    landing = start(max_batch_tokens=16)
    landing.driver.submit("other", make_prompt(10, seed=1), max_tokens=num_tokens)
    landing.driver.step()
    landing.expect()
    landing.begin(num_layers)
    landing.driver.step()
    return landing


def test_answers_wait_for_no_layers(waits: Waits) -> None:
    landing = begin_beside_an_answer(num_layers=1)
    num_before = len(landing.driver.tokens("other"))
    landing.driver.step(3)
    assert len(landing.driver.tokens("other")) == num_before + 3
    assert waits.layers == []
    assert landing.sequence.status is Status.RUNNING
    assert landing.sequence.num_computed == NUM_HANDED
    landing.copy(1)
    landing.layers.advance(NUM_LAYERS)
    landing.land()
    landing.driver.step()
    assert landing.sequence.num_computed == NUM_HANDED + 15, "it is a prompt as any other now"
    landing.driver.run()
    assert landing.answer == compute_alone()
    assert landing.driver.tokens("other") == compute_alone(1, 10, 40)
    landing.driver.check_all_blocks_are_free()


def test_once_the_answers_have_ended_the_rest_is_computed() -> None:
    landing = begin_beside_an_answer(num_tokens=6)
    landing.driver.run()
    assert landing.driver.tokens("other") == compute_alone(1, 10, 6)
    assert landing.sequence.early_token is not None
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()
    landing.driver.check_all_blocks_are_free()


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_what_waits_for_answers_to_end_can_end(end: str) -> None:
    landing = begin_beside_an_answer()
    assert landing.sequence.status is Status.RUNNING
    if end == "fails":
        landing.fail()
    else:
        landing.driver.loop.cancel("d")
    landing.driver.run()
    assert landing.answer == (compute_alone() if end == "fails" else [])
    assert landing.driver.tokens("other") == compute_alone(1, 10, 40)
    landing.check_quarantine_ends()


def begin_two() -> tuple[Landing, Landing]:
    """KV of two prompts lands: of the first one's rest, 28 tokens, the first step computes 16."""
    first = start(max_batch_tokens=16)
    other = msgspec.structs.replace(make_ticket(2), num_prefix_tokens=NUM_HANDED)
    second = Landing(first.driver, "e", other, seed=3)
    first.submit()
    second.expect()
    first._spoil()
    first.begin(NUM_LAYERS)
    second.begin(NUM_LAYERS)
    first.driver.step()
    assert first.sequence.status is Status.RUNNING
    assert first.sequence.num_computed == NUM_HANDED + 16
    assert second.sequence.num_computed == NUM_HANDED
    return first, second


def test_kv_of_two_prompts_lands() -> None:
    first, second = begin_two()
    first.driver.run()
    assert first.sequence.early_token is not None
    assert second.sequence.early_token is not None
    assert first.driver.updates == []
    second.land()
    first.driver.run()
    assert (first.answer, second.answer) == ([], compute_alone(3))
    first.land()
    first.driver.run()
    assert first.answer == compute_alone()
    first.driver.check_all_blocks_are_free()


def test_kv_that_lands_between_two_steps_of_the_rest() -> None:
    first, second = begin_two()
    first.land()
    second.land()
    first.driver.run()
    assert (first.answer, second.answer) == (compute_alone(), compute_alone(3))
    num_computed = 2 * (NUM_PROMPT - NUM_HANDED)
    counted = {"computed": num_computed, "cached": 0, "received": 2 * NUM_HANDED}
    assert count_by_source(first.driver) == counted
    first.driver.check_all_blocks_are_free()


def test_kv_that_fails_between_two_steps_of_the_rest() -> None:
    first, second = begin_two()
    first.fail()
    first.driver.run()
    assert first.answer == compute_alone()
    assert first.driver.traces["d"].fallbacks == ["computed locally: the peer left"]
    second.land()
    first.driver.run()
    assert second.answer == compute_alone(3)
    num_computed = 2 * NUM_PROMPT - NUM_HANDED
    counted = {"computed": num_computed, "cached": 0, "received": NUM_HANDED}
    assert count_by_source(first.driver) == counted
    first.check_quarantine_ends()


def test_a_request_that_is_cancelled_between_two_steps_of_the_rest() -> None:
    first, second = begin_two()
    first.driver.loop.cancel("d")
    assert first.handoff.calls == ["start_receive", "start_receive", "abort"]
    first.driver.run()
    second.land()
    first.driver.run()
    assert (first.answer, second.answer) == ([], compute_alone(3))
    first.check_quarantine_ends()


def test_a_layer_that_never_lands_does_not_keep_another_prompt_waiting(waits: Waits) -> None:
    first = start()
    other = msgspec.structs.replace(make_ticket(2), num_prefix_tokens=NUM_HANDED)
    second = Landing(first.driver, "e", other, seed=3)
    first.submit()
    second.expect()
    first._spoil()
    first.begin()
    second.begin(NUM_LAYERS)
    step_meanwhile(first.driver, waits, first.layers.end)
    assert waits.layers == [1]
    assert first.sequence.status is Status.AWAITING_KV
    first.driver.run()
    assert second.sequence.early_token is not None
    first.copy(1)
    first.land()
    second.land()
    first.driver.run()
    assert (first.answer, second.answer) == (compute_alone(), compute_alone(3))
    first.driver.check_all_blocks_are_free()


def test_alone_one_step_computes_all_of_it() -> None:
    landing = start(max_batch_tokens=16)
    landing.expect()
    landing.begin(NUM_LAYERS)
    landing.driver.step()
    assert landing.sequence.early_token is not None
    assert landing.sequence.num_computed == NUM_PROMPT
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()


def test_a_prefix_that_is_to_be_pushed_is_computed_in_one_step_where_it_is_alone() -> None:
    prefix = PrefillRequest(TICKET)
    for has_other in (False, True):
        handoff = RecordingHandoff()
        driver = Driver(tiny_llama(), handoff, block_size=BLOCK_SIZE, max_batch_tokens=16)
        if has_other:
            driver.submit("other", make_prompt(10, seed=1), max_tokens=40)
            driver.step()
        driver.submit("p", PROMPT[:NUM_HANDED], prefix)
        driver.step()
        stop = 15 if has_other else NUM_HANDED
        assert handoff.ready == [(TICKET.id, stop, layer) for layer in range(NUM_LAYERS)]
        driver.run()
        assert handoff.ready[-1] == (TICKET.id, NUM_HANDED, NUM_LAYERS - 1)


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_request_that_ends_while_its_early_token_waits(how: str) -> None:
    landing = start()
    landing.expect(timeout_s=5.0)
    landing.begin(NUM_LAYERS)
    landing.driver.step()
    assert landing.sequence.early_token is not None
    if how == "cancelled":
        landing.driver.loop.cancel("d")
    else:
        landing.driver.clock.advance(6.0)
        landing.driver.step()
        assert isinstance(landing.driver.failure("d"), EngineError)
    assert landing.handoff.calls == ["start_receive", "abort"]
    assert landing.answer == []
    landing.check_quarantine_ends()


def test_what_lands_for_a_request_that_was_cancelled_frees_its_blocks() -> None:
    landing = start()
    layers = landing.expect()
    landing.driver.loop.cancel("d")
    landing.handoff.events = [LayersLanding(TICKET.id, layers), KVLanded(TICKET.id, None)]
    landing.driver.step()
    assert landing.driver.updates == []
    landing.driver.check_all_blocks_are_free()


def test_a_step_that_fails_ends_its_request_and_keeps_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    landing = start()
    landing.expect()
    landing.begin(NUM_LAYERS)

    def broken(*_: object) -> None:
        raise RuntimeError("what a model raises")

    with monkeypatch.context() as patch:
        patch.setattr(landing.driver.engine._model, "run", broken)
        landing.driver.step()
    assert isinstance(landing.driver.failure("d"), EngineError)
    assert landing.handoff.calls == ["start_receive", "abort"]
    landing.check_quarantine_ends()


def other_tickets() -> dict[str, tuple[Ticket, bool]]:
    """Those whose rest is not computed meanwhile; whether the request is a standby one."""

    def of(num_tokens: int) -> Ticket:
        return msgspec.structs.replace(TICKET, num_prefix_tokens=num_tokens)

    return {
        "not a block's multiple": (of(NUM_HANDED + 1), False),
        "all tokens": (of(0), False),
        "more than all": (of(NUM_PROMPT + 4), False),
        "a standby request": (TICKET, True),
    }


@pytest.mark.parametrize("case", other_tickets())
def test_a_prompt_whose_rest_is_not_computed_meanwhile(case: str) -> None:
    ticket, is_standby = other_tickets()[case]
    handoff = RecordingHandoff()
    driver = Driver(tiny_llama(), handoff, block_size=BLOCK_SIZE)
    driver.submit("d", PROMPT, DecodeRequest(ticket), is_standby=is_standby)
    driver.step()
    (order,) = handoff.receives
    assert order.layers is None


def test_a_single_token_is_not_computed_meanwhile() -> None:
    for num_rest in (1, 2):
        handoff = RecordingHandoff()
        driver = Driver(tiny_llama(), handoff, block_size=BLOCK_SIZE)
        driver.submit("d", PROMPT[: NUM_HANDED + num_rest], DecodeRequest(TICKET))
        driver.step()
        (order,) = handoff.receives
        assert (order.layers is None) == (num_rest == 1)


def test_no_step_waits_for_layers_beside_a_prompt_that_is_handed_over() -> None:
    """Its layers would be reported once more in a step that follows one that gave up."""
    landing = start(max_batch_tokens=16)
    sent = make_ticket(2)
    landing.driver.submit("p", make_prompt(40, seed=2), PrefillRequest(sent))
    landing.expect()
    landing.begin()  # the second layer has not landed: a step would wait
    landing.driver.step()
    assert landing.sequence.status is Status.RUNNING
    assert landing.sequence.num_computed == NUM_HANDED
    landing.copy(1)
    landing.layers.advance(NUM_LAYERS)
    landing.driver.step(3)
    expected = [(sent.id, stop, layer) for stop in (16, 32, 40) for layer in (0, 1)]
    assert landing.handoff.ready == expected
    assert landing.sequence.early_token is not None
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()


def test_a_prompt_that_comes_begins_after_the_step_that_waits(waits: Waits) -> None:
    """It is in no step that gives up: none of its layers is reported twice."""
    landing = start(max_batch_tokens=100)
    layers, sent = landing.expect(), make_ticket(2)
    landing.begin()
    landing.driver.submit("p", make_prompt(40, seed=2), PrefillRequest(sent))
    landing.driver.submit("other", make_prompt(10, seed=1))
    step_meanwhile(landing.driver, waits, layers.end)
    assert (waits.layers, landing.handoff.ready) == ([1], [])
    landing.driver.run()
    expected = [(sent.id, 40, layer) for layer in range(NUM_LAYERS)]
    assert landing.handoff.ready == expected
    assert landing.driver.tokens("other") == compute_alone(1, 10)
    landing.copy(1)
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()


def test_nothing_of_it_can_be_found_before_all_has_landed() -> None:
    landing = start()
    landing.expect()
    landing.begin_upon_garbage()  # who finds it answers wrongly
    landing.driver.step()
    assert landing.sequence.early_token is not None
    landing.driver.submit("same", PROMPT)
    landing.driver.run()
    assert landing.driver.traces["same"].num_cached_tokens == 0
    assert landing.driver.tokens("same") == compute_alone()


def test_all_of_it_can_be_found_once_it_has_landed() -> None:
    landing = start()
    landing.expect()
    landing.begin(NUM_LAYERS)
    landing.driver.step()
    landing.land()
    landing.driver.run()
    landing.driver.submit("same", PROMPT)
    landing.driver.run()
    assert landing.driver.traces["same"].num_cached_tokens == NUM_PROMPT // 8 * 8
    assert landing.driver.tokens("same") == compute_alone()
    landing.driver.check_all_blocks_are_free()


def test_blocks_in_which_kv_lands_are_not_taken_away() -> None:
    """An answer that lacks a block takes none of them: it waits, and is computed again."""
    landing = start(max_batch_tokens=16, num_blocks=NUM_BLOCKS + 4)
    landing.driver.submit("other", make_prompt(10, seed=1), max_tokens=10)
    landing.driver.submit("third", make_prompt(10, seed=4), max_tokens=10)
    landing.driver.step(2)
    landing.driver.submit("d", PROMPT, DecodeRequest(TICKET))
    landing.driver.run()
    assert landing.driver.loop.stats().num_preemptions == 0, "it waits for room"
    assert landing.handoff.receives, "and has it now"
    landing.begin(NUM_LAYERS)
    landing.driver.submit("other2", make_prompt(12, seed=1), max_tokens=30)
    landing.driver.submit("third2", make_prompt(12, seed=4), max_tokens=30)
    landing.driver.run()
    assert landing.answer == []
    landing.land()
    landing.driver.run()
    assert landing.answer == compute_alone()
    assert landing.driver.tokens("other2") == compute_alone(1, 12, 30)
    assert landing.driver.tokens("third2") == compute_alone(4, 12, 30)
    landing.driver.check_all_blocks_are_free()
