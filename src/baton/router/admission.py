"""Requests that wait in the gateway until the workers can use them. Pure: times are given.

    offer ──► waits ──► taken            when there is room: see `FleetRoom`
      │         ├──► left                its client is gone
      │         ├──► expired             it would begin after its latest time
      │         └──► displaced           the queue is full, and others have a better claim
      └──► refused                       no room in the queue, or it would begin too late

Of each model, the next is: of the highest class (of every `AGED_ONE_IN` that are taken, one may be
of a lower class that has waited `AGING_S`); of that class, the one of the tenant whose turn it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.router.drain_rate import DrainRate
from baton.router.fair_queue import PRIORITIES, FairQueue, Priority, QueuedRequest, RefusalCause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.router.fair_queue import Turns

AGING_S: Final = 10.0
AGED_ONE_IN: Final = 8
TOLERANCE: Final = 1.5
"""By so much the rest of its wait must exceed what is left before a request that waits is given up:
predictions vary, and it has waited already."""
RETRY_AFTER_S: Final = 2.0
"""Where the rate is not known."""
LEAST_RETRY_AFTER_S: Final = 1.0
MOST_RETRY_AFTER_S: Final = 60.0
MOST_DISPLACED: Final = 8
"""Small requests that one large one may displace."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, of all models together; None: any number of a tenant's."""

    max_requests: int = 1024
    max_tokens: int = 1 << 22
    max_requests_per_tenant: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """`is_tenants`: its tenant has more here than its share; else the fleet has too little.

    `wait_s` was predicted; None: it is not known.
    """

    cause: RefusalCause
    retry_after_s: float
    is_tenants: bool
    wait_s: float | None = None


Displaced: TypeAlias = tuple[tuple[QueuedRequest, Refusal], ...]


class _Backlog:
    """One model's."""

    def __init__(self) -> None:
        self.classes: dict[Priority, FairQueue] = {priority: FairQueue() for priority in PRIORITIES}
        self.rate = DrainRate()
        self._num_since_aged = 0

    def __len__(self) -> int:
        return sum(map(len, self.classes.values()))

    def next_class(self, now: float) -> Priority:
        """Of which the next one is taken; there is at least one."""
        first, *others = (p for p in PRIORITIES if self.classes[p])
        aged = [p for p in others if now - self.classes[p].oldest.at >= AGING_S]
        self._num_since_aged += 1
        if aged and self._num_since_aged >= AGED_ONE_IN:
            self._num_since_aged = 0
            return min(aged, key=lambda p: self.classes[p].oldest.at)
        return first

    def count_higher(self, priority: Priority) -> int:
        """Tokens of the classes that are served before."""
        higher = PRIORITIES[: PRIORITIES.index(priority)]
        return sum(self.classes[each].num_tokens for each in higher)


@dataclass(slots=True)
class _Usage:
    """What a tenant has here, of all models and classes."""

    num: int = 0
    charge: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitingTenant:
    """A tenant's requests of one model and class, for pages that show the queue."""

    model: str
    priority: Priority
    tenant: str
    num_requests: int
    num_tokens: int
    oldest_s: float


