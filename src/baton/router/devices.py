"""Workers that share a device, a GPU or a core: while several of them compute, each is slower.

They are those that report the same path, down to its last level (`zone/rack/host/device`). The
device's time is taken to be divided evenly among its workers that have answers under way: a step of
one takes as many times as long as there are such workers. So answers are batched at few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SharedDevice:
    """How many of a device's workers have answers, and had, as time went by. Owner: one thread."""

    __slots__ = ("_at", "_busy_seconds", "num_busy")

    def __init__(self) -> None:
        self.num_busy = 0
        self._busy_seconds = self._at = 0.0

    def count(self, change: int, now: float) -> None:
        """One worker more has answers, or one less."""
        self._busy_seconds = self.busy_seconds(now)
        self._at = now
        self.num_busy += change

    def busy_seconds(self, now: float) -> float:
        """Workers with answers, times seconds, until now."""
        return self._busy_seconds + self.num_busy * (now - self._at)


class DeviceSums:
    """Sums over the workers of each device: `devices[w]` is the number of worker `w`'s."""

    __slots__ = ("_devices",)

    def __init__(self, devices: NDArray[np.intp]) -> None:
        self._devices = devices

    @classmethod
    def of(cls, places: NDArray[np.intp], has_device: NDArray[np.bool_]) -> DeviceSums | None:
        """Of workers at these places; None where no two of them share a device."""
        # A place without a known device is that of each worker by itself.
        keys = np.where(has_device[places], places, -1 - np.arange(len(places)))
        found, devices = np.unique(keys, return_inverse=True)
        return cls(devices) if len(found) < len(keys) else None

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each worker the sum over its device `[num_workers]`."""
        return np.asarray(np.bincount(self._devices, values), np.float64)[self._devices]
