"""How many workers of each role the traffic of a model needs.

    reports of all gateways ─► rate, shape, share of good answers
                                   │
        the cheapest size that is predicted to serve it within the limits (`find_size`)
                                   │ more than there are: at once, but not while others of the role
                                   │ still start, unless they only replace some that are gone
                                   │ fewer, for all of `shrink_after_s`: the most of that time
                                   ▼
                               `Resize`, with its reason

Predictions are the router's own (`demand.predict_share`). Where fewer answers are good than was
predicted, a factor on the rate grows until they are: cores that are shared, for example, are not
known to any model. Workers of both roles divide their labour by themselves (`division.py`), so a
fleet of these changes roles before it grows: the best division counts.

Pure: times are given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.router.demand import Demand, Limits, predict_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.protocol.demand import DemandReport, ModelDemand, RequestShape

FAST_S: Final = 15.0
SLOW_S: Final = 60.0
"""Rates are the higher one of these two windows': a burst counts at once, and for some time."""
DRAIN_S: Final = 30.0
"""What waits is to be gone after so long."""
LEAST_ENDED: Final = 20
"""Answers from which the share of good ones is believed."""
MORE: Final = 1.25
LESS: Final = 0.98
MOST_FACTOR: Final = 4.0
"""The correction of the rate: while too few are good, while enough are, and at most."""


class Size(NamedTuple):
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    def __str__(self) -> str:
        named = zip(("prefill", "decode", "both"), self, strict=True)
        return ", ".join(f"{num} {role}" for role, num in named if num) or "none"


@dataclass(frozen=True, slots=True)
class RoleBounds:
    """Workers of one role, at least and at most, and the price of one per hour, in any unit."""

    least: int
    most: int
    price: float = 1.0


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is wanted. Either `both.most` is 0, or the two other roles' are.

    `good_share` of answers within `limits`, for `headroom` times the rate, at `most_price` an hour.
    `interval_s`: between two looks.
    """

    limits: Limits
    prefill: RoleBounds
    decode: RoleBounds
    both: RoleBounds
    good_share: float = 0.95
    headroom: float = 1.2
    most_price: float = inf
    grow_every_s: float = 30.0
    shrink_after_s: float = 300.0
    interval_s: float = 5.0

    @property
    def longest_gap_s(self) -> float:
        """With more time than this between two looks it is not known what was needed meanwhile."""
        return max(min(SLOW_S, self.shrink_after_s), 2 * self.interval_s)

    def price(self, size: Size) -> float:
        """Per hour."""
        bounds = (self.prefill, self.decode, self.both)
        return sum(num * each.price for num, each in zip(size, bounds, strict=True))

    def clamp(self, size: Size) -> Size:
        """Within the bounds."""
        bounds = (self.prefill, self.decode, self.both)
        return Size(
            *(min(each.most, max(each.least, n)) for n, each in zip(size, bounds, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Resize:
    """What the fleet should have, and why."""

    size: Size
    reason: str


def find_size(demand: Demand, rate: float, options: ScalingOptions) -> tuple[Size, float]:
    """The cheapest size that serves `rate` requests a second, and the share that is then good.

    If none within bounds and price does, the affordable one with the largest share.
    """
    replicas = options.both.most
    sizes = _replicas(demand, rate, options) if replicas else _pairs(demand, rate, options)
    affordable = [each for each in sizes if options.price(each) <= options.most_price]
    best, most = options.clamp(Size()), -1.0
    for size in sorted(affordable, key=options.price):
        share = _share(demand, rate, size, options)
        if share >= options.good_share:
            return size, share
        if share > most:
            best, most = size, share
    return best, max(0.0, most)


def _replicas(demand: Demand, rate: float, options: ScalingOptions) -> list[Size]:
    """The least number of workers that suffices, else the most."""
    bounds, most = options.both, options.both.most
    if options.most_price < inf and bounds.price > 0:
        most = min(most, int(options.most_price / bounds.price))
    sizes = [Size(both=num) for num in range(max(1, bounds.least), most + 1)]
    at = bisect_left(
        sizes,
        options.good_share,
        key=lambda size: min(options.good_share, _share(demand, rate, size, options)),
    )
    return sizes[at : at + 1] or sizes[-1:]


def _pairs(demand: Demand, rate: float, options: ScalingOptions) -> list[Size]:
    """For each number of prefill workers the least of decode workers that suffice, else the most.

    With more of the one, no more of the other are needed: one walk along the edge finds all.
    """
    prefill, decode, sizes = options.prefill, options.decode, []
    num_decode = decode.most
    for num_prefill in range(max(1, prefill.least), prefill.most + 1):
        affordable = num_decode
        if options.most_price < inf and decode.price > 0:
            left = options.most_price - num_prefill * prefill.price
            affordable = min(num_decode, int(left / decode.price))
        size = Size(num_prefill, max(affordable, decode.least, 1))
        while size.decode > max(1, decode.least):
            fewer = Size(num_prefill, size.decode - 1)
            if _share(demand, rate, fewer, options) < options.good_share:
                break
            size = fewer
        sizes.append(size)
        if _share(demand, rate, size, options) >= options.good_share:
            num_decode = size.decode
    return sizes


def _share(demand: Demand, rate: float, size: Size, options: ScalingOptions) -> float:
    if size.both:
        return max(
            predict_share(demand, options.limits, size.both, num_prefill, rate=rate)
            for num_prefill in range(size.both)
        )
    num_workers = size.prefill + size.decode
    return predict_share(demand, options.limits, num_workers, size.prefill, rate=rate)


@dataclass(slots=True)
class _Counter:
    """One gateway's count of requests, as it was seen: `(at, num)`, of one incarnation."""

    epoch: str
    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, num: int, now: float) -> None:
        self.seen.append((now, num))
        while len(self.seen) > 2 and self.seen[1][0] <= now - SLOW_S:  # noqa: PLR2004 - a pair
            self.seen.popleft()

    def count_since(self, at: float) -> tuple[int, float]:
        """Requests since about then, and in how many seconds."""
        first = self.seen[0]
        for each in self.seen:
            if each[0] > at:
                break
            first = each
        last = self.seen[-1]
        return last[1] - first[1], last[0] - first[0]


