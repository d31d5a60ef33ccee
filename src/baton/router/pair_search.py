"""Which pairs of workers are worth a closer look: of many workers, not all pairs can be.

The best workers of each part are paired with each other. In a fleet that is at several places, that
could leave out what is near: of eight idle prefill workers and eight idle decode workers no two may
be in one rack. So each of the best is also paired with those that are best *for it*, handoff
included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.router.handoff_costs import HandoffCosts

MOST_OF_EACH: Final = 8
"""Workers of each part that pairs are made of, and of those that are best for one of them."""
MOST_NEAR_PAIRS: Final = 4 * MOST_OF_EACH
"""Pairs of a fleet at several places that are looked at closely."""


@dataclass(frozen=True, slots=True)
class PairSearch:
    """Workers are numbers. The first `len(answering)` may answer, those at `helpers` prefill.

    `computing` is what a prompt costs at each, `answering` an answer; `handoff_weight` what a
    second of a handoff costs at least. Of `num_uncached[w]` tokens KV is handed over to a worker.
    `is_spread`: not all are at one of the `places`.
    """

    computing: NDArray[np.float64]
    answering: NDArray[np.float64]
    helpers: NDArray[np.intp]
    num_uncached: NDArray[np.float64]
    handoff_weight: float
    handoffs: HandoffCosts
    places: NDArray[np.intp]
    is_spread: bool

    def find(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Prefill and decode workers `[num_pairs]`, the most promising first; no worker twice."""
        helpers = self.helpers[_find_least(self.computing[self.helpers])]
        decodes = _find_least(self.answering)
        if self.is_spread and max(len(self.helpers), len(self.answering)) > MOST_OF_EACH:
            return self._find_near(helpers, decodes)
        firsts, seconds = helpers.repeat(len(decodes)), np.tile(decodes, len(helpers))
        are_two = firsts != seconds
        return firsts[are_two], seconds[are_two]

    def predict_handoffs(
        self, ids: Sequence[WorkerId], firsts: NDArray[np.intp], seconds: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """Exposed seconds of each pair's handoff `[num_pairs]`; `ids` are all workers'."""
        distances = self.handoffs.places.distances[self.places[firsts], self.places[seconds]]
        handoff_s = self.handoffs.expect(distances, self.num_uncached[seconds])
        one, other = ([ids[at] for at in each.tolist()] for each in (firsts, seconds))
        handoff_s *= self.handoffs.factors(zip(one, other, strict=True))
        return handoff_s

    def _find_near(
        self, helpers: NDArray[np.intp], decodes: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Each of the best with those that are best for it."""
        costs = self._estimate(helpers, np.arange(len(self.answering)))
        near = costs.argsort(axis=1, kind="stable")[:, :MOST_OF_EACH]
        near_costs = np.take_along_axis(costs, near, axis=1)
        costs = self._estimate(self.helpers, decodes)
        best = costs.argmin(axis=0)
        cost = np.concatenate([near_costs.ravel(), costs[best, np.arange(len(decodes))]])
        firsts = np.concatenate([helpers.repeat(near.shape[1]), self.helpers[best]])
        seconds = np.concatenate([near.ravel(), decodes])
        _, at = np.unique(firsts * len(self.num_uncached) + seconds, return_index=True)
        at = np.sort(at[cost[at] < inf])  # inf: a worker with itself
        at = at[cost[at].argsort(kind="stable")][:MOST_NEAR_PAIRS]
        return firsts[at], seconds[at]

    def _estimate(self, firsts: NDArray[np.intp], seconds: NDArray[np.intp]) -> NDArray[np.float64]:
        """`[num_firsts, num_seconds]`, by distances alone; inf where a worker is both."""
        places = self.places
        distances = self.handoffs.places.distances.take(places[firsts], 0).take(places[seconds], 1)
        costs: NDArray[np.float64] = self.handoffs.expect(distances, self.num_uncached[seconds])
        costs *= self.handoff_weight
        costs += self.computing[firsts][:, None]
        costs += self.answering[seconds]
        costs[firsts[:, None] == seconds] = inf
        return costs


def _find_least(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """The places of the `MOST_OF_EACH` least, from the least on."""
    found: NDArray[np.intp] = values.argsort(kind="stable")[:MOST_OF_EACH]
    return found
