"""Token ranges of layers: what has landed, what is missing, what is sent again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from baton.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Stretch(NamedTuple):
    """Tokens `[start, stop)` of `layer`."""

    layer: int
    start: int
    stop: int


def intersect(some: Iterable[Stretch], others: Iterable[Stretch]) -> list[Stretch]:
    """What is in both, by layer and token; neighbours are joined. Neither overlaps itself."""
    by_layer: dict[int, list[Stretch]] = {}
    for stretch in others:
        by_layer.setdefault(stretch.layer, []).append(stretch)
    found = [
        Stretch(one.layer, max(one.start, other.start), min(one.stop, other.stop))
        for one in some
        for other in by_layer.get(one.layer, ())
        if one.start < other.stop and other.start < one.stop
    ]
    return _join(sorted(found))


def subtract(some: Iterable[Stretch], gone: Stretch) -> list[Stretch]:
    """`some` without the tokens of `gone`."""
    left: list[Stretch] = []
    for each in some:
        if each.layer != gone.layer or each.stop <= gone.start or gone.stop <= each.start:
            left.append(each)
            continue
        if each.start < gone.start:
            left.append(each._replace(stop=gone.start))
        if gone.stop < each.stop:
            left.append(each._replace(start=gone.stop))
    return left


def pack_stretches(stretches: Sequence[Stretch]) -> bytes:
    """Little-endian int32 `[n][3]`."""
    return np.array(stretches, dtype="<i4").reshape(-1, 3).tobytes()


def unpack_stretches(packed: bytes) -> list[Stretch]:
    """The inverse of `pack_stretches`.

    Raises:
        ProtocolError: not a list of ranges, or an empty or negative one.
    """
    if len(packed) % 12:
        raise ProtocolError(f"{len(packed)} bytes are not a list of ranges")
    rows = np.frombuffer(packed, dtype="<i4").reshape(-1, 3)
    if (rows < 0).any() or (rows[:, 1] >= rows[:, 2]).any():
        raise ProtocolError("a range that is none")
    return [Stretch(*row) for row in rows.tolist()]


def _join(stretches: list[Stretch]) -> list[Stretch]:
    joined: list[Stretch] = []
    for each in stretches:
        last = joined[-1] if joined else None
        if last is not None and (last.layer, last.stop) == (each.layer, each.start):
            joined[-1] = last._replace(stop=each.stop)
        else:
            joined.append(each)
    return joined
