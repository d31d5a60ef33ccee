"""Counting what landed against what is expected: no ordering of writes is assumed."""

from __future__ import annotations

import numpy as np

from baton.errors import ProtocolError
from baton.handoff.token_ranges import LayerTokenRange


class Coverage:
    """Which tokens of `[start, stop)` have landed in which layer.

    Pure; the invariant is that `num_missing` equals the zeros in the bitmap.
    """

    def __init__(self, *, num_layers: int, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._landed = np.zeros((num_layers, stop - start), dtype=np.bool_)
        self._missing_in_layer = np.full(num_layers, stop - start, dtype=np.int64)
        self.num_missing = num_layers * (stop - start)

    @property
    def complete(self) -> bool:
        """Whether every token of every layer has landed."""
        return self.num_missing == 0

    @property
    def num_complete_layers(self) -> int:
        """Layers of which every token has landed."""
        return int((self._missing_in_layer == 0).sum())

    def check(self, layer: int, start: int, stop: int) -> None:
        """Refuse a range that is not expected, or that landed already.

        Raises:
            ProtocolError: out of bounds, empty, or overlapping what landed before.
        """
        if not 0 <= layer < len(self._landed):
            raise ProtocolError(f"layer {layer} of {len(self._landed)}")
        if not self._start <= start < stop <= self._stop:
            raise ProtocolError(
                f"tokens [{start}, {stop}) where [{self._start}, {self._stop}) are expected"
            )
        if self._row(layer, start, stop).any():
            raise ProtocolError(f"tokens [{start}, {stop}) of layer {layer} landed twice")

    def add(self, layer: int, start: int, stop: int) -> None:
        """Count a range as landed.

        Raises:
            ProtocolError: as `check`; then nothing is counted.
        """
        self.check(layer, start, stop)
        self._row(layer, start, stop)[:] = True
        self._missing_in_layer[layer] -= stop - start
        self.num_missing -= stop - start

    def gaps(self) -> list[LayerTokenRange]:
        """What has not landed: the longest runs, by layer and token."""
        found: list[LayerTokenRange] = []
        for layer in np.flatnonzero(self._missing_in_layer).tolist():
            missing = np.logical_not(self._landed[layer]).astype(np.int8)
            edges = np.flatnonzero(np.diff(missing, prepend=0, append=0)) + self._start
            found += [LayerTokenRange(layer, *pair) for pair in edges.reshape(-1, 2).tolist()]
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError where counters and bitmap disagree."""
        missing = np.logical_not(self._landed).sum(axis=1)
        if not np.array_equal(missing, self._missing_in_layer):
            raise AssertionError("per-layer counters disagree with the bitmap")
        if int(missing.sum()) != self.num_missing:
            raise AssertionError("num_missing disagrees with the bitmap")

    def _row(self, layer: int, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self._landed[layer, start - self._start : stop - self._start]
