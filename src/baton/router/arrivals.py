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
request lasts, what is compared begins anew. Nor are changes that chance does not explain, with
those beside them, while requests of both loads are under way. What was seen before still counts.

Pure: times are given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WINDOW_SHARE: Final = 0.5
"""A window's length, of the mean duration of a request."""
MOST_WINDOWS: Final = 40
LEAST_TURNS: Final = 3
"""How often as many as are under way must have ended before closed loops are recognized."""
MOST_RATIO: Final = 0.1
"""Squared changes over arrivals and ends, of closed loops."""
ANOTHER_LOAD: Final = 4.0
"""From this ratio on one change is not chance: clients begin or leave together. Of independent
arrivals it is seen in one window of two hundred."""
LEAST_UNDER_WAY: Final = 3.0
"""On the average. The fewer they are, the less do independent arrivals change their number."""
LEAST_PROMPTS: Final = 12
"""Whose mean length is taken, at least."""
LASTED_SHARE: Final = 0.05
"""What the newest duration counts in the mean."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The most requests under way at once, and arrivals and ends. `is_first`: of a load.

    `num_tokens`: of the prompts of those that began.
    """

    most_under_way: int
    num_begun: int
    num_events: int
    is_first: bool
    num_tokens: int


def _find_changes(windows: Iterable[_Window]) -> Iterator[tuple[int, float]]:
    """Of each load: changes from window to window, and arrivals and ends from one to the next.

    Changes one way that chance does not explain lead to another load. What changes just before and
    after them counts for neither: requests of both are under way.
    """
    runs: list[list[tuple[int, float]]] = []
    way: int | None = None
    for before, after in pairwise(windows):
        if after.is_first:
            way = None
            continue
        change = after.most_under_way - before.most_under_way
        before_way, way = way, (change > 0) - (change < 0)
        if way != before_way:
            runs.append([])
        runs[-1].append((change, (before.num_events + after.num_events) / 2))
    are_other = [_is_another_load(run) for run in runs]
    for at, run in enumerate(runs):
        if run[0][0] == 0 or not any(are_other[max(0, at - 1) : at + 2]):
            yield from run


def _is_another_load(run: Iterable[tuple[int, float]]) -> bool:
    change = sum(change for change, _ in run)
    return change * change > ANOTHER_LOAD * sum(between for _, between in run)


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
        "_num_tokens",
        "_num_under_way",
        "_since",
        "_windows",
    )

    def __init__(self) -> None:
        self._since = self._ended_at = self._lasted_s = 0.0
        self._is_first = True
        self._num_under_way = self._most_under_way = self._num_ended = self._num_events = 0
        self._num_begun_before = self._num_tokens = 0
        self._windows: deque[_Window] = deque(maxlen=MOST_WINDOWS)

    def begin(self, now: float, num_tokens: int) -> None:
        """A request is given to its workers, with a prompt of so many tokens."""
        if self._num_under_way == 0 and now - self._ended_at > self._lasted_s:
            self._begin_load(now)
        self._num_events += 1
        self._num_tokens += num_tokens
        self._num_under_way += 1
        if self._num_under_way > self._most_under_way:  # noqa: PLR1730 - each request asks
            self._most_under_way = self._num_under_way

    def resume(self) -> None:
        """One that has ended goes on at other workers: it is no new request."""
        self._num_ended -= 1
        self._num_under_way += 1
        self._most_under_way = max(self._most_under_way, self._num_under_way)

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
        self._num_tokens = 0

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
                _Window(
                    self._most_under_way,
                    num_begun,
                    self._num_events,
                    self._is_first,
                    self._num_tokens,
                )
            )
            self._since, self._num_events, self._is_first = now, 0, False
            self._num_tokens = 0
            self._most_under_way = self._num_under_way

    @property
    def num_begun(self) -> int:
        """Requests that were ever given to workers, each once, however often it was."""
        return self._num_ended + self._num_under_way

    @property
    def most_under_way(self) -> int:
        """At once, lately: in a request's duration, or since the load began."""
        if self._is_first or not self._windows:
            return self._most_under_way
        return max(self._most_under_way, self._windows[-1].most_under_way)

    @property
    def num_prompt_tokens(self) -> float:
        """The mean length of the load's latest prompts, about `LEAST_PROMPTS`; 0 before any."""
        num_begun, num_tokens = self.num_begun - self._num_begun_before, self._num_tokens
        is_first = self._is_first
        for window in reversed(self._windows):
            if is_first or num_begun >= LEAST_PROMPTS:
                break
            num_begun += window.num_begun
            num_tokens += window.num_tokens
            is_first = window.is_first
        return max(1.0, num_tokens / num_begun) if num_begun else 0.0

    @property
    def are_closed_loops(self) -> bool:
        """Whether requests are shown to follow the ends of others, most of them at least."""
        windows = self._windows
        total = sum(each.most_under_way for each in windows)
        if not windows or total < LEAST_UNDER_WAY * len(windows):
            return False
        squares = num_events = 0.0
        for change, between in _find_changes(windows):
            squares += change * change
            num_events += between
        is_shown = num_events * len(windows) >= 2 * LEAST_TURNS * total
        return is_shown and squares <= MOST_RATIO * num_events
