"""Which pieces of what arrived are looked at, where not all are."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Sampler:
    """Chooses the pieces of one handoff that are looked at. Owner: the receiver's thread.

    `chance` is seeded from the system's entropy: a peer cannot foresee the choice.
    """

    share: float
    chance: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(secrets.randbits(128))
    )
    _seen_layers: set[int] = field(default_factory=set)

    def choose(self, layer: int, num_segments: int) -> NDArray[np.int64]:
        """Indices of one notification's pieces to check, ascending; at least one of a new layer.

        Every piece is chosen with probability `share` or more, independently of the others.
        """
        is_chosen = self.chance.random(num_segments) < self.share
        if layer not in self._seen_layers and num_segments:
            self._seen_layers.add(layer)
            is_chosen[self.chance.integers(num_segments)] = True
        return np.flatnonzero(is_chosen)
