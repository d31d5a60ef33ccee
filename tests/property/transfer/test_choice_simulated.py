"""The choice against simulated links whose true costs are known: regret, and convergence.

A day of transfers over several links. The survey is right about their order, or is not; it is off
for some shapes in a way that all links share; transfers have noise, spikes, and bursts of load.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.transfer.links.choice import Chooser
from baton.transfer.links.cost_model import LinkModel, TransferShape
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Mapping

seeds = st.integers(0, 2**32 - 1)
NUM_ROUNDS = 160
SHAPES = [
    TransferShape(4096, 1),
    TransferShape(1 << 18, 128),
    TransferShape(1 << 21, 1),
    TransferShape(1 << 24, 512),
]


@dataclass
class World:
    """Links whose cost for a shape is `truth` times a misfit that all share."""

    truth: Mapping[str, LinkModel]
    misfit: Mapping[TransferShape, float]
    rng: np.random.Generator
    noise: float = 0.1
    spikes: float = 0.05

    def cost(self, link: str, shape: TransferShape) -> float:
        return self.truth[link].predict(shape) * self.misfit[shape]

    def carry(self, link: str, shape: TransferShape, load: float = 1.0) -> float:
        spike = self.rng.uniform(3, 30) if self.rng.random() < self.spikes else 1.0
        return self.cost(link, shape) * np.exp(self.rng.normal(0, self.noise)) * spike * load

    def regret(self, link: str, shape: TransferShape) -> float:
        return self.cost(link, shape) / min(self.cost(each, shape) for each in self.truth) - 1


@dataclass
class Worker:
    """The product's chooser and models, in that world."""

    world: World
    models: dict[str, LinkModel]
    chooser: Chooser

    def transfer(self, shape: TransferShape, load: float = 1.0) -> float:
        choice = self.chooser.choose(shape, self.models, [*self.models])
        assert choice is not None
        link = choice.used
        took_s = self.world.carry(link, shape, load)
        self.models[link] = self.models[link].refine(shape, took_s)
        return self.world.regret(link, shape)

    def live(self, num_rounds: int, load: float = 1.0) -> np.ndarray:
        """Regrets, `[num_rounds, len(SHAPES)]`."""
        return np.array([[self.transfer(s, load) for s in SHAPES] for _ in range(num_rounds)])


def make_world(rng: np.random.Generator, **kwargs: float) -> World:
    def draw() -> LinkModel:
        return LinkModel(
            float(np.exp(rng.uniform(np.log(5e-6), np.log(3e-4)))),
            float(np.exp(rng.uniform(np.log(5e-8), np.log(3e-6)))),
            float(np.exp(rng.uniform(np.log(1e-11), np.log(1e-9)))),
            num_probes=20,
        )

    truth = {name: draw() for name in ("a", "b", "c")}
    misfit = {shape: float(rng.uniform(0.8, 1.6)) for shape in SHAPES}
    return World(truth, misfit, rng, **kwargs)


def survey(world: World, error: float = 0.03) -> Worker:
    """Right about each link but for `error`; knows nothing of the misfit."""
    models = {
        name: msgspec.structs.replace(
            model,
            latency_s=model.latency_s * np.exp(world.rng.normal(0, error)),
            descriptor_s=model.descriptor_s * np.exp(world.rng.normal(0, error)),
            byte_s=model.byte_s * np.exp(world.rng.normal(0, error)),
        )
        for name, model in world.truth.items()
    }
    return Worker(world, models, Chooser("measured"))


@given(seeds)
@settings(max_examples=examples(6), deadline=None)
def test_transfers_do_not_unlearn_what_the_survey_had_right(seed: int) -> None:
    worker = survey(make_world(np.random.default_rng(seed)))
    regrets = worker.live(NUM_ROUNDS)
    assert regrets[NUM_ROUNDS // 2 :].mean() < 0.25, "of the unluckiest day that can be found"
    assert np.median(regrets[NUM_ROUNDS // 2 :]) < 0.06


def test_over_many_worlds_learning_is_no_worse_than_the_survey() -> None:
    surveyed, refined = [], []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        worker = survey(make_world(rng))
        first = [worker.chooser.choose(s, worker.models, [*worker.models]) for s in SHAPES]
        surveyed += [worker.world.regret(c.used, s) for c, s in zip(first, SHAPES, strict=True)]
        worker.live(60)
        last = [worker.chooser.choose(s, worker.models, [*worker.models]) for s in SHAPES]
        refined += [worker.world.regret(c.used, s) for c, s in zip(last, SHAPES, strict=True)]
    within = [np.mean(np.array(each) <= 0.05) for each in (surveyed, refined)]
    assert within[1] >= within[0] - 0.02, within
    assert np.mean(refined) <= np.mean(surveyed) + 0.01


def test_a_burst_of_load_is_not_remembered_for_long() -> None:
    """Everything takes four times as long for a while; some hundred transfers later, as before."""
    later = []
    for seed in range(8):
        worker = survey(make_world(np.random.default_rng(seed)))
        worker.live(50)
        worker.live(30, 4.0)
        later.append(worker.live(400)[250:])
    assert np.mean(later) < 0.15
    assert np.median(later) < 0.02


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_a_link_that_is_worse_than_surveyed_is_left_and_seldom_tried(factor: float) -> None:
    later = []
    for seed in range(6):
        worker = survey(make_world(np.random.default_rng(seed)))
        liked = [worker.chooser.choose(s, worker.models, [*worker.models]) for s in SHAPES]
        truth = dict(worker.world.truth)
        for name in {choice.used for choice in liked if choice is not None}:
            good = truth[name]
            truth[name] = LinkModel(
                good.latency_s * factor, good.descriptor_s * factor, good.byte_s * factor
            )
        worker.world = replace(worker.world, truth=truth)
        later.append(worker.live(400)[150:])
    assert np.mean(later) < 0.15, "of all transfers, those included that try again"
    assert np.median(later) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_what_is_as_good_is_not_changed_to_and_fro(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = LinkModel(2e-5, 1e-7, 1e-10, num_probes=20)
    misfit = dict.fromkeys(SHAPES, 1.4)
    worker = survey(World({"a": one, "b": one}, misfit, rng), error=0.0)
    used = []
    for _ in range(200):
        choice = worker.chooser.choose(SHAPES[0], worker.models, ["a", "b"])
        used.append(choice.used)
        took_s = worker.world.carry(choice.used, SHAPES[0])
        worker.models[choice.used] = worker.models[choice.used].refine(SHAPES[0], took_s)
    assert sum(one != two for one, two in itertools.pairwise(used)) <= 12
