"""The engine as other threads see it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("transformers")

from baton.clock import Instant, MachineClock
from baton.engines.interface import (
    Colocated,
    GenerationRequest,
    NewToken,
    PrefillRequest,
    RequestFailed,
    SamplingParams,
)
from baton.engines.transformers.engine import TransformersEngine
from baton.engines.transformers.options import TransformersOptions
from baton.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from baton.handoff.interface import KVSent
from baton.ids import RequestId
from baton.telemetry.trace import RequestSpan
from tests.unit.engines.harness import (
    RecordingHandoff,
    make_prompt,
    make_ticket,
    tiny_llama,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.engines.interface import EngineUpdate, RequestKind

WAIT_TIMEOUT_S = 30.0


class Answers:
    """A sink that other threads can wait on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.updates: list[EngineUpdate] = []
        self.failure: Exception | None = None

    def __call__(self, updates: Sequence[EngineUpdate]) -> None:
        if self.failure is not None:
            raise self.failure
        with self._changed:
            self.updates += updates
            self._changed.notify_all()

    def wait_for_end(self, name: str) -> EngineUpdate:
        def end() -> EngineUpdate | None:
            return next((u for u in self.updates if u.request == name and _is_last(u)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: end() is not None, WAIT_TIMEOUT_S)
        update = end()
        assert update is not None
        return update


def _is_last(update: EngineUpdate) -> bool:
    return isinstance(update, RequestFailed) or update.finish is not None


def make_engine(**options: object) -> TransformersEngine:
    return TransformersEngine(
        TransformersOptions(**{"num_blocks": 20, "num_threads": 1, **options}),
        tiny_llama(),
        path="nowhere",
        clock=MachineClock(),
    )


def make_request(
    name: str,
    num_tokens: int = 9,
    max_tokens: int = 5,
    leg: RequestKind | None = None,
    **rest: object,
) -> GenerationRequest:
    return GenerationRequest(
        RequestId(name),
        make_prompt(num_tokens),
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        leg or Colocated(),
        "",
        rest.get("deadline", Instant(1e12)),
        RequestSpan(request_id=name, worker="w", epoch="e", role="colocated"),
    )


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    engine = make_engine()
    yield engine
    engine.stop(WAIT_TIMEOUT_S)


def test_it_answers_from_its_own_thread(engine: TransformersEngine) -> None:
    answers = Answers()
    engine.start(answers, RecordingHandoff())
    assert engine.is_alive()
    for name in ("a", "b"):
        engine.submit(make_request(name))
    for name in ("a", "b"):
        assert isinstance(answers.wait_for_end(name), NewToken)
    assert len(answers.updates) == 10


def test_it_wakes_for_the_handoff(engine: TransformersEngine) -> None:
    answers, handoff, ticket = Answers(), RecordingHandoff(), make_ticket()
    finished = threading.Event()
    handoff.prefill_done = lambda *_: finished.set()
    engine.start(answers, handoff)
    engine.submit(make_request("p", leg=PrefillRequest(ticket)))
    assert finished.wait(WAIT_TIMEOUT_S)
    handoff.events = [KVSent(ticket.id)]
    engine.wake()
    assert isinstance(answers.wait_for_end("p"), NewToken)


def test_what_can_never_fit_is_refused_at_once(engine: TransformersEngine) -> None:
    with pytest.raises(ContextLengthError, match="together at most 256"):
        engine.submit(make_request("r", 200, 57))
    small = make_engine(num_blocks=2)
    with pytest.raises(ContextLengthError, match="together at most 32"):
        small.submit(make_request("r", 30, 3))
    small.submit(make_request("just fits", 30, 2))


@pytest.mark.parametrize(
    ("ids", "stop_ids", "param"),
    [
        ([], (), "prompt"),
        ([97], (), "prompt"),
        ([-1], (), "prompt"),
        ([3], (97,), "stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    engine: TransformersEngine, ids: list[int], stop_ids: tuple[int, ...], param: str
) -> None:
    request = replace(
        make_request("r"),
        prompt_ids=np.array(ids, dtype=np.int32),
        sampling=SamplingParams(max_tokens=1, stop_token_ids=stop_ids),
    )
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit(request)
    assert refused.value.param == param


def test_a_full_queue_refuses(engine: TransformersEngine) -> None:
    del engine
    full = make_engine(max_waiting=2)
    full.submit(make_request("a"))
    full.submit(make_request("b"))
    with pytest.raises(OverloadedError):
        full.submit(make_request("c"))


def test_a_queue_is_full_at_the_same_length_while_a_step_is_computed() -> None:
    engine, handoff = make_engine(max_waiting=2, max_num_seqs=1), RecordingHandoff()
    computing, go_on = threading.Event(), threading.Event()

    def start_send(_: object) -> None:
        computing.set()
        assert go_on.wait(WAIT_TIMEOUT_S)

    handoff.start_send = start_send
    engine.submit(make_request("runs", leg=PrefillRequest(make_ticket())))
    engine.submit(make_request("waits"))
    engine.start(Answers(), handoff)
    assert computing.wait(WAIT_TIMEOUT_S)
    try:
        engine.submit(make_request("waits too"))
        with pytest.raises(OverloadedError):
            engine.submit(make_request("one too many"))
    finally:
        go_on.set()
        engine.stop(WAIT_TIMEOUT_S)


def test_a_request_cannot_be_submitted_twice_at_a_time(engine: TransformersEngine) -> None:
    answers = Answers()
    engine.submit(make_request("a"))
    with pytest.raises(InvalidRequestError):
        engine.submit(make_request("a"))
    engine.start(answers, RecordingHandoff())
    answers.wait_for_end("a")
    engine.submit(make_request("a"))


def test_a_deadline_passes_without_any_other_event() -> None:
    engine, answers = make_engine(num_blocks=2), Answers()
    engine.start(answers, RecordingHandoff())
    soon = Instant(MachineClock().now() + 0.05)
    engine.submit(make_request("blocks all", 30, 1, PrefillRequest(make_ticket())))
    engine.submit(make_request("waits", deadline=soon))
    update = answers.wait_for_end("waits")
    assert isinstance(update, RequestFailed)
    engine.stop(WAIT_TIMEOUT_S)


def test_stopping_fails_what_is_unfinished() -> None:
    engine, answers, offered = make_engine(), Answers(), threading.Event()
    handoff = RecordingHandoff()
    handoff.start_send = lambda _: offered.set()
    engine.start(answers, handoff)
    engine.submit(make_request("p", leg=PrefillRequest(make_ticket())))
    assert offered.wait(WAIT_TIMEOUT_S)
    engine.stop(WAIT_TIMEOUT_S)
    assert isinstance(answers.wait_for_end("p"), RequestFailed)
    assert not engine.is_alive()
    with pytest.raises(EngineError, match="was stopped"):
        engine.submit(make_request("late"))
    engine.stop(WAIT_TIMEOUT_S)


def test_a_thread_that_died_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, handoff = make_engine(), RecordingHandoff()
    answers, died = Answers(), threading.Event()

    def poll() -> list[object]:
        engine.submit(make_request("not seen yet"))
        died.set()
        raise ZeroDivisionError

    handoff.poll = poll
    engine.submit(make_request("r"))
    engine.start(answers, handoff)
    for name in ("r", "not seen yet"):
        assert isinstance(answers.wait_for_end(name), RequestFailed)
    assert died.is_set()
    assert not engine.is_alive()
    with pytest.raises(EngineError, match="restart the worker"):
        engine.submit(make_request("next"))
    assert "the engine's thread died" in caplog.text
    engine.stop(WAIT_TIMEOUT_S)
