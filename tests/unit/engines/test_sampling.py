"""The same logits and seed give the same token everywhere, with the right odds."""

from __future__ import annotations

from collections import Counter
from math import log

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from baton.engines.interface import SamplingParams  # noqa: E402
from baton.engines.transformers.model_runner import Draw, draw_noise, sample  # noqa: E402

ODDS = torch.tensor([0.5, 0.3, 0.15, 0.05])
NUM_DRAWS = 2000


def draw(seed: int = 0, index: int = 0, banned: tuple[int, ...] = (), **params: object) -> Draw:
    return Draw(SamplingParams(**{"max_tokens": 9, **params}), seed, index, banned)


def shares(num_draws: int = NUM_DRAWS, **params: object) -> dict[int, float]:
    """How often each token is drawn from `ODDS`."""
    draws = [draw(seed=17, index=i, **params) for i in range(num_draws)]
    counts = Counter(s.token_id for s in sample(ODDS.log().expand(num_draws, -1), draws))
    return {token: count / num_draws for token, count in sorted(counts.items())}


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    tokens = sample(logits, [draw(temperature=0.0), draw(temperature=0.0)])
    assert [t.token_id for t in tokens] == [1, 0]


def test_tokens_are_drawn_with_the_models_odds() -> None:
    assert shares() == pytest.approx({0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}, abs=0.03)


def test_temperature_sharpens_the_odds() -> None:
    squares = ODDS**2 / (ODDS**2).sum()
    assert shares(temperature=0.5) == pytest.approx(dict(enumerate(squares.tolist())), abs=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert shares(top_k=2) == pytest.approx({0: 0.625, 1: 0.375}, abs=0.03)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert shares(top_p=0.75) == pytest.approx({0: 0.625, 1: 0.375}, abs=0.03)
    assert shares(200, top_p=0.4) == {0: 1.0}
    assert shares(200, top_p=0.0) == {0: 1.0}


def test_banned_tokens_are_never_chosen() -> None:
    assert 0 not in shares_without(banned=(0,))
    (token,) = sample(ODDS.log()[None], [draw(banned=(0,), temperature=0.0)])
    assert token.token_id == 1


def shares_without(banned: tuple[int, ...]) -> set[int]:
    draws = [draw(index=i, banned=banned) for i in range(500)]
    return {s.token_id for s in sample(ODDS.log().expand(500, -1), draws)}


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10_000), st.integers(1, 5))
def test_a_token_depends_on_its_seed_index_and_logits_alone(
    seed: int, index: int, num_others: int
) -> None:
    row = ODDS.log()[None]
    (alone,) = sample(row, [draw(seed, index)])
    others = [draw(seed + i + 1, index) for i in range(num_others)]
    *_, among = sample(row.expand(num_others + 1, -1), [*others, draw(seed, index)])
    assert alone == among


def test_the_random_numbers_never_change() -> None:
    # A worker of another version must draw the same first token.
    assert [draw_noise(seed, index, 2).tolist() for seed, index in ((0, 0), (0, 1), (-1, 0))] == [
        pytest.approx([-1.1381671294670763, -0.11833448375195114], rel=1e-12),
        pytest.approx([0.6989162820377599, 1.9311797482055946], rel=1e-12),
        pytest.approx([0.23840484544384988, 0.20866348937968862], rel=1e-12),
    ]


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    draws = [draw(seed=3, index=i, temperature=temperature) for i in range(200)]
    assert {s.token_id for s in sample(ODDS.log().expand(200, -1), draws)} == {0}


def test_rounding_does_not_change_what_is_drawn() -> None:
    torch.manual_seed(7)
    logits = torch.randn(500, 4096) * 3
    rounded = logits + torch.randn(500, 4096) * 1e-5
    draws = [draw(seed=3, index=i) for i in range(500)]
    assert sample(logits, draws) == sample(rounded, draws)


def test_logprobs_are_the_models_own() -> None:
    params = {"temperature": 0.3, "top_k": 1, "num_logprobs": 2}
    (token,) = sample(ODDS.log()[None] + 5.0, [draw(banned=(0,), **params)])
    assert token.token_id == 1
    assert token.logprob == pytest.approx(log(0.3), abs=1e-5)
    assert [(t.token_id, round(t.logprob, 4)) for t in token.top] == [
        (0, round(log(0.5), 4)),
        (1, round(log(0.3), 4)),
    ]


def test_no_logprobs_unless_asked_for() -> None:
    (none, chosen) = sample(ODDS.log().expand(2, -1), [draw(), draw(num_logprobs=0)])
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    (token,) = sample(ODDS.log()[None].bfloat16(), [draw(num_logprobs=0, temperature=0.0)])
    assert token.logprob == pytest.approx(log(0.5), abs=0.01)
