"""When a condition becomes an alert, and when that alert is over. Pure: times are given.

    (no entry) ── true ──► PENDING ── true for `for_s` ──► FIRING ── false for `keep_s` ──► RESOLVED
        ▲                     │
        └──────── false ──────┘

One entry for each alert and label set. `for_s` is Prometheus' `for`, `keep_s` its
`keep_firing_for`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.protocol.alerts import MAX_ALERTS, AlertName, AlertState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_FOLLOWED: Final = 256
NUM_RESOLVED: Final = MAX_ALERTS - MAX_FOLLOWED
"""That are remembered."""

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """What an alert asks for is true now, with these labels."""

    alert: AlertName
    labels: Labels
    summary: str
    value: float

    @property
    def key(self) -> tuple[AlertName, Labels]:
        """Of two conditions with one key the first counts."""
        return self.alert, self.labels


@dataclass(frozen=True, slots=True)
class Timing:
    """For how long a condition must hold, and for how long it must not until the alert is over."""

    for_s: float = 0.0
    keep_s: float = 0.0


@dataclass(slots=True)
class Followed:
    """An alert that is pending, firing or resolved. Instants are the caller's."""

    condition: Condition
    state: AlertState
    since: float
    true_at: float
    ended_at: float | None = None


@dataclass(slots=True)
class AlertLifecycle:
    """All alerts of one gateway. Owner: one thread.

    `num_dropped`: conditions of the latest `apply` that are not followed, as `MAX_FOLLOWED` others
    are.
    """

    timings: Mapping[AlertName, Timing]
    num_dropped: int = 0
    resolved: deque[Followed] = field(default_factory=lambda: deque(maxlen=NUM_RESOLVED))
    _followed: dict[tuple[AlertName, Labels], Followed] = field(default_factory=dict)

    @property
    def followed(self) -> list[Followed]:
        """Those that are firing, and then those that are pending; each by age."""
        return sorted(
            self._followed.values(),
            key=lambda each: (each.state is not AlertState.FIRING, each.since),
        )

    def num_firing(self, alert: AlertName) -> int:
        """Label sets with which an alert is firing."""
        return sum(
            each.state is AlertState.FIRING and each.condition.alert is alert
            for each in self._followed.values()
        )

    def apply(self, conditions: Iterable[Condition], now: float) -> list[Followed]:
        """These conditions hold now, and no others: alerts that began to fire, or are resolved."""
        self.num_dropped = 0
        changed: list[Followed] = []
        held: dict[tuple[AlertName, Labels], Condition] = {}
        for condition in conditions:
            held.setdefault(condition.key, condition)
        for key, condition in held.items():
            entry = self._followed.get(key)
            if entry is None:
                if len(self._followed) >= MAX_FOLLOWED:
                    self.num_dropped += 1
                    continue
                entry = Followed(condition, AlertState.PENDING, now, now)
                self._followed[key] = entry
            entry.condition, entry.true_at = condition, now
            timing = self._timing(condition.alert)
            if entry.state is AlertState.PENDING and now - entry.since >= timing.for_s:
                entry.state = AlertState.FIRING
                changed.append(entry)
        changed += self._end_others(held.keys(), now)
        return changed

    def check_invariants(self) -> None:
        """Raise if the records contradict each other.

        Raises:
            AssertionError: they do.
        """
        assert len(self._followed) <= MAX_FOLLOWED  # noqa: S101
        for key, entry in self._followed.items():
            assert entry.condition.key == key  # noqa: S101
            assert entry.state is not AlertState.RESOLVED  # noqa: S101
            assert entry.since <= entry.true_at  # noqa: S101
        assert all(each.state is AlertState.RESOLVED for each in self.resolved)  # noqa: S101

    def _end_others(self, held: Iterable[tuple[AlertName, Labels]], now: float) -> list[Followed]:
        ended: list[Followed] = []
        for key in self._followed.keys() - set(held):
            entry = self._followed[key]
            if entry.state is AlertState.PENDING:
                del self._followed[key]
            elif now - entry.true_at >= self._timing(entry.condition.alert).keep_s:
                del self._followed[key]
                entry.state, entry.ended_at = AlertState.RESOLVED, now
                self.resolved.append(entry)
                ended.append(entry)
        return ended

    def _timing(self, alert: AlertName) -> Timing:
        return self.timings.get(alert, Timing())
