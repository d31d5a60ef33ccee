"""The demo model in float32 answers as plain transformers does, whole, in chunks and packed."""

from __future__ import annotations

from importlib.resources import as_file, files

import pytest

pytest.importorskip("transformers")

import numpy as np

from baton.engines.transformers.loading import load_model
from baton.engines.transformers.options import TransformersOptions
from tests.unit.engines.harness import Driver, generate

NUM_TOKENS = 12


def test_the_demo_model_answers_as_plain_transformers_does() -> None:
    with as_file(files("baton.models") / "demo") as folder:
        loaded = load_model(folder, TransformersOptions(dtype="float32", device="cpu"))
    rng = np.random.default_rng(0)
    prompts = {
        str(n): rng.integers(3, loaded.vocab_size, n).astype(np.int32) for n in (1, 30, 150, 300)
    }
    loaded.model.set_attn_implementation("sdpa")
    expected = {name: generate(loaded.model, ids, NUM_TOKENS) for name, ids in prompts.items()}
    loaded.model.set_attn_implementation("baton_paged")
    for options in ({"block_size": 16}, {"block_size": 24, "max_batch_tokens": 70}):
        driver = Driver(loaded, **options)
        for name, prompt in prompts.items():
            driver.submit(name, prompt, max_tokens=NUM_TOKENS)
        driver.run()
        assert {name: driver.tokens(name) for name in prompts} == expected
