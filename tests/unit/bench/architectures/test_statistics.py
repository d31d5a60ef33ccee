import numpy as np
import pytest

from baton.bench.statistics import find_crossing, mean_of, ratio_of

LOADS = (1.0, 2.0, 4.0, 8.0)


def test_the_interval_is_students():
    found = mean_of([9.0, 10.0, 11.0, 10.0, 10.0])
    assert found.value == 10.0
    half = 2.776445 * np.sqrt(0.5) / np.sqrt(5)
    assert (found.low, found.high) == pytest.approx((10 - half, 10 + half))


def test_one_value_has_no_interval():
    assert mean_of([3.0]).low is None
    assert ratio_of([(2.0, 3.0)]).low is None
    assert ratio_of([(2.0, 3.0)]).value == pytest.approx(1.5)


def test_intervals_of_five_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    found = [mean_of(rng.normal(5.0, 1.0, 5)) for _ in range(2000)]
    share = np.mean([each.low <= 5.0 <= each.high for each in found])
    assert 0.935 < share < 0.965


@pytest.mark.parametrize(("num", "true"), [(1, 12.706), (4, 2.776), (20, 2.086), (40, 2.021)])
def test_students_t(num, true):
    values = [float(i) for i in range(num + 1)]
    found = mean_of(values)
    assert found.high - found.value == pytest.approx(
        true * np.std(values, ddof=1) / (num + 1) ** 0.5, rel=0.001
    )


def test_a_ratio_is_of_pairs_so_what_both_share_cancels():
    weather = np.array([1.0, 5.0, 0.2, 3.0, 10.0])
    found = ratio_of([(w, 1.25 * w) for w in weather])
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_there_is_no_ratio_with_nothing():
    assert ratio_of([(0.0, 1.0), (1.0, 1.0)]) is None
    assert ratio_of([(1.0, 0.0)]) is None
    assert ratio_of([]) is None


def noisy(advantages, spread, repetitions=5):
    rng = np.random.default_rng(3)
    return np.array(advantages) + rng.normal(0, spread, (repetitions, len(advantages)))


def test_a_crossing_lies_between_the_loads_where_the_sign_changes():
    found = find_crossing(LOADS, noisy([-0.4, -0.2, 0.2, 0.4], 0.0))
    assert found.kind == "ahead_from"
    assert found.at == pytest.approx(2 * 2**0.5)  # half-way, on a scale of powers of two
    assert found.share == 1.0
    assert found.low == pytest.approx(found.at)


def test_noise_widens_the_interval_and_lowers_the_share():
    sharp = find_crossing(LOADS, noisy([-0.4, -0.2, 0.2, 0.4], 0.02))
    blurred = find_crossing(LOADS, noisy([-0.4, -0.2, 0.2, 0.4], 0.8))
    assert sharp.low <= 2 * 2**0.5 * 1.1
    assert sharp.high - sharp.low < blurred.high - blurred.low
    assert sharp.share == 1.0
    assert blurred.share < 1.0


@pytest.mark.parametrize(
    ("advantages", "kind"),
    [
        ([0.1, 0.2, 0.3, 0.2], "ahead"),
        ([-0.1, -0.2, -0.3, -0.2], "behind"),
        ([0.3, 0.1, -0.1, -0.2], "behind_from"),
        ([0.1, -0.1, -0.2, 0.3], "ahead_from"),  # the last change counts
    ],
)
def test_the_kinds_of_crossing(advantages, kind):
    found = find_crossing(LOADS, np.array([advantages] * 3))
    assert found.kind == kind
    assert (found.at is None) == (kind in {"ahead", "behind"})


def test_the_last_change_counts():
    assert 4 < find_crossing(LOADS, np.array([[0.1, -0.1, -0.2, 0.3]])).at < 8


def test_one_repetition_has_a_crossing_but_no_confidence():
    found = find_crossing(LOADS, np.array([[-1.0, -1.0, 1.0, 1.0]]))
    assert found.at == pytest.approx(2 * 2**0.5)
    assert found.low is None
    assert found.share == 0.0


def test_there_is_no_crossing_along_one_load():
    assert find_crossing((4.0,), np.array([[1.0], [1.0]])) is None
    assert find_crossing(LOADS, np.zeros((0, 4))) is None


def test_the_same_samples_give_the_same_interval():
    advantages = noisy([-0.4, -0.2, 0.2, 0.4], 0.3)
    assert find_crossing(LOADS, advantages) == find_crossing(LOADS, advantages)
