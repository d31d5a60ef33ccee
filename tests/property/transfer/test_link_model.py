"""The model of a link: monotone, positive, and it finds what was planted."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.transfer.links.choice import Chooser
from baton.transfer.links.cost_model import (
    NETWORK,
    SAME_HOST,
    LinkModel,
    Sample,
    TransferShape,
    fit,
)
from baton.transfer.links.probes import PLAN, ProbeBounds, ProbeSeries
from tests.examples import examples

models = st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-8, 1e-5), st.floats(1 / 50e9, 1 / 50e6)).map(
    lambda costs: LinkModel(*costs)
)
links = st.tuples(models, st.sampled_from([0, 15])).map(
    lambda drawn: msgspec.structs.replace(drawn[0], num_probes=drawn[1])
)
"""Guesses, and links that were measured."""
shapes = st.builds(TransferShape, st.integers(1, 1 << 30), st.integers(1, 1 << 15))
times = st.floats(1e-6, 10.0)
priors = st.sampled_from([SAME_HOST, NETWORK])


def check_sane(model: LinkModel, some: TransferShape, other: TransferShape) -> None:
    assert min(model.latency_s, model.descriptor_s, model.byte_s) > 0
    small = TransferShape(
        min(some.num_bytes, other.num_bytes), min(some.num_descriptors, other.num_descriptors)
    )
    large = TransferShape(
        max(some.num_bytes, other.num_bytes), max(some.num_descriptors, other.num_descriptors)
    )
    assert 0 < model.predict(small) <= model.predict(large)


@given(st.lists(st.tuples(shapes, times), max_size=30), priors, shapes, shapes)
@settings(max_examples=examples(75), deadline=None)
def test_whatever_was_seen_the_model_is_monotone_and_positive(
    seen: list[tuple[TransferShape, float]],
    prior: LinkModel,
    some: TransferShape,
    other: TransferShape,
) -> None:
    fitted = fit([Sample(*each) for each in seen], prior)
    check_sane(fitted, some, other)
    refined = prior
    for shape, seconds in seen:
        refined = refined.refine(shape, seconds)
    check_sane(refined, some, other)


@given(models, st.integers(0, 2**32 - 1), priors)
@settings(max_examples=examples(50), deadline=None)
def test_a_fit_finds_a_planted_link_in_noise(
    planted: LinkModel, seed: int, prior: LinkModel
) -> None:
    """5 % of noise, and some probes that took five times as long.

    Where latency is all that counts, the bound of the bandwidth adds a quarter to it.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for number, probe in enumerate([*PLAN.probes, *PLAN.probes]):
        seconds = planted.predict(probe.shape) * rng.normal(1, 0.05)
        samples.append(Sample(probe.shape, seconds * (5 if number in {0, 4, 6} else 1)))
    found = fit(samples, prior)
    for probe in PLAN.probes:
        ratio = found.predict(probe.shape) / planted.predict(probe.shape)
        assert 0.8 < ratio < 1.5, (probe, ratio)


@given(models, st.integers(0, 2**32 - 1), priors, st.floats(0.0, 0.7))
@settings(max_examples=examples(30), deadline=None)
def test_a_survey_of_a_busy_machine_finds_the_link_beneath(
    planted: LinkModel, seed: int, prior: LinkModel, busy: float
) -> None:
    """That share of the probes waits for up to 25 ms, as for a core or for Python's lock."""
    rng = np.random.default_rng(seed)
    series = ProbeSeries(ProbeBounds(30.0, 1 << 30), prior)
    while (probe := series.next()) is not None:
        waits_s = rng.uniform(1e-3, 25e-3) if rng.random() < busy else 0.0
        series.made(planted.predict(probe.shape) * abs(rng.normal(1.05, 0.03)) + waits_s)
    quickest = {
        shape: min(s.seconds for s in series.samples if s.shape == shape)
        for shape in {sample.shape for sample in series.samples}
    }
    ratios = {
        shape: series.model.predict(shape) / planted.predict(shape)
        for shape, seconds in quickest.items()
        if seconds < 1.3 * planted.predict(shape)  # the others never had their chance
    }
    assert np.median([*ratios.values()] or [1.0]) < 1.6
    assert np.median([*ratios.values()] or [1.0]) > 0.6


