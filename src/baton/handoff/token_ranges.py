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
    """The inverse of `pack_ranges`.

    Raises:
        ProtocolError: not a list of ranges, or an empty or negative one.
    """
    if len(packed) % 12:
        raise ProtocolError(f"{len(packed)} bytes are not a list of ranges")
    rows = np.frombuffer(packed, dtype="<i4").reshape(-1, 3)
    if (rows < 0).any() or (rows[:, 1] >= rows[:, 2]).any():
        raise ProtocolError("a range that is none")
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