class Scaler:
    """One model's, of all gateways. Owner: one thread."""

    def __init__(self, model: str, options: ScalingOptions) -> None:
        self.model, self._options = model, options
        self._counters: dict[str, _Counter] = {}
        self._shape: RequestShape | None = None
        self._needs: deque[tuple[float, Size]] = deque()
        self._known_since = -inf
        self._grew_at = [-inf] * len(Size._fields)
        self._size = Size()
        self._factor = 1.0

    def decide(
        self, reports: Mapping[str, DemandReport], present: Size, starting: Size, now: float
    ) -> Resize | None:
        """What to change, None for nothing.

        `reports` by gateway, of those that answered; `present` has those that start, too, which
        `starting` counts, and not those that drain. What was there before and is not any more, as
        preempted workers, is replaced at once, as far as it is needed. A role of which workers
        start, or that grew less than `grow_every_s` ago, does not grow; others may.
        """
        options = self._options
        if (within := options.clamp(present)) != present:
            return Resize(within, f"{present} is not within the configured bounds")
        found = self._merge(reports, now)
        if self._shape is None or not found:
            return None
        rate = self._find_rate(now) + sum(each.num_waiting for each in found) / DRAIN_S
        demand = _to_demand(self._shape)
        self._correct(found, demand, rate, present, is_starting=any(starting))
        wanted_rate = rate * options.headroom * self._factor
        need, share = find_size(demand, wanted_rate, options)
        if not self._needs or self._needs[-1][0] < now - options.longest_gap_s:
            self._needs.clear()  # else one look after a gap would stand for all of it
            self._known_since = now
        self._needs.append((now, need))
        while self._needs[0][0] < now - options.shrink_after_s:
            self._needs.popleft()
        reason = f"{rate:.2f} requests/s"
        if self._factor > 1.0:
            reason += f" (counted {self._factor:.2f} times: too few answers were good)"
        if share < options.good_share:
            reason += f", of which {share:.0%} can be good within the bounds"
        self._size = Size(*map(max, self._size, present))
        more = self._hold(Size(*map(max, need, present)), starting, now)
        wanted = self._keep_price(more, need)
        if present not in {more, wanted}:
            for role, (num, had) in enumerate(zip(wanted, self._size, strict=True)):
                if num > had:
                    self._grew_at[role] = now
            return self._resize(wanted, f"{reason} need {need}")
        return self._shrink(present, reason, now)

    def _resize(self, size: Size, reason: str) -> Resize:
        """What a role loses by this is not missing later."""
        self._size = Size(*map(min, self._size, size))
        return Resize(size, reason)

    def _hold(self, more: Size, starting: Size, now: float) -> Size:
        """Without the growth of roles whose last growth has not had its effect yet."""
        every_s = self._options.grow_every_s
        return Size(
            *(
                min(num, had) if num_starting or now - grew_at < every_s else num
                for num, had, num_starting, grew_at in zip(
                    more, self._size, starting, self._grew_at, strict=True
                )
            )
        )

    def _keep_price(self, more: Size, need: Size) -> Size:
        """A role that has too many is not kept at the cost of one that has too few."""
        if self._options.price(more) <= self._options.most_price:
            return more
        return Size(*map(min, need, more))

    def _shrink(self, present: Size, reason: str, now: float) -> Resize | None:
        after_s = self._options.shrink_after_s
        if now - max(self._known_since, *self._grew_at) < after_s:
            return None
        most = Size(*(max(sizes) for sizes in zip(*(size for _, size in self._needs), strict=True)))
        fewer = Size(*map(min, most, present))
        if fewer == present:
            return None
        return self._resize(fewer, f"{reason} needed {most} at most for {after_s:.0f} s")

    def _merge(self, reports: Mapping[str, DemandReport], now: float) -> list[ModelDemand]:
        """This model's part of the reports, and what its requests are like."""
        found: list[ModelDemand] = []
        shapes: list[tuple[int, RequestShape]] = []
        for gateway, report in reports.items():
            own = next((each for each in report.models if each.model == self.model), None)
            if own is None:
                continue
            found.append(own)
            counter = self._counters.get(gateway)
            if counter is None or counter.epoch != report.epoch:
                counter = self._counters[gateway] = _Counter(report.epoch)
            counter.add(own.num_begun, now)
            if own.shape is not None:
                shapes.append((counter.count_since(now - SLOW_S)[0], own.shape))
        for gateway in [name for name, each in self._counters.items() if _is_old(each, now)]:
            del self._counters[gateway]
        if shapes:  # the gateway that was asked most knows best
            self._shape = max(shapes, key=lambda each: each[0])[1]
        return found

    def _find_rate(self, now: float) -> float:
        """Requests a second, of all gateways: the higher one of two windows'."""
        rates = []
        for window_s in (FAST_S, SLOW_S):
            counted = [each.count_since(now - window_s) for each in self._counters.values()]
            rates.append(sum(num / seconds for num, seconds in counted if seconds > 0))
        return max(rates)

    def _correct(
        self,
        found: Sequence[ModelDemand],
        demand: Demand,
        rate: float,
        present: Size,
        *,
        is_starting: bool,
    ) -> None:
        """Learn how wrong the prediction is for the present size."""
        ended = [each for report in found for each in report.ended]
        limits, wanted = self._options.limits, self._options.good_share
        if len(ended) < LEAST_ENDED or is_starting:
            return
        num_good = sum(
            each.ttft_s <= limits.ttft_s and each.tpot_s <= limits.tpot_s for each in ended
        )
        if num_good >= wanted * len(ended):
            self._factor = max(1.0, self._factor * LESS)
        elif _share(demand, rate * self._factor, present, self._options) >= wanted:
            self._factor = min(MOST_FACTOR, self._factor * MORE)


def _is_old(counter: _Counter, now: float) -> bool:
    return counter.seen[-1][0] < now - SLOW_S


def _to_demand(shape: RequestShape) -> Demand:
    """As `predict_share` takes it; how many are under way is for it to find."""
    step_s = (shape.step_s, shape.step_answer_s)
    most = inf if shape.most_at_once is None else shape.most_at_once
    return Demand(
        num_at_once=1.0,
        prefill_s=shape.prefill_s,
        cold_prefill_s=shape.prefill_s,
        handoff_s=shape.handoff_s,
        cold_handoff_s=shape.handoff_s,
        num_answer_tokens=shape.num_answer_tokens,
        step_s=step_s,
        most_at_once=most,
    )
