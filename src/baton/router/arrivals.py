"""Whether requests arrive because others ended (closed loops), or independently of that.

Clients that wait for their answer before they ask again replace each request that ends: the number
of requests under way comes back to where it was. With independent arrivals it is a random walk,
which moves by about the square root of the arrivals and ends in a time. So the most that are under
way at once are taken of each window of half a request's duration, and their changes are compared
with the arrivals and ends:

    most under way at once    8 8 8 8 8 8 8      changes of 0: closed loops
                              8 5 9 12 10 7 4    changes of 3: independent arrivals

`sum of squared changes / sum of arrivals and ends` is about 0.5 for independent arrivals, also near
saturation, and more for bursts. It is 0 for clients that ask again at once, and less than 0.1 where
they pause for a tenth of a request's duration.

Loads that come and go are no changes of one load: after a time without any request, as long as a
request lasts, what is compared begins anew. What was seen before still counts.

Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

WINDOW_SHARE: Final = 0.5
"""A window's length, of the mean duration of a request."""
MOST_WINDOWS: Final = 40
LEAST_TURNS: Final = 3
"""How often as many as are under way must have ended before closed loops are recognized."""
MOST_RATIO: Final = 0.1
"""Squared changes over arrivals and ends, of closed loops."""
MOST_CHANGE: Final = 2.0
"""What one window counts at most, as that ratio: clients that begin or leave together."""
LEAST_UNDER_WAY: Final = 3.0
"""On the average. The fewer they are, the less do independent arrivals change their number."""
LASTED_SHARE: Final = 0.05
"""What the newest duration counts in the mean."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The most requests under way at once, and arrivals and ends. `is_first`: of a load."""

    most_under_way: int
    num_begun: int
    num_events: int
    is_first: bool


class Arrivals:
    """One model's, as its gateway sees them. Owner: the gateway's thread."""

    __slots__ = (
        "_ended_at",
        "_is_first",
        "_lasted_s",
        "_most_under_way",
        "_num_begun_before",
        "_num_ended",
        "_num_events",
        "_num_under_way",
        "_since",
        "_windows",
    )

    def __init__(self) -> None:
        self._since = self._ended_at = self._lasted_s = 0.0
        self._is_first = True
        self._num_under_way = self._most_under_way = self._num_ended = self._num_events = 0
        self._num_begun_before = 0
        self._windows: deque[_Window] = deque(maxlen=MOST_WINDOWS)

    def begin(self, now: float) -> None:
        """A request is given to its workers."""
        if self._num_under_way == 0 and now - self._ended_at > self._lasted_s:
            self._begin_load(now)
        self._num_events += 1
        self._num_under_way += 1
        if self._num_under_way > self._most_under_way:  # noqa: PLR1730 - each request asks
            self._most_under_way = self._num_under_way

    def _begin_load(self, now: float) -> None:
        """Nothing was under way for so long that this is another load: the last one ended.

        In its last windows none began, and in one before them some clients did not ask again.
        """
        windows = self._windows
        while windows and not windows[-1].num_begun:
            del windows[-1]
        if windows:
            del windows[-1]
        self._since, self._num_events, self._most_under_way = now, 0, 0
        self._num_begun_before, self._is_first = self._num_ended, True

    def end(self, now: float, lasted_s: float) -> None:
        """One is over."""
        self._ended_at = now
        self._num_events += 1
        self._num_under_way -= 1
        self._num_ended += 1
        share = LASTED_SHARE if self._num_ended * LASTED_SHARE > 1.0 else 1.0 / self._num_ended
        self._lasted_s += share * (lasted_s - self._lasted_s)
        if now - self._since > WINDOW_SHARE * self._lasted_s:
            begun = self._num_ended + self._num_under_way  # no call: it is each request's
            num_begun, self._num_begun_before = begun - self._num_begun_before, begun
            self._windows.append(
                _Window(self._most_under_way, num_begun, self._num_events, self._is_first)
            )
            self._since, self._num_events, self._is_first = now, 0, False
            self._most_under_way = self._num_under_way

    @property
    def num_begun(self) -> int:
        """Requests that were ever given to workers."""
        return self._num_ended + self._num_under_way

    @property
    def most_under_way(self) -> int:
        """At once, lately: in a request's duration, or since the load began."""
        if self._is_first or not self._windows:
            return self._most_under_way
        return max(self._most_under_way, self._windows[-1].most_under_way)

    @property
    def are_closed_loops(self) -> bool:
        """Whether requests are shown to follow the ends of others, most of them at least."""
        windows = self._windows
        total = sum(each.most_under_way for each in windows)
        if not windows or total < LEAST_UNDER_WAY * len(windows):
            return False
        squares = num_events = 0.0
        for before, after in pairwise(windows):
            if after.is_first:
                continue
            between = (before.num_events + after.num_events) / 2
            change = after.most_under_way - before.most_under_way
            squares += min(change * change, MOST_CHANGE * between)
            num_events += between
        is_shown = num_events * len(windows) >= 2 * LEAST_TURNS * total
        return is_shown and squares <= MOST_RATIO * num_events
