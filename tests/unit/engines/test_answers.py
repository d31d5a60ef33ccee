"""Colocated answers: how they end, what they share, and what a failure costs."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("transformers")

from baton.engines.interface import FinishReason, NewToken
from baton.engines.transformers.model_runner import PagedModel
from baton.errors import EngineError
from baton.telemetry.trace import Stamp
from tests.unit.engines.harness import (
    Driver,
    make_model,
    make_prompt,
    prepare,
    tiny_llama,
)

PROMPT = make_prompt(20)


def answer(**sampling: object) -> list[int]:
    driver = Driver(tiny_llama())
    driver.submit("r", PROMPT, **sampling)
    driver.run()
    return driver.tokens("r")


def test_max_tokens_ends_an_answer() -> None:
    driver = Driver(tiny_llama())
    driver.submit("r", PROMPT, max_tokens=3)
    driver.run()
    assert (len(driver.tokens("r")), driver.finish("r")) == (3, FinishReason.LENGTH)
    assert driver.traces["r"].num_output_tokens == 0, "the worker counts those that it takes"
    driver.check_all_blocks_are_free()


def test_a_stop_token_ends_an_answer_and_is_hidden() -> None:
    tokens = answer()
    stop = next(t for t in tokens if t != tokens[0])
    driver = Driver(tiny_llama())
    driver.submit("r", PROMPT, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens("r") == tokens[: tokens.index(stop) + 1]
    last = driver.updates[-1]
    assert isinstance(last, NewToken)
    assert (last.finish, last.hidden) == (FinishReason.STOP, True)


def test_an_end_token_counts_unless_it_is_ignored() -> None:
    tokens = answer()
    driver = Driver(prepare(make_model("llama"), eos_token_ids=(tokens[0],)))
    driver.submit("obeys", PROMPT)
    driver.submit("ignores", PROMPT, ignore_eos=True)
    driver.run()
    assert driver.tokens("obeys") == tokens[:1]
    assert driver.tokens("ignores") == tokens


def test_no_end_before_min_tokens() -> None:
    first = answer()[0]
    later = answer(stop_token_ids=(first,), min_tokens=4)
    assert len(later) > 4
    assert first not in later[:4]


def test_a_seed_gives_the_same_answer_whatever_else_runs() -> None:
    sampling = {"temperature": 1.5, "seed": 11, "max_tokens": 12}
    driver = Driver(tiny_llama(), max_batch_tokens=7)
    for number in range(5):
        driver.submit(f"other{number}", make_prompt(15, number + 1), temperature=1.0)
    driver.submit("r", PROMPT, **sampling)
    driver.run()
    assert driver.tokens("r") == answer(**sampling)
    assert driver.tokens("r") != answer(**{**sampling, "seed": 12})


def test_without_seeds_answers_differ() -> None:
    assert len({tuple(answer(temperature=2.0, max_tokens=12)) for _ in range(3)}) > 1


def test_a_preempted_answer_goes_on_as_if_nothing_had_happened() -> None:
    prompts = {f"r{i}": make_prompt(20, i) for i in range(4)}
    roomy = Driver(tiny_llama(), block_size=4)
    tight = Driver(tiny_llama(), block_size=4, num_blocks=27)
    for driver in (roomy, tight):
        for name, prompt in prompts.items():
            driver.submit(name, prompt, max_tokens=30)
        driver.run()
    assert tight.loop.stats().num_preemptions > 0
    assert roomy.loop.stats().num_preemptions == 0
    assert [tight.tokens(n) for n in prompts] == [roomy.tokens(n) for n in prompts]
    # A prompt is counted once, however often it is scheduled (vllm#43736).
    counts = [driver.loop.stats().computed_prompt_tokens for driver in (tight, roomy)]
    assert counts == [4 * 20] * 2
    assert tight.loop.stats().cached_prompt_tokens == roomy.loop.stats().cached_prompt_tokens
    tight.check_all_blocks_are_free()


def test_tenants_do_not_share_blocks() -> None:
    driver = Driver(tiny_llama(), block_size=4)
    driver.submit("mine", PROMPT)
    driver.run()
    driver.submit("mine too", PROMPT)
    driver.run()
    assert driver.traces["mine too"].num_cached_tokens == 16
    driver.tenant = "another"
    driver.submit("theirs", PROMPT)
    driver.run()
    assert driver.traces["theirs"].num_cached_tokens == 0


def test_a_failing_step_fails_its_requests_and_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tiny_llama())
    driver.submit("unlucky", PROMPT)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(PagedModel, "run", lambda *_: 1 / 0)
        driver.step()
    assert isinstance(driver.failure("unlucky"), EngineError)
    assert len(caplog.records) == 1
    driver.submit("lucky", PROMPT)
    driver.run()
    assert driver.tokens("lucky") == answer()
    driver.check_all_blocks_are_free()


def test_a_cancelled_request_is_forgotten() -> None:
    driver = Driver(tiny_llama(), max_num_seqs=1)
    driver.submit("runs", PROMPT)
    driver.submit("waits", PROMPT)
    driver.step()
    for name in ("runs", "waits", "unknown"):
        driver.loop.cancel(name)
    assert not driver.loop.step()
    assert (driver.tokens("runs"), driver.tokens("waits")) == (driver.tokens("runs")[:1], [])
    driver.check_all_blocks_are_free()


def test_all_updates_of_a_turn_come_in_one_call() -> None:
    driver = Driver(tiny_llama())
    calls: list[int] = []
    loop = driver.engine.build_loop(lambda updates: calls.append(len(updates)), driver.handoff)
    driver.loop = loop
    for number in range(3):
        driver.submit(f"r{number}", make_prompt(9, number))
    driver.step(2)
    assert calls == [3, 3]


def test_the_trace_tells_the_journey_in_order() -> None:
    driver = Driver(tiny_llama())
    driver.submit("r", PROMPT)
    driver.run()
    assert list(driver.traces["r"].stamps) == [
        Stamp.ADMITTED,
        Stamp.PREFILL_STARTED,
        Stamp.FIRST_LAYER_READY,
        Stamp.PREFILL_DONE,
        Stamp.FIRST_TOKEN,
        Stamp.DECODE_SCHEDULED,
        Stamp.FINISHED,
    ]
