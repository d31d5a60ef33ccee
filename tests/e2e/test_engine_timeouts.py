"""A queue in front of prefill that is longer than `handoff.timeout_s`, and an engine that is stuck.

Two engines with threads, real agents and links, in one process. The prefill worker's forward pass
is slowed down, or held, in the engine's own thread: the agent beside it goes on talking.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")

from baton.auth.credentials import Credentials
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.telemetry.trace import Stamp
from tests.e2e.test_engine_handoff_agents import (
    CLOCK,
    NUM_PROMPTS,
    PROMPTS,
    WAIT_TIMEOUT_S,
    Node,
    make_ticket,
    node,
)
from tests.unit.engines.harness import make_model, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.handoff.messages import TransferOp

TIMEOUT_S = 3.0
STEP_S = 0.4
"""Of a step of 40 tokens: all prompts take 11 of them, as some begin as others do."""


@pytest.fixture(scope="module")
def answers_alone() -> dict[str, list[int]]:
    with node("alone", "tcp", Credentials.generate()) as alone:
        for name in PROMPTS:
            alone.submit(name, Colocated())
        alone.wait_for_ends()
        return alone.answers()


def start_pair(
    stack: ExitStack, before_step: Callable[[], None], op: TransferOp = "WRITE"
) -> tuple[Node, Node]:
    """A prefill worker that calls `before_step` in each forward pass, and a decode worker."""
    key, loaded = Credentials.generate(), prepare(make_model("llama"))
    loaded.model.register_forward_pre_hook(lambda *_: before_step())
    prefill = node(
        "p", "shared", key, loaded=loaded, timeout_s=TIMEOUT_S, block_size=16, max_batch_tokens=40
    )
    decode = node("d", "shared", key, op=op, timeout_s=TIMEOUT_S, block_size=8, num_blocks=200)
    return stack.enter_context(prefill), stack.enter_context(decode)


def take_time() -> None:
    threading.Event().wait(STEP_S)


def submit_all(prefill: Node, decode: Node) -> None:
    for name in PROMPTS:
        ticket = make_ticket(prefill, decode)
        decode.submit(name, DecodeRequest(ticket))
        prefill.submit(name, PrefillRequest(ticket))


@pytest.mark.parametrize("op", ["WRITE", pytest.param("READ", marks=pytest.mark.every)])
def test_what_waits_in_prefills_queue_for_longer_than_a_handoff_may_take_is_handed_over(
    op: TransferOp, answers_alone: dict[str, list[int]]
) -> None:
    with ExitStack() as stack:
        prefill, decode = start_pair(stack, take_time, op)
        submit_all(prefill, decode)
        decode.wait_for_ends()
        prefill.wait_for_ends()
        last = decode.traces[f"r{NUM_PROMPTS - 1}"].stamps
        waited_s = last[Stamp.KV_READY] - last[Stamp.PAGES_RESERVED]
        assert waited_s > 1.2 * TIMEOUT_S, "the queue was too short to show anything"
        assert [trace.fallbacks for trace in decode.traces.values()] == [[]] * NUM_PROMPTS
        assert decode.answers() == answers_alone


@pytest.fixture
def held_step() -> Iterator[HeldStep]:
    held = HeldStep(first=5)
    yield held
    held.released.set()


class HeldStep:
    """From step `first` on no forward pass ends before `released`."""

    def __init__(self, first: int) -> None:
        self.released, self.held_at = threading.Event(), 0.0
        self._num_left = first

    def __call__(self) -> None:
        self._num_left -= 1
        if self._num_left >= 0:
            take_time()
        elif not self.released.is_set():
            self.held_at = CLOCK.now()
            self.released.wait(WAIT_TIMEOUT_S)


def test_an_engine_that_is_stuck_is_not_waited_for_though_its_agent_lives(
    held_step: HeldStep, answers_alone: dict[str, list[int]]
) -> None:
    with ExitStack() as stack:
        prefill, decode = start_pair(stack, held_step)
        stack.callback(held_step.released.set)
        submit_all(prefill, decode)
        decode.wait_for_ends()
        ended_at = CLOCK.now()
        assert not held_step.released.is_set()
        assert held_step.held_at, "the engine was not stuck"
        fallbacks = [trace.fallbacks for trace in decode.traces.values()]
        lost = [text for (text,) in filter(None, fallbacks)]
        assert lost, "nothing had to be computed again"
        assert all("the deadline passed" in text for text in lost), lost
        assert TIMEOUT_S / 2 < ended_at - held_step.held_at < 5 * TIMEOUT_S
        assert fallbacks[0] == [], "what was computed before was handed over"
        assert decode.answers() == answers_alone
        held_step.released.set()
        prefill.wait_for_ends()
