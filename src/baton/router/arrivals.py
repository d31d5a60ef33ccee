"""Whether requests arrive because others ended (closed loops), or independently of that.

Clients that wait for their answer before they ask again replace each request that ends: the number
of requests under way stays where it is. With independent arrivals it is a random walk, which moves
by about the square root of the arrivals and ends in a time. So the mean number under way is taken
over windows of half a request's duration, and its changes are compared with the arrivals and ends:

    mean number under way    8 8 8 8 8 8 8      changes of 0: closed loops
                             8 5 9 12 10 7 4    changes of 3: independent arrivals

`sum of squared changes / sum of arrivals and ends` is 0.3 to 0.7 for independent arrivals (0.25 to
0.35 near saturation, where ends come at equal intervals), more for bursts, and about the square of
`4 * pause / duration`, at most, where clients pause before they ask again.

Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Final

WINDOW_SHARE: Final = 0.5
"""A window's length, of the mean duration of a request."""
MOST_WINDOWS: Final = 32
LEAST_WINDOWS: Final = 16
"""Windows before closed loops are recognized: eight durations of a request."""
MOST_RATIO: Final = 0.1
"""Squared changes over arrivals and ends, of closed loops."""
MOST_CHANGE: Final = 2.0
"""What one window counts at most, as that ratio: clients that begin or leave together."""
LEAST_UNDER_WAY: Final = 1.5
"""On the average. Fewer show nothing: of arrivals that are far apart one request is under way."""
GROWING: Final = 1.5
"""Standard deviations of a random walk."""
LASTED_SHARE: Final = 0.05
"""What the newest duration counts in the mean."""


@dataclass(frozen=True, slots=True)
class _Window:
    """`num_under_way` is the mean over it, while there were any; arrivals and ends in it."""

    ended_at: float
    num_under_way: float
    num_events: int


class Arrivals:
    """One model's, as its gateway sees them. Owner: the gateway's thread."""

    __slots__ = (
        "_at",
        "_busy_s",
        "_lasted_s",
        "_num_ended",
        "_num_events",
        "_num_under_way",
        "_request_s",
        "_windows",
    )

    def __init__(self) -> None:
        self._at = self._busy_s = self._request_s = self._lasted_s = 0.0
        self._num_under_way = self._num_ended = self._num_events = 0
        self._windows: deque[_Window] = deque(maxlen=MOST_WINDOWS)

    def begin(self, now: float) -> None:
        """A request is given to its workers."""
        self._count(+1, now)

    def end(self, now: float, lasted_s: float) -> None:
        """One is over."""
        self._count(-1, now)
        self._num_ended += 1
        share = LASTED_SHARE if self._num_ended * LASTED_SHARE > 1.0 else 1.0 / self._num_ended
        self._lasted_s += share * (lasted_s - self._lasted_s)
        if self._busy_s > WINDOW_SHARE * self._lasted_s:
            mean = self._request_s / self._busy_s
            self._windows.append(_Window(self._at, mean, self._num_events))
            self._busy_s = self._request_s = 0.0
            self._num_events = 0

    def _count(self, change: int, now: float) -> None:
        elapsed_s = now - self._at
        if elapsed_s > 0.0:
            self._at = now
            if self._num_under_way:  # a pause of all clients is no change
                self._busy_s += elapsed_s
                self._request_s += self._num_under_way * elapsed_s
        self._num_under_way += change
        self._num_events += 1

    @property
    def are_closed_loops(self) -> bool:
        """Whether requests are shown to follow the ends of others, most of them at least."""
        windows = self._windows
        if len(windows) < LEAST_WINDOWS:
            return False
        mean = sum(each.num_under_way for each in windows) / len(windows)
        if mean < LEAST_UNDER_WAY:
            return False
        squares = num_events = 0.0
        for before, after in pairwise(windows):
            between = (before.num_events + after.num_events) / 2
            change = after.num_under_way - before.num_under_way
            squares += min(change * change, MOST_CHANGE * between)
            num_events += between
        return squares <= MOST_RATIO * num_events

    def grew_since(self, at: float) -> bool:
        """Whether more are under way than then, by more than chance explains."""
        windows = [each for each in self._windows if each.ended_at >= at]
        if len(windows) < 2:  # noqa: PLR2004 - a change
            return False
        num_events = sum(each.num_events for each in windows[1:])
        grown_by = windows[-1].num_under_way - windows[0].num_under_way
        return grown_by > GROWING * sqrt(num_events)