@given(models, st.integers(1, 6), st.integers(0, 2**32 - 1), priors)
@settings(max_examples=examples(50), deadline=None)
def test_no_bandwidth_is_invented_from_small_probes(
    planted: LinkModel, num_samples: int, seed: int, prior: LinkModel
) -> None:
    """What a few disturbed small probes say of large transfers is bounded by what was seen."""
    rng = np.random.default_rng(seed)
    small = [probe.shape for probe in PLAN.probes if probe.num_pages <= 64]
    samples = [
        Sample(shape, planted.predict(shape) + rng.uniform(0, 25e-3))
        for shape in rng.choice(np.array(small, dtype=object), num_samples)
    ]
    best_rate = max(sample.shape.num_bytes / sample.seconds for sample in samples)
    assert fit(samples, prior).bandwidth <= 4.001 * best_rate


@given(links, models, st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30), deadline=None)
def test_transfers_teach_what_the_link_has_become(
    before: LinkModel, after: LinkModel, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = TransferShape(1 << int(rng.integers(10, 26)), int(rng.integers(1, 500)))
    model = before
    for _ in range(150):
        model = model.refine(shape, after.predict(shape) * rng.normal(1, 0.05))
    assert 0.8 < model.predict(shape) / after.predict(shape) < 1.25


@given(links, shapes, st.floats(2.0, 1e6))
@settings(max_examples=examples(50), deadline=None)
def test_one_outlier_moves_little(model: LinkModel, shape: TransferShape, factor: float) -> None:
    settled = model
    for _ in range(40):
        settled = settled.refine(shape, model.predict(shape))
    moved = settled.refine(shape, model.predict(shape) * factor)
    assert moved.predict(shape) < 1.3 * settled.predict(shape)


@given(links, shapes)
def test_what_was_predicted_changes_nothing(model: LinkModel, shape: TransferShape) -> None:
    again = model.refine(shape, model.predict(shape))
    assert np.isclose(again.predict(shape), model.predict(shape))


@given(models, shapes, shapes, st.lists(times, min_size=1, max_size=20))
def test_what_one_shape_taught_a_measured_link_says_nothing_of_others(
    model: LinkModel, shape: TransferShape, other: TransferShape, taken_s: list[float]
) -> None:
    measured = refined = msgspec.structs.replace(model, num_probes=15)
    for seconds in taken_s:
        refined = refined.refine(shape, seconds)
    assert refined.num_transfers == len(taken_s)
    assert refined.predict(shape) > 0
    if other.size_class != shape.size_class:
        assert refined.predict(other) == measured.predict(other)


@given(models, models, models, st.lists(shapes, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30), deadline=None)
def test_whatever_the_survey_said_transfers_lead_to_the_best_link(
    surveyed: LinkModel, first: LinkModel, second: LinkModel, wanted: list[TransferShape], seed: int
) -> None:
    """Both links begin with the same wrong model; only the one that is chosen learns.

    The other one is tried again now and then, for a few transfers, so they are counted.
    """
    by_class = {shape.size_class: shape for shape in wanted}
    truth, chooser = {"first": first, "second": second}, Chooser("measured")
    known = {kind: msgspec.structs.replace(surveyed, num_probes=15) for kind in truth}
    rng = np.random.default_rng(seed)
    num_good = dict.fromkeys(by_class, 0)
    for turn in range(200):
        for kind_of, shape in by_class.items():
            choice = chooser.choose(shape, known, [*truth])
            assert choice is not None
            took_s = truth[choice.used].predict(shape)
            best_s = min(model.predict(shape) for model in truth.values())
            num_good[kind_of] += turn >= 100 and took_s < 1.2 * best_s
            taught_s = took_s * rng.normal(1, 0.02)
            known[choice.used] = known[choice.used].refine(shape, taught_s)
    for kind_of, shape in by_class.items():
        best_s = min(model.predict(shape) for model in truth.values())
        if best_s >= 1.2 * surveyed.predict(shape):  # else the other one may never be tried
            assert num_good[kind_of] >= 85


def test_transfers_that_went_at_once_teach_what_they_were_like() -> None:
    one, all_of_them = TransferShape(1 << 20, 32), TransferShape(10 << 20, 320)
    measured = LinkModel(1e-4, 1e-6, 1e-9, num_probes=15)
    refined = measured.refine(all_of_them, 2 * measured.predict(all_of_them), alike=one)
    assert refined.predict(one) > 1.4 * measured.predict(one)
    assert refined.predict(all_of_them) == measured.predict(all_of_them)
