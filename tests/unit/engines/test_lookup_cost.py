"""What a token of a prompt is taken to cost, by the steps that computed some."""

from __future__ import annotations

import pytest

from baton.clock import Instant
from baton.engines.lookup_cost import LookupCost

TOKEN_S = 1e-3


@pytest.mark.parametrize("sizes", [(32, 64), (512, 512, 40), (512,)])
@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_what_a_step_takes_for_any_number_of_tokens_is_no_tokens(
    sizes: tuple[int, ...], fixed_s: float
) -> None:
    cost = LookupCost(Instant(0.0))
    for _ in range(20):
        for size in sizes:
            cost.observe_step(size, fixed_s + TOKEN_S * size)
    assert TOKEN_S * 0.99 <= cost.token_s <= 1.25 * TOKEN_S


def test_a_step_that_takes_the_same_for_all_sizes_leaves_tokens_a_cost() -> None:
    cost = LookupCost(Instant(0.0))
    for size in (512, 64) * 20:
        cost.observe_step(size, 0.1)
    assert 0 < cost.token_s < 0.1 / 512


def test_tokens_that_cost_more_behind_others_cost_no_more_than_was_seen() -> None:
    cost = LookupCost(Instant(0.0))
    for size in (512, 64) * 20:
        cost.observe_step(size, TOKEN_S * size * size / 512)
    assert 0 < cost.token_s <= TOKEN_S
