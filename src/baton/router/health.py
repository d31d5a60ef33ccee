"""Whether a worker can be relied on: a pure state machine for each, from probes and requests.

    healthy ⇄ doubted ──► ejected ──► half-open ──► recovering ──► healthy
                             ▲            │              │
                             └────────────┴──────────────┘

    connection refused            ejected at once: the process is gone
    two probes in a row not well  ejected: by its own word
    two probes in a row late      ejected, unless something was received meanwhile, or it is needed
    five requests in a row fail   ejected for a time, unless it is needed
    nothing is received from it   suspected, until something is: see `is_suspected`

What comes late or fails may be the fault of a busy machine, or of the requests; so for that at most
half of a model's workers are ejected, and never the last one (`may_eject`). A late worker that
answers its probes again is back; one that failed requests gets one trial request first, because a
broken engine often answers its probes. Each such ejection lasts longer than the one before, up
to `MAX_EJECTION_S`. Who is back gets a growing share of requests (`SlowStart`): its caches are
cold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

PROBES_TO_EJECT: Final = 2
REQUESTS_TO_EJECT: Final = 5
"""In a row, as in Envoy."""
APART_S: Final = 0.05
"""Requests that fail within this are one failure: a batch that died, a cut cable."""
MAX_EJECTION_S: Final = 60.0
TRIAL_S: Final = 30.0
"""After so long without an end of the trial there may be another one."""
FORGET_S: Final = 60.0
"""Failures are forgotten, and each past ejection."""
LEAST_SHARE: Final = 0.1


class HealthState(StrEnum):
    """What is thought of a worker."""

    HEALTHY = "healthy"
    DOUBTED = "doubted"
    SUSPECTED = "suspected"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    RECOVERING = "recovering"


class EjectionCause(StrEnum):
    """Why a worker was ejected."""

    GONE = "gone"
    UNWELL = "unwell"
    LATE = "late"
    FAILED = "failed"


CERTAIN: Final = frozenset({EjectionCause.GONE, EjectionCause.UNWELL})


@dataclass(frozen=True, slots=True)
class SlowStart:
    """A share of requests that grows over `lasts_s` seconds from `since` on."""

    since: float
    lasts_s: float

    def share(self, now: float) -> float:
        """Of what a worker gets otherwise: `LEAST_SHARE` to 1."""
        return min(1.0, max(LEAST_SHARE, (now - self.since) / self.lasts_s))


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """Seconds: of the first ejection for failed requests, and of the slow start (0: none)."""

    ejection_s: float = 5.0
    slow_start_s: float = 10.0


DEFAULT_HEALTH: Final = HealthOptions()


@dataclass(slots=True, eq=False)
class WorkerHealth:
    """One worker's. Times are seconds on any clock that does not go back.

    `reason` is the latest failure, for people; `ends_at` when the present ejection may end;
    `active_at` when anything was received from it: its process lives and runs. While
    `is_suspected`, its heartbeats are missing: it is used only where no other worker can be.
    """

    options: HealthOptions = DEFAULT_HEALTH
    cause: EjectionCause | None = None
    reason: str = ""
    ends_at: float = -inf
    slow_start: SlowStart | None = None
    num_ejections: int = 0
    num_failed_probes: int = 0
    num_failed_requests: int = 0
    active_at: float = -inf
    is_suspected: bool = False
    _is_half_open: bool = False
    _trial_ends_at: float | None = None
    _failed_at: float = -inf
    _calm_since: float = -inf

    @property
    def state(self) -> HealthState:
        """See the module."""
        if self.cause is not None:
            return HealthState.HALF_OPEN if self._is_half_open else HealthState.EJECTED
        if self.is_suspected:
            return HealthState.SUSPECTED
        if self.slow_start is not None:
            return HealthState.RECOVERING
        if self.num_failed_probes or self.num_failed_requests:
            return HealthState.DOUBTED
        return HealthState.HEALTHY

    @property
    def is_usable(self) -> bool:
        """Whether it gets requests as others do."""
        return self.cause is None and not self.is_suspected

    @property
    def takes_trial(self) -> bool:
        """Whether one request is to show if it is well again."""
        is_due = self._is_half_open and self._trial_ends_at is None
        return is_due and not self.is_suspected

    def pass_time(self, now: float) -> None:
        """What ends by itself: call it now and then, as with each probe."""
        if self.cause is EjectionCause.FAILED and now >= self.ends_at:
            self._is_half_open = True
        if self._trial_ends_at is not None and now >= self._trial_ends_at:
            self._trial_ends_at = None
        if self.slow_start is not None and self.slow_start.share(now) >= 1:
            self.slow_start = None
        if now - self._failed_at >= FORGET_S:
            self.num_failed_requests = 0
        if self.num_ejections and self.cause is None and now - self._calm_since >= FORGET_S:
            self.num_ejections -= 1
            self._calm_since = now

    def probe_ok(self, now: float) -> None:
        """It answered a probe: what only probes found is over."""
        self.active_at = now
        self.num_failed_probes = 0
        if self.cause not in {None, EjectionCause.FAILED} and now >= self.ends_at:
            self.recover(now)
        self.pass_time(now)

    def probe_late(self, began_at: float, now: float, reason: str, *, may_eject: bool) -> None:
        """A probe was not answered in time; no failure if it was active since `began_at`."""
        self.pass_time(now)
        if self.active_at >= began_at:
            return
        self._count_failed_probe(reason)
        if may_eject and self.num_failed_probes >= PROBES_TO_EJECT:
            self._eject(EjectionCause.LATE, now)

    def probe_failed(self, now: float, reason: str) -> None:
        """It answered a probe that it is not well, or something else."""
        self.pass_time(now)
        self._count_failed_probe(reason)
        if self.num_failed_probes >= PROBES_TO_EJECT:
            self._eject(EjectionCause.UNWELL, now)

    def lose(self, cause: EjectionCause, now: float, reason: str) -> None:
        """It is certainly not usable: its port refuses connections, for example."""
        self.reason = reason
        self._eject(cause, now)

    def answered(self, now: float) -> None:
        """It answered a request as it should."""
        self.active_at = now
        self.num_failed_requests = 0
        if self._is_half_open:  # a prefill worker's answer may come after its trial's end
            self.recover(now)

    def failed(self, now: float, reason: str, *, may_eject: bool) -> None:
        """A request failed there, and it is the worker's fault."""
        if now - self._failed_at < APART_S and not self._is_half_open:
            return
        self._failed_at = now
        self.num_failed_requests += 1
        self.reason = reason
        is_enough = may_eject and self.num_failed_requests >= REQUESTS_TO_EJECT
        if self._is_half_open or is_enough:
            self._eject(EjectionCause.FAILED, now)

    def suspect(self) -> None:
        """It broke off an answer, or took no connection: one probe more will be enough."""
        self.num_failed_probes = max(self.num_failed_probes, PROBES_TO_EJECT - 1)

    def begin_trial(self, now: float) -> None:
        """A request was placed there that shows if it is well again."""
        self._trial_ends_at = now + TRIAL_S

    def end_trial(self) -> None:
        """That request ended, and showed nothing unless `answered` or `failed` was called."""
        self._trial_ends_at = None

    def check_invariants(self) -> None:
        """A trial only where one is due, and an ejection has a cause."""
        assert not self._is_half_open or self.cause is EjectionCause.FAILED  # noqa: S101 (a checker asserts)
        assert self._trial_ends_at is None or self._is_half_open  # noqa: S101 (a checker asserts)
        assert self.cause is None or self.slow_start is None  # noqa: S101 (a checker asserts)

    def _count_failed_probe(self, reason: str) -> None:
        self.num_failed_probes += 1
        self.reason = reason

    def _eject(self, cause: EjectionCause, now: float) -> None:
        if self.cause is not None and not self._is_half_open:
            if cause in CERTAIN and self.cause not in CERTAIN:
                self.cause, self.ends_at = cause, now
            return
        if cause not in CERTAIN:
            self.num_ejections += 1
        self.cause, self.ends_at = cause, now + self._ejection_s(cause)
        self.slow_start, self._is_half_open, self._trial_ends_at = None, False, None

    def _ejection_s(self, cause: EjectionCause) -> float:
        if cause in CERTAIN:
            return 0.0
        times = self.num_ejections if cause is EjectionCause.FAILED else self.num_ejections - 1
        return min(MAX_EJECTION_S, times * self.options.ejection_s)

    def recover(self, now: float) -> None:
        """It is usable again, or another process: with a share that grows."""
        self.cause, self._is_half_open, self._trial_ends_at = None, False, None
        self.num_failed_probes = self.num_failed_requests = 0
        self._calm_since = now
        lasts_s = self.options.slow_start_s
        self.slow_start = SlowStart(now, lasts_s) if lasts_s > 0 else None


def may_eject(others: Collection[WorkerHealth]) -> bool:
    """Whether a worker may be ejected on a suspicion; `others` could serve its requests as well.

    At most half of all, itself included, and not the last one that is usable.
    """
    num_suspected = sum(w.cause is not None and w.cause not in CERTAIN for w in others)
    is_last = not any(w.is_usable for w in others)
    return not is_last and num_suspected < max(1, (len(others) + 1) // 2)
