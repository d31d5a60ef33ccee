"""Requests of one class for one model: which is next, and what is before each. Pure.

Tenants take turns, each tenant's requests in the order in which they came. Turns are a deficit
round robin with rounds as small as can be: a request costs its tokens over its weight, and each
tenant's next request is due when that much was taken of every other tenant with requests here. Two
tenants that both wait get shares of their weights, give or take one request of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Priority: TypeAlias = Literal["low", "normal", "high"]
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
"""The classes, in the order in which they are served."""


def lower(one: Priority, other: Priority) -> Priority:
    """The one of two classes that is served later."""
    return max(one, other, key=PRIORITIES.index)


class RefusalCause(StrEnum):
    """Why a request does not wait, or not any longer."""

    QUEUE_FULL = "queue_full"
    TENANT_FULL = "tenant_full"
    DISPLACED = "displaced"
    TARGET = "target"
    DEADLINE = "deadline"


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One that waits. `num_tokens` is its cost, of which a tenant of twice the `weight` gets twice.

    It is to begin before `target_at` (its target for the first token) and `deadline_at`.
    """

    model: str
    tenant: str
    priority: Priority
    num_tokens: int
    at: float
    weight: float = 1.0
    target_at: float = inf
    deadline_at: float = inf

    @property
    def charge(self) -> float:
        """What its tenant is charged."""
        return max(1, self.num_tokens) / self.weight

    @property
    def latest_at(self) -> float:
        """When it must begin."""
        return min(self.target_at, self.deadline_at)

    @property
    def late_cause(self) -> RefusalCause:
        """What it would miss first."""
        is_target = self.target_at <= self.deadline_at
        return RefusalCause.TARGET if is_target else RefusalCause.DEADLINE


@dataclass(slots=True)
class Turns:
    """One tenant's requests of one class. `base`: where its first one's turn is counted from."""

    tenant: str
    base: float
    serial: int = 0
    num_tokens: int = 0
    charge: float = 0.0
    waiting: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)

    @property
    def first(self) -> QueuedRequest:
        """The oldest."""
        return next(iter(self.waiting))

    @property
    def due(self) -> float:
        """When its turn is."""
        return self.base + self.first.charge


class _Ahead:
    """What is taken of some tenants before a turn: of each in proportion, until it has no more."""

    def __init__(self, turns: Iterable[Turns], now: float) -> None:
        spans = sorted((max(t.base - now + t.charge, 1e-9), t.num_tokens) for t in turns)
        self._now = now
        self._spans = [span for span, _ in spans]
        self._done = [0, *accumulate(tokens for _, tokens in spans)]
        rates = [tokens / span for span, tokens in spans]
        self._rates = [*reversed([0.0, *accumulate(reversed(rates))])]

    def of(self, due: float) -> float:
        """Tokens."""
        span = max(0.0, due - self._now)
        num_done = bisect_right(self._spans, span)
        return self._done[num_done] + span * self._rates[num_done]


class FairQueue:
    """The requests of one class of one model."""

    def __init__(self) -> None:
        self.turns: dict[str, Turns] = {}
        self.by_age: OrderedDict[QueuedRequest, None] = OrderedDict()
        self.num_tokens = 0
        self._now = 0.0
        self._heap: list[tuple[float, int, Turns]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self.by_age)

    @property
    def oldest(self) -> QueuedRequest:
        """Of all tenants."""
        return next(iter(self.by_age))

    def add(self, request: QueuedRequest) -> None:
        """It is its tenant's last."""
        turns = self.turns.get(request.tenant)
        if turns is None:
            turns = self.turns[request.tenant] = Turns(request.tenant, self._now)
        turns.waiting[request] = None
        turns.num_tokens += request.num_tokens
        turns.charge += request.charge
        self.by_age[request] = None
        self.num_tokens += request.num_tokens
        if len(turns.waiting) == 1:
            self._push(turns)

    def take(self) -> QueuedRequest:
        """The one whose turn it is; there is at least one."""
        while True:
            due, serial, turns = heappop(self._heap)
            if serial == turns.serial and turns.waiting:
                break
        request = turns.first
        self._now = max(self._now, due)
        turns.base = due
        self._remove(request, turns)
        return request

    def remove(self, request: QueuedRequest) -> None:
        """It does not wait any longer."""
        self._remove(request, self.turns[request.tenant])

    def count_ahead(self, request: QueuedRequest) -> float:
        """Tokens that will be taken before a request that comes now."""
        own = self.turns.get(request.tenant)
        due = (self._now if own is None else own.base + own.charge) + request.charge
        others = _Ahead((t for t in self.turns.values() if t is not own), self._now)
        return others.of(due) + (0 if own is None else own.num_tokens)

    def count_each_ahead(self) -> Iterator[tuple[QueuedRequest, float]]:
        """Tokens that will be taken before each that must begin by some time."""
        all_turns = _Ahead(self.turns.values(), self._now)
        for turns in self.turns.values():
            due, num_before = turns.base, 0
            own = _Ahead((turns,), self._now)
            for request in turns.waiting:
                due += request.charge
                if request.latest_at < inf:
                    yield request, num_before + max(0.0, all_turns.of(due) - own.of(due))
                num_before += request.num_tokens

    def _remove(self, request: QueuedRequest, turns: Turns) -> None:
        was_first = turns.first is request
        del turns.waiting[request], self.by_age[request]
        turns.num_tokens -= request.num_tokens
        turns.charge -= request.charge
        self.num_tokens -= request.num_tokens
        if not turns.waiting:
            turns.serial = -1
            del self.turns[request.tenant]
        elif was_first:
            turns.base = max(turns.base, self._now)  # what it waited for is gone: no credit is kept
            self._push(turns)
        if not self.turns:
            self._now, self._heap = 0.0, []

    def _push(self, turns: Turns) -> None:
        self._serial += 1
        turns.serial = self._serial
        heappush(self._heap, (turns.due, self._serial, turns))
        if len(self._heap) > 2 * len(self.turns) + 64:  # of requests that left
            self._heap = [each for each in self._heap if each[1] == each[2].serial]
            heapify(self._heap)

    def check_invariants(self) -> None:
        """What is counted is what is there."""
        waiting = [request for turns in self.turns.values() for request in turns.waiting]
        assert set(waiting) == set(self.by_age)  # noqa: S101 (a checker asserts)
        assert len(waiting) == len(self.by_age)  # noqa: S101
        assert self.num_tokens == sum(r.num_tokens for r in waiting)  # noqa: S101
        valid = {id(turns) for _, serial, turns in self._heap if serial == turns.serial}
        for tenant, turns in self.turns.items():
            assert turns.waiting  # noqa: S101
            assert id(turns) in valid  # noqa: S101
            assert all(request.tenant == tenant for request in turns.waiting)  # noqa: S101
            assert turns.num_tokens == sum(r.num_tokens for r in turns.waiting)  # noqa: S101
            charge = sum(r.charge for r in turns.waiting)
            assert abs(turns.charge - charge) <= 1e-6 * (1 + charge)  # noqa: S101
