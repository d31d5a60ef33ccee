"""How much of a prompt's beginning is loaded, against all choices; what is learned of a tier."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.handoff.pool_mode.load_costs import (
    LoadCosts,
    TierCost,
    TierTime,
    TierTokens,
    add_times,
    cut,
)

TIERS = ("host", "shared", "object", "new")
seconds = st.floats(0, 1)
runs_of_tiers = st.lists(
    st.builds(TierTokens, st.sampled_from(TIERS), st.integers(1, 12)), max_size=6
)


@st.composite
def learned_costs(draw: st.DrawFn) -> LoadCosts:
    """Of all tiers but `new`."""
    costs = LoadCosts()
    for tier in TIERS[:3]:
        for num in draw(st.lists(st.integers(1, 50), min_size=1, max_size=4)):
            costs.observe(TierTime(tier, num, draw(seconds)))
    return costs


def savings(costs: LoadCosts, runs: list[TierTokens], token_s: float) -> list[float]:
    """Seconds that are saved by loading so many leading tokens, for each number."""
    tiers = [run.tier for run in runs for _ in range(run.num_tokens)]
    saved = []
    for stop in range(len(tiers) + 1):
        loaded = {tier: tiers[:stop].count(tier) for tier in tiers[:stop]}
        took_s = sum(costs.predict(tier, num) or 0.0 for tier, num in loaded.items())
        saved.append(stop * token_s - took_s)
    return saved


@given(learned_costs(), runs_of_tiers, st.floats(1e-6, 0.1))
def test_no_other_number_of_tokens_saves_more(
    costs: LoadCosts, runs: list[TierTokens], token_s: float
) -> None:
    saved = savings(costs, runs, token_s)
    assert saved[costs.choose(runs, token_s)] == pytest.approx(max(saved), abs=1e-9)


@given(learned_costs(), runs_of_tiers)
def test_all_is_loaded_where_it_is_not_known_what_computing_takes(
    costs: LoadCosts, runs: list[TierTokens]
) -> None:
    assert costs.choose(runs, 0.0) == sum(run.num_tokens for run in runs)


@given(learned_costs(), runs_of_tiers, st.floats(0.001, 0.1))
def test_what_was_refused_is_tried_again(
    costs: LoadCosts, runs: list[TierTokens], token_s: float
) -> None:
    for _ in range(200):
        num = costs.choose(runs, token_s)
        if num == sum(run.num_tokens for run in runs):
            return
        before = {tier: cost.predict(10) for tier, cost in costs.tiers.items()}
        costs.forget_slow(cut(runs, num), token_s)
        after = {tier: cost.predict(10) for tier, cost in costs.tiers.items()}
        assert before != after
    pytest.fail("a tier is refused for ever")


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.lists(st.integers(1, 999), min_size=1))
def test_no_load_is_expected_to_take_less_than_nothing(
    fixed: float, each: float, sizes: list[int]
) -> None:
    first, *others = sizes
    took_s = fixed + each * first
    cost = TierCost(first, took_s, first * first, first * took_s)
    for size in others:
        cost.observe(size, fixed + each * size)
    assert cost.predict(2000) >= cost.predict(1) >= 0
    if fixed == 0:
        assert cost.predict(500) == pytest.approx(each * 500)


def test_what_a_load_takes_besides_its_tokens_is_learned() -> None:
    """0.1 s and 1 ms for each token; sizes from 10 to 100: within a tenth of the truth."""
    cost = TierCost(10, 0.11, 100, 1.1)
    for at in range(40):
        size = 10 + at * 37 % 91
        cost.observe(size, 0.1 + 0.001 * size)
    assert cost.predict(100) == pytest.approx(0.2, rel=0.1)
    assert cost.predict(10) == pytest.approx(0.11, rel=0.25)


@pytest.mark.parametrize(("then_s", "least", "most"), [(0.03, 5, 15), (0.001, 90, 99)])
def test_a_slow_tier_is_seldom_tried_and_one_that_becomes_quick_is_used(
    then_s: float, least: int, most: int
) -> None:
    """Of 100 prompts: computing takes 16 ms, a load takes 30, or from the second on 1."""
    costs, num_loads, last = LoadCosts(), 0, False
    runs = [TierTokens("object", 16)]
    for _ in range(100):
        last = costs.choose(runs, 0.001) > 0
        if last:
            costs.observe(TierTime("object", 16, then_s if num_loads else 0.03))
            num_loads += 1
        else:
            costs.forget_slow(runs, 0.001)
    assert least <= num_loads <= most
    assert last == (then_s < 0.016)


@given(runs_of_tiers, st.integers(0, 40), st.integers(0, 40))
def test_a_cut_has_the_tokens_between(runs: list[TierTokens], start: int, length: int) -> None:
    def spell(some: list[TierTokens]) -> list[str]:
        return [run.tier for run in some for _ in range(run.num_tokens)]

    stop = start + length
    assert spell(cut(runs, start, stop)) == spell(runs)[start:stop]
    assert spell(cut(runs, start)) == spell(runs)[start:]


@given(st.lists(st.builds(TierTime, st.sampled_from(TIERS), st.integers(1, 9), seconds)), seconds)
def test_no_time_is_lost(batch: list[TierTime], more_s: float) -> None:
    assume(batch)
    times: dict[str, TierTime] = {}
    add_times(times, batch, more_s)
    took_s = sum(each.seconds for each in batch) + more_s
    assert sum(each.seconds for each in times.values()) == pytest.approx(took_s)
    assert sum(t.num_tokens for t in times.values()) == sum(t.num_tokens for t in batch)
