"""How far apart two workers are, from the paths that they report: `zone/rack/host/device`.

A level that a path does not name is not known, and makes no difference. The highest level at which
both are known and differ decides; a name needs to be unique within the level above it only.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_LEVELS: Final = 4
MOST_PLACES: Final = 2048
"""Different paths; what comes beyond them is at an unknown place."""
MOST_NAMED: Final = 16_384
"""Pairs of paths whose distance is remembered by name: 6 MB."""
_UNKNOWN: Final = -1
_ZONE, _RACK, _HOST, _DEVICE = range(NUM_LEVELS)


class Distance(IntEnum):
    """From near to far. Where nothing is known, two workers are taken to be in the same zone."""

    SAME_DEVICE = 0
    SAME_HOST = 1
    SAME_RACK = 2
    SAME_ZONE = 3
    CROSS_ZONE = 4

    def __str__(self) -> str:
        return self.name.lower()


def _split(path: str) -> tuple[str, ...]:
    names = path.split("/", NUM_LEVELS - 1)
    return (*names, *[""] * (NUM_LEVELS - len(names)))


def complete(path: str, found: str) -> str:
    """A path, with the levels that it does not name as `found` has them."""
    if not found:
        return path
    names = zip(_split(path), _split(found), strict=True)
    return "/".join(own or other for own, other in names).rstrip("/")


class Places:
    """Numbers for paths, and the distances of all of them, `[place, place]`. 0 is an unknown one.

    A policy looks at the distances of many workers at once. Owner: one thread.
    """

    FIRST_PLACES: Final = 16

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._codes: list[dict[str, int]] = [{} for _ in range(NUM_LEVELS)]
        self._levels = np.full((NUM_LEVELS, self.FIRST_PLACES), _UNKNOWN, dtype=np.int32)
        self.distances = np.full(
            (self.FIRST_PLACES, self.FIRST_PLACES), Distance.SAME_ZONE, dtype=np.int8
        )
        self.number("")

    def number(self, path: str) -> int:
        """The place of a path; the same for the same path."""
        known = self._numbers.get(path)
        if known is not None:
            return known
        number = len(self._numbers)
        if number >= MOST_PLACES:
            return 0
        if number == len(self.distances):
            self._grow()
        self._numbers[path] = number
        for level, name in enumerate(_split(path)):
            codes = self._codes[level]
            self._levels[level, number] = codes.setdefault(name, len(codes)) if name else _UNKNOWN
        row = self._compute_row(number)
        self.distances[number, : number + 1] = row
        self.distances[: number + 1, number] = row
        return number

    @property
    def is_full(self) -> bool:
        """Whether a path that is not known yet gets no place of its own."""
        return len(self._numbers) >= MOST_PLACES

    @property
    def has_device(self) -> NDArray[np.bool_]:
        """Whether a place is one known device `[place]`."""
        is_known: NDArray[np.bool_] = (self._levels[[_HOST, _DEVICE]] != _UNKNOWN).all(0)
        return is_known

    def distance(self, one: str, other: str) -> Distance:
        """Of two workers, by their paths."""
        places = self.number(one), self.number(other)  # it may replace the array
        return Distance(int(self.distances[places]))

    def _compute_row(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Distances to all places up to this one."""
        levels, own = self._levels[:, : number + 1], self._levels[:, number, None]
        known = (levels != _UNKNOWN) & (own != _UNKNOWN)
        differ = known & (levels != own)
        near = np.where(known[_RACK], Distance.SAME_RACK, Distance.SAME_ZONE)
        return np.select(
            [
                differ[_ZONE],
                differ[_RACK],
                differ[_HOST],
                differ[_DEVICE],
                known[_DEVICE],
                known[_HOST],
            ],
            [
                np.full_like(near, Distance.CROSS_ZONE),
                np.full_like(near, Distance.SAME_ZONE),
                near,
                np.full_like(near, Distance.SAME_HOST),
                np.full_like(near, Distance.SAME_DEVICE),
                np.full_like(near, Distance.SAME_HOST),
            ],
            near,
        )

    def _grow(self) -> None:
        num = len(self.distances)
        levels = np.full((NUM_LEVELS, 2 * num), _UNKNOWN, dtype=np.int32)
        levels[:, :num] = self._levels
        distances = np.full((2 * num, 2 * num), Distance.SAME_ZONE, dtype=np.int8)
        distances[:num, :num] = self.distances
        self._levels, self.distances = levels, distances


@lru_cache(maxsize=MOST_NAMED)
def name_distance(one: str, other: str) -> str:
    """How far apart two workers are, by their paths, for tickets; empty where one has none.

    Each request asks; a known pair takes no Python call.
    """
    return str(Places().distance(one, other)) if one and other else ""