class AdmissionQueue:
    """See the module. Owner: one thread."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.num_requests = self.num_tokens = 0
        self._backlogs: dict[str, _Backlog] = {}
        self._usage: dict[str, _Usage] = {}

    def is_waiting(self, model: str) -> bool:
        """Whether a request for this model waits."""
        backlog = self._backlogs.get(model)
        return backlog is not None and len(backlog) > 0

    def models(self) -> list[str]:
        """Those for which requests wait."""
        return [model for model, backlog in self._backlogs.items() if len(backlog)]

    def count(self, priority: Priority) -> tuple[int, int]:
        """Requests and tokens of one class, of all models."""
        classes = [backlog.classes[priority] for backlog in self._backlogs.values()]
        return sum(map(len, classes)), sum(each.num_tokens for each in classes)

    def rate(self, model: str, now: float) -> float | None:
        """Tokens of this model that are taken in a second while others wait; None: not known."""
        backlog = self._backlogs.get(model)
        return None if backlog is None else backlog.rate.find(now)

    def predict_wait_s(self, request: QueuedRequest, now: float) -> float | None:
        """How long a request that comes now would wait; None: not known."""
        backlog = self._backlogs.get(request.model)
        rate = None if backlog is None else backlog.rate.find(now)
        if backlog is None or rate is None:
            return None
        priority = request.priority
        ahead = backlog.count_higher(priority) + backlog.classes[priority].count_ahead(request)
        return ahead / rate

    def offer(self, request: QueuedRequest, now: float) -> Refusal | Displaced:
        """Have a request wait: what that displaces; or why it may not, and nothing has changed."""
        wait_s = self.predict_wait_s(request, now)
        if now + (wait_s or 0.0) > request.latest_at:
            return self._refuse(
                request, request.late_cause, wait_s, max(0.0, request.latest_at - now)
            )
        usage = self._usage.get(request.tenant)
        most = self.limits.max_requests_per_tenant
        if most is not None and usage is not None and usage.num >= most:
            return self._refuse(request, RefusalCause.TENANT_FULL, wait_s)
        victims = self._find_victims(request)
        if victims is None:
            return self._refuse(request, RefusalCause.QUEUE_FULL, wait_s)
        displaced = tuple(
            (each, self._refuse(each, RefusalCause.DISPLACED, None)) for each in victims
        )
        for each in victims:
            self.leave(each, now)
        self._add(request, now)
        return displaced

    def take(self, model: str, now: float) -> QueuedRequest | None:
        """The next one, which waits no longer; None: no request for this model waits."""
        backlog = self._backlogs.get(model)
        if backlog is None or not len(backlog):
            return None
        request = backlog.classes[backlog.next_class(now)].take()
        backlog.rate.take(request.num_tokens, now)
        self._count_out(request, backlog, now)
        return request

    def leave(self, request: QueuedRequest, now: float) -> None:
        """It gives up; does nothing if it waits no longer."""
        backlog = self._backlogs.get(request.model)
        waiting = None if backlog is None else backlog.classes[request.priority]
        if backlog is not None and waiting is not None and request in waiting.by_age:
            waiting.remove(request)
            self._count_out(request, backlog, now)

    def expire(self, now: float) -> list[tuple[QueuedRequest, Refusal]]:
        """Those that will begin too late, as far as is known; they wait no longer."""
        expired: list[tuple[QueuedRequest, Refusal]] = []
        for backlog in self._backlogs.values():
            rate = backlog.rate.find(now) if len(backlog) else None
            for priority, waiting in backlog.classes.items():
                higher = backlog.count_higher(priority)
                for request, ahead in waiting.count_each_ahead() if waiting else ():
                    wait_s = None if rate is None else (higher + ahead) / rate
                    left_s = request.latest_at - now
                    if left_s <= 0 or (wait_s is not None and wait_s > TOLERANCE * left_s):
                        cause = request.late_cause
                        refusal = self._refuse(request, cause, wait_s, max(0.0, left_s))
                        expired.append((request, refusal))
        for request, _ in expired:
            self.leave(request, now)
        return expired

    def show(self, now: float) -> Iterator[WaitingTenant]:
        """What waits, in the order in which classes are served."""
        for model, backlog in self._backlogs.items():
            for priority, waiting in backlog.classes.items():
                for turns in waiting.turns.values():
                    num, oldest_s = len(turns.waiting), now - turns.first.at
                    yield WaitingTenant(
                        model, priority, turns.tenant, num, turns.num_tokens, oldest_s
                    )

    def check_invariants(self) -> None:
        """What is counted is what is there, within the limits."""
        num = tokens = 0
        usage: dict[str, int] = {}
        for backlog in self._backlogs.values():
            for waiting in backlog.classes.values():
                waiting.check_invariants()
                num += len(waiting)
                tokens += waiting.num_tokens
                for request in waiting.by_age:
                    usage[request.tenant] = usage.get(request.tenant, 0) + 1
        assert (num, tokens) == (self.num_requests, self.num_tokens)  # noqa: S101
        assert usage == {tenant: each.num for tenant, each in self._usage.items()}  # noqa: S101
        assert num <= self.limits.max_requests  # noqa: S101
        assert tokens <= self.limits.max_tokens or num == 1  # noqa: S101
        most = self.limits.max_requests_per_tenant
        assert most is None or max(usage.values(), default=0) <= most  # noqa: S101

    def _find_victims(self, request: QueuedRequest) -> list[QueuedRequest] | None:
        """Who must leave so that it may wait; None: it has no better claim than those here."""
        limits, victims = self.limits, list[QueuedRequest]()
        num, tokens = self.num_requests + 1, self.num_tokens + request.num_tokens
        charges = {tenant: usage.charge for tenant, usage in self._usage.items()}
        charges[request.tenant] = charges.get(request.tenant, 0.0) + request.charge
        while num > limits.max_requests or (tokens > limits.max_tokens and num > 1):
            victim = self._find_victim(request, victims, charges)
            if victim is None or len(victims) == MOST_DISPLACED:
                return None
            victims.append(victim)
            num, tokens = num - 1, tokens - victim.num_tokens
            charges[victim.tenant] -= victim.charge
        return victims

    def _find_victim(
        self, request: QueuedRequest, victims: list[QueuedRequest], charges: dict[str, float]
    ) -> QueuedRequest | None:
        """The last one of the lowest class, of the tenant with the most here."""
        for priority in reversed(PRIORITIES):
            found = [
                (charges[turns.tenant], last)
                for backlog in self._backlogs.values()
                for turns in backlog.classes[priority].turns.values()
                if (last := _last_of(turns, victims)) is not None
            ]
            if priority == request.priority:
                own = charges[request.tenant]
                found = [each for each in found if each[0] - each[1].charge >= own]
            if found:
                return max(found, key=lambda each: each[0])[1]
            if priority == request.priority:
                return None
        return None

    def _refuse(
        self,
        request: QueuedRequest,
        cause: RefusalCause,
        wait_s: float | None,
        left_s: float = 0.0,
    ) -> Refusal:
        retry_after_s = RETRY_AFTER_S if wait_s is None else wait_s - left_s
        retry_after_s = min(MOST_RETRY_AFTER_S, max(LEAST_RETRY_AFTER_S, retry_after_s))
        is_tenants = cause is RefusalCause.TENANT_FULL or self._is_over_share(request)
        return Refusal(cause, retry_after_s, is_tenants, wait_s)

    def _is_over_share(self, request: QueuedRequest) -> bool:
        """Whether its tenant has more here than the mean tenant, weights considered."""
        own = self._usage.get(request.tenant)
        total = sum(usage.charge for usage in self._usage.values())
        num_tenants = len(self._usage)
        return own is not None and num_tenants > 1 and own.charge > total / num_tenants

    def _add(self, request: QueuedRequest, now: float) -> None:
        backlog = self._backlogs.get(request.model)
        if backlog is None:
            backlog = self._backlogs[request.model] = _Backlog()
        if not len(backlog):
            backlog.rate.begin(now)
        backlog.classes[request.priority].add(request)
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        usage = self._usage.setdefault(request.tenant, _Usage())
        usage.num += 1
        usage.charge += request.charge

    def _count_out(self, request: QueuedRequest, backlog: _Backlog, now: float) -> None:
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        usage = self._usage[request.tenant]
        usage.num -= 1
        usage.charge -= request.charge
        if not usage.num:
            del self._usage[request.tenant]
        if not len(backlog):
            backlog.rate.end(now)


def _last_of(turns: Turns, victims: list[QueuedRequest]) -> QueuedRequest | None:
    return next((each for each in reversed(turns.waiting) if each not in victims), None)
