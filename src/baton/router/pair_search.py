"""Which pairs of workers are worth a closer look: of many workers, not all pairs can be.

The best workers of each part are paired with each other. In a fleet that is at several places, that
could leave out what is near: of eight idle prefill workers and eight idle decode workers no two may
be in one rack. So each of the best is also paired with those that are best *for it*, handoff
included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    `places` is None where all are at one.
    """

    computing: NDArray[np.float64]
    answering: NDArray[np.float64]
    helpers: NDArray[np.intp]
    num_uncached: NDArray[np.float64]
    handoff_weight: float
    handoffs: HandoffCosts
    places: NDArray[np.intp] | None

    def find(self) -> list[tuple[float, int, int]]:
        """`(cost without the handoff, prefill, decode)`, the most promising first."""
        firsts = _find_least(self.computing[self.helpers])
        seconds = _find_least(self.answering)
        places = self.places
        if places is None or max(len(self.helpers), len(self.answering)) <= MOST_OF_EACH:
            helpers = self.helpers[firsts].tolist()
            pairs = [(first, second) for first in helpers for second in seconds]
        else:
            pairs = self._find_near(places, firsts, seconds)
        before, after = self.computing.tolist(), self.answering.tolist()
        return [(before[first] + after[second], first, second) for first, second in pairs]

    def _find_near(
        self, places: NDArray[np.intp], firsts: list[int], seconds: list[int]
    ) -> list[tuple[int, int]]:
        helpers, decodes = self.helpers[firsts], np.arange(len(self.answering))
        costs = self._estimate(places, helpers, decodes)
        near = costs.argsort(axis=1, kind="stable")[:, :MOST_OF_EACH]
        rows = np.arange(len(firsts))[:, None]
        ranked = [
            (cost, first, second)
            for first, own, found in zip(
                helpers.tolist(), costs[rows, near].tolist(), near.tolist(), strict=True
            )
            for cost, second in zip(own, found, strict=True)
        ]
        costs = self._estimate(places, self.helpers, np.array(seconds))
        best = costs.argmin(axis=0)
        ranked += zip(
            costs[best, np.arange(len(seconds))].tolist(),
            self.helpers[best].tolist(),
            seconds,
            strict=True,
        )
        ranked.sort(key=itemgetter(0))
        pairs = dict.fromkeys((first, second) for _, first, second in ranked)
        return list(pairs)[:MOST_NEAR_PAIRS]

    def _estimate(
        self, places: NDArray[np.intp], firsts: NDArray[np.intp], seconds: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        """`[num_firsts, num_seconds]`, by distances alone; no worker is paired with itself."""
        handoff_s = self.handoffs.expect(
            places[firsts], places[seconds], self.num_uncached[seconds]
        )
        costs: NDArray[np.float64] = handoff_s
        costs *= self.handoff_weight
        costs += self.computing[firsts][:, None]
        costs += self.answering[seconds]
        costs[firsts[:, None] == seconds] = inf
        return costs


def _find_least(values: NDArray[np.float64]) -> list[int]:
    """The places of the `MOST_OF_EACH` least, from the least on."""
    found: list[int] = values.argsort(kind="stable")[:MOST_OF_EACH].tolist()
    return found
