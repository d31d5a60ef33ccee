"""Random generators of requests whose sampled token is dropped."""

from __future__ import annotations

import numpy as np
import torch

from baton.engines.vllm.cpu_seeds import take_unused


def test_generators_of_dropped_tokens_are_taken_out() -> None:
    made = {place: torch.Generator().manual_seed(place) for place in (0, 2, 3)}
    generators = dict(made)
    taken = take_unused(generators, np.array([True, True, False, True]))
    assert taken == {0: made[0], 3: made[3]}
    assert generators == {2: made[2]}


def test_a_step_without_seeds_has_nothing_to_take() -> None:
    assert take_unused({}, np.array([True])) == {}
