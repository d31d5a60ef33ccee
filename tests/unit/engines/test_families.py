"""Greedy answers in float32 are those of transformers, however a step is put together."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.unit.engines.harness import (
    FAMILIES,
    Driver,
    generate,
    make_model,
    make_prompt,
    prepare,
)

NUM_TOKENS = 6
PROMPTS = {
    "short": make_prompt(3, seed=1),
    "long": make_prompt(45, seed=2),
    "same start": make_prompt(37, seed=2),
    "one": make_prompt(1, seed=3),
}


def answers(driver: Driver) -> dict[str, list[int]]:
    return {name: driver.tokens(name) for name in PROMPTS}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_do_not_depend_on_how_they_are_computed(family: str) -> None:
    model = make_model(family)
    expected = {name: generate(model, ids, NUM_TOKENS) for name, ids in PROMPTS.items()}
    assert len({tuple(answer) for answer in expected.values()}) == len(PROMPTS)
    loaded = prepare(model)

    together = Driver(loaded, block_size=16)
    for name, prompt in PROMPTS.items():
        together.submit(name, prompt, max_tokens=NUM_TOKENS)
    together.run()
    assert answers(together) == expected

    in_chunks = Driver(loaded, block_size=24, max_batch_tokens=11)
    for name, prompt in PROMPTS.items():
        in_chunks.submit(name, prompt, max_tokens=NUM_TOKENS)
    in_chunks.run()
    assert answers(in_chunks) == expected

    after_each_other = Driver(loaded, block_size=4)
    for name, prompt in PROMPTS.items():
        after_each_other.submit(name, prompt, max_tokens=NUM_TOKENS)
        after_each_other.run()
    assert answers(after_each_other) == expected
    assert after_each_other.traces["same start"].num_cached_tokens == 36
