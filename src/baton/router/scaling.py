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

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
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
"""Answers from which it is believed that too few are good."""
MORE: Final = 1.25
LESS: Final = 0.98
MOST_FACTOR: Final = 4.0
"""The correction of the rate: while too few are good, while enough are, and at most."""
NEARLY: Final = 0.99
"""Of the largest share, or rate: its last hundredth takes many workers of the role that is not
short."""
NUM_HALVINGS: Final = 30

log = logging.getLogger(__name__)


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

    @property
    def generating(self) -> RoleBounds:
        """Of the role that generates answers."""
        return self.both if self.both.most else self.decode

    def with_generating(self, size: Size, num: int) -> Size:
        """With `num` workers of that role."""
        return Size(both=num) if self.both.most else Size(size.prefill, num)

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

    If none within bounds and price does: the cheapest whose share is as large as any; where no
    answer is good at this rate, the cheapest for the highest rate that one of them serves, with
    enough of each role for what flows, or, where the price forbids both, for that alone.
    Limits that no answer keeps, even alone, are as if fewer answers were wanted within them.
    """
    size, _ = _find_need(demand, rate, options)
    return size, _share(demand, rate, size, options)


def _find_need(demand: Demand, rate: float, options: ScalingOptions) -> tuple[Size, float]:
    """The size, and the rate that it is for."""
    unloaded = _share(demand, 0.0, options.with_generating(Size(1), 1), options)
    if unloaded < options.good_share:  # of any size: then most of what is possible is enough
        options = replace(options, good_share=options.good_share * unloaded)
    if (size := _find_cheapest(demand, rate, options)) is not None:
        return size, rate
    best = max((_share(demand, rate, each, options) for each in _list_largest(options)), default=0)
    if best:  # some answers are good: as many as can be
        fewer = replace(options, good_share=NEARLY * best)
        if (size := _find_cheapest(demand, rate, fewer)) is not None:
            return size, rate
    served = NEARLY * _find_highest_rate(demand, rate, options)
    size = _find_cheapest(demand, served, options) or options.clamp(Size())
    # Late answers take as much of the role that is not short.
    late = replace(options, limits=Limits(inf, inf), good_share=NEARLY)
    flows = NEARLY * _find_highest_rate(demand, rate, late)
    if (flowing := _find_cheapest(demand, flows, late)) is None:
        return size, served
    most = Size(*map(max, size, flowing))
    # Else a backlog would grow for as long as it starves the other role.
    return (most, served) if options.price(most) <= options.most_price else (flowing, flows)


def _find_cheapest(demand: Demand, rate: float, options: ScalingOptions) -> Size | None:
    """Of each of the largest sizes the fewest that suffice; of these the cheapest."""
    found = []
    for largest in _list_largest(options):
        nums = range(max(1, options.generating.least), largest.decode + largest.both + 1)

        def suffices(num: int, largest: Size = largest) -> bool:
            size = options.with_generating(largest, num)
            return _share(demand, rate, size, options) >= options.good_share

        at = bisect_left(nums, True, key=suffices)  # noqa: FBT003 - from those that do not
        if at < len(nums):
            found.append(options.with_generating(largest, nums[at]))
    return min(found, key=options.price, default=None)


def _find_highest_rate(demand: Demand, most: float, options: ScalingOptions) -> float:
    """That one of the sizes serves, up to `most`."""
    sizes = _list_largest(options)[::-1]
    low, high = 0.0, most
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if any(_share(demand, middle, size, options) >= options.good_share for size in sizes):
            low = middle
        else:
            high = middle
    return low


def _list_largest(options: ScalingOptions) -> list[Size]:
    """What bounds and price allow at most: of two pools, for each number of prefill workers."""
    prefill, bounds = options.prefill, options.generating
    each_prefill = [0] if options.both.most else range(max(1, prefill.least), prefill.most + 1)
    num, sizes = bounds.most, []
    for num_prefill in each_prefill:
        while num >= max(1, bounds.least):
            size = options.with_generating(Size(num_prefill), num)
            if options.price(size) <= options.most_price:
                sizes.append(size)
                break
            num -= 1
    return sizes


def _share(demand: Demand, rate: float, size: Size, options: ScalingOptions) -> float:
    if size.both:
        return max(
            predict_share(demand, options.limits, size.both, num_prefill, rate=rate)
            for num_prefill in range(size.both)
        )
    if not size.decode:
        return 0.0
    num_workers = size.prefill + size.decode
    return predict_share(demand, options.limits, num_workers, size.prefill, rate=rate)


@dataclass(slots=True)
class _Counter:
    """An incarnation's count of requests, as it was seen at a gateway's URL: `(at, num)`."""

    url: str
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
        """By epoch: several gateways may answer at one URL in turn."""
        self._epochs: dict[str, str] = {}
        self._shared_urls: set[str] = set()
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
        decision = self._follow_demand(reports, present, starting, now)
        size = present if decision is None else decision.size
        if (within := self._options.clamp(size)) == size:
            return decision
        reason = f"{size} is not within the configured bounds"
        return Resize(within, reason if decision is None else f"{decision.reason}; {reason}")

    def _follow_demand(
        self, reports: Mapping[str, DemandReport], present: Size, starting: Size, now: float
    ) -> Resize | None:
        """As `decide`, but for workers that are there already and are not within the bounds."""
        options = self._options
        found = self._merge(reports, now)
        if self._shape is None or not found:
            return None
        rate = self._find_rate(now) + sum(each.num_waiting for each in found) / DRAIN_S
        demand = _to_demand(self._shape)
        self._correct(found, demand, rate, present, is_starting=any(starting))
        wanted_rate = rate * options.headroom * self._factor
        need, served = _find_need(demand, wanted_rate, options)
        self._remember(need, now)
        self._size = Size(*map(max, self._size, present))
        wanted = self._hold(Size(*map(max, need, present)), starting, now)
        if options.price(wanted) > options.most_price:
            is_better = _share(demand, served, need, options) > _share(
                demand, served, present, options
            )
            wanted = self._trade(present, wanted, now) if is_better else present
        for role, (num, had) in enumerate(zip(wanted, self._size, strict=True)):
            if num > had:
                self._grew_at[role] = now
        reason = self._explain(rate, _share(demand, wanted_rate, need, options))
        return self._resize(present, wanted, need, reason=reason, now=now)

    def _remember(self, need: Size, now: float) -> None:
        """For `shrink_after_s`."""
        if not self._needs or self._needs[-1][0] < now - self._options.longest_gap_s:
            self._needs.clear()  # else one look after a gap would stand for all of it
            self._known_since = now
        self._needs.append((now, need))
        while self._needs[0][0] < now - self._options.shrink_after_s:
            self._needs.popleft()

    def _explain(self, rate: float, share: float) -> str:
        reason = f"{rate:.2f} requests/s"
        if self._factor > 1.0:
            reason += f" (counted {self._factor:.2f} times: too few answers were good)"
        if share < self._options.good_share:
            reason += f", of which {share:.0%} can be good within the bounds"
        return reason

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

    def _trade(self, present: Size, wanted: Size, now: float) -> Size:
        """For one role, another one gives up workers that it has not needed for a short while."""
        wanted = self._at_most_needed(wanted, min(SLOW_S, self._options.shrink_after_s), now)
        return present if self._options.price(wanted) > self._options.most_price else wanted

    def _at_most_needed(self, size: Size, for_s: float, now: float) -> Size:
        """No more of a role than was needed at most for so long, if that is known."""
        if now - self._known_since < for_s:
            return size
        needs = (need for at, need in self._needs if at >= now - for_s)
        return Size(*map(min, size, map(max, *needs, Size())))

    def _resize(
        self, present: Size, wanted: Size, need: Size, *, reason: str, now: float
    ) -> Resize | None:
        """To what is wanted, but to no more than was needed at most for a while."""
        after_s, why = self._options.shrink_after_s, []
        size = self._at_most_needed(wanted, after_s, now)
        if size == present:
            return None
        if wanted != present:
            why.append(f"need {need}")
        if size != wanted:
            why.append(f"needed {size} at most for {after_s:.0f} s")
        self._size = Size(*map(min, self._size, size))  # what a role loses is not missing later
        return Resize(size, f"{reason} {' and '.join(why)}")

    def _merge(self, reports: Mapping[str, DemandReport], now: float) -> list[ModelDemand]:
        """This model's part of the reports, and what its requests are like."""
        found: list[ModelDemand] = []
        shapes: list[tuple[int, RequestShape]] = []
        for gateway, report in reports.items():
            own = next((each for each in report.models if each.model == self.model), None)
            if own is None:
                continue
            found.append(own)
            counter = self._counters.setdefault(report.epoch, _Counter(gateway))
            if counter.url == gateway and counter.seen:
                self._note_return(gateway, report.epoch)
            self._epochs[gateway] = report.epoch
            counter.add(own.num_begun, now)
            if own.shape is not None:
                shapes.append((counter.count_since(now - SLOW_S)[0], own.shape))
        self._counters = {
            epoch: each for epoch, each in self._counters.items() if not _is_old(each, now)
        }
        self._epochs = {
            url: epoch for url, epoch in self._epochs.items() if epoch in self._counters
        }
        if shapes:  # the gateway that was asked most knows best
            self._shape = max(shapes, key=lambda each: each[0])[1]
        return found

    def _note_return(self, url: str, epoch: str) -> None:
        """An incarnation answers that had answered at this URL: it had not ended meanwhile."""
        if self._epochs.get(url, epoch) != epoch and url not in self._shared_urls:
            self._shared_urls.add(url)
            log.warning(
                "%s: several gateways answer here in turn; late answers and waiting requests are "
                "only those of one of them: name each one's URL in scaling.gateways, or dns:URL",
                url,
            )

    def _find_rate(self, now: float) -> float:
        """Requests a second, of all gateways: the higher one of two windows'."""
        rates, epochs = [], set(self._epochs.values())
        counters = [
            each
            for epoch, each in self._counters.items()
            if epoch in epochs or each.url in self._shared_urls  # else it has restarted since
        ]
        for window_s in (FAST_S, SLOW_S):
            counted = [each.count_since(now - window_s) for each in counters]
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
        if is_starting:
            return
        num_good = sum(
            each.ttft_s <= limits.ttft_s and each.tpot_s <= limits.tpot_s for each in ended
        )
        if num_good >= wanted * len(ended):
            self._factor = max(1.0, self._factor * LESS)  # also where there are few, or none
        elif (
            len(ended) >= LEAST_ENDED
            and _share(demand, rate * self._factor, present, self._options) >= wanted
        ):
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
