"""Token ranges of layers: what has landed, what is missing, what is sent again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baton.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LayerTokenRange(NamedTuple):
    """Tokens `[start, stop)` of `layer`."""

    layer: int
    start: int
    stop: int


def intersect(
    some: Iterable[LayerTokenRange], others: Iterable[LayerTokenRange]
) -> list[LayerTokenRange]:
    """What is in both, by layer and token; neighbours are joined. Neither overlaps itself."""
    by_layer: dict[int, list[LayerTokenRange]] = {}
    for token_range in others:
        by_layer.setdefault(token_range.layer, []).append(token_range)
    found = [
        LayerTokenRange(one.layer, max(one.start, other.start), min(one.stop, other.stop))
        for one in some
        for other in by_layer.get(one.layer, ())
        if one.start < other.stop and other.start < one.stop
    ]
    return _join(sorted(found))


def subtract(some: Iterable[LayerTokenRange], gone: LayerTokenRange) -> list[LayerTokenRange]:
    """`some` without the tokens of `gone`."""
    left: list[LayerTokenRange] = []
    for each in some:
        if each.layer != gone.layer or each.stop <= gone.start or gone.stop <= each.start:
            left.append(each)
            continue
        if each.start < gone.start:
            left.append(each._replace(stop=gone.start))
        if gone.stop < each.stop:
            left.append(each._replace(start=gone.stop))
    return left


def pack_ranges(token_ranges: Sequence[LayerTokenRange]) -> bytes:
    """Little-endian int32 `[n][3]`."""
    return np.array(token_ranges, dtype="<i4").reshape(-1, 3).tobytes()


def unpack_ranges(packed: bytes) -> list[LayerTokenRange]:
    """The inverse of `pack_ranges`, of ranges by layer and token: a peer repeats none.

    Raises:
        ProtocolError: not a list of ranges, an empty or negative one, out of order, or overlapping.
    """
    if len(packed) % 12:
        raise ProtocolError(f"{len(packed)} bytes are not a list of ranges")
    rows = np.frombuffer(packed, dtype="<i4").reshape(-1, 3)
    if (rows < 0).any() or (rows[:, 1] >= rows[:, 2]).any():
        raise ProtocolError("a range that is none")
    before, after = rows[:-1], rows[1:]
    is_later = (before[:, 0] == after[:, 0]) & (before[:, 2] <= after[:, 1])
    if not (is_later | (before[:, 0] < after[:, 0])).all():
        raise ProtocolError("ranges that overlap, or are not by layer and token")
    return [LayerTokenRange(*row) for row in rows.tolist()]


def _join(token_ranges: list[LayerTokenRange]) -> list[LayerTokenRange]:
    joined: list[LayerTokenRange] = []
    for each in token_ranges:
        last = joined[-1] if joined else None
        if last is not None and (last.layer, last.stop) == (each.layer, each.start):
            joined[-1] = last._replace(stop=each.stop)
        else:
            joined.append(each)
    return joined


class Coverage:
    """Which tokens of `[start, stop)` have landed in which layer.

    Pure; the invariant is that `num_missing` equals the zeros in the bitmap.
    """

    def __init__(self, *, num_layers: int, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._landed = np.zeros((num_layers, stop - start), dtype=np.bool_)
        self._missing_in_layer = np.empty(num_layers, dtype=np.int64)
        self._missing_in_layer.fill(stop - start)  # np.full takes twice as long
        self.num_missing = num_layers * (stop - start)
        self.has_complete_layer = False
        """Whether every token of some layer has landed."""

    @property
    def complete(self) -> bool:
        """Whether every token of every layer has landed."""
        return self.num_missing == 0

    @property
    def num_leading_layers(self) -> int:
        """Layers from the first on of which every token has landed."""
        incomplete = np.flatnonzero(self._missing_in_layer)
        return int(incomplete[0]) if len(incomplete) else len(self._landed)

    @property
    def is_empty(self) -> bool:
        """Whether no token of any layer has landed."""
        return self.num_missing == self._landed.size

    def check(self, layer: int, start: int, stop: int, num_layers: int = 1) -> None:
        """Refuse a range, of layers from `layer` on, that is not expected or landed already.

        Raises:
            ProtocolError: out of bounds, empty, or overlapping what landed before.
        """
        if not 0 <= layer < layer + num_layers <= len(self._landed):
            raise ProtocolError(f"layers [{layer}, {layer + num_layers}) of {len(self._landed)}")
        if not self._start <= start < stop <= self._stop:
            raise ProtocolError(
                f"tokens [{start}, {stop}) where [{self._start}, {self._stop}) are expected"
            )
        first = self._start
        if True in self._landed[layer : layer + num_layers, start - first : stop - first]:
            raise ProtocolError(f"tokens [{start}, {stop}) of layer {layer} landed twice")

    def add(self, layer: int, start: int, stop: int, num_layers: int = 1) -> None:
        """Count a range of layers from `layer` on as landed.

        Raises:
            ProtocolError: as `check`; then nothing is counted.
        """
        self.check(layer, start, stop, num_layers)
        layers, first = slice(layer, layer + num_layers), self._start
        self._landed[layers, start - first : stop - first] = True
        missing = self._missing_in_layer[layers]
        missing -= stop - start
        self.has_complete_layer |= 0 in missing
        self.num_missing -= num_layers * (stop - start)

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
