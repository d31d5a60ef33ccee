"""Carries out the autoscaler's decisions: one change of each role at a time, in the background.

A change may wait for a machine for minutes. Meanwhile the other roles are changed as decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Counts
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from baton.clock import Clock, Instant
from baton.errors import BatonError
from baton.launch.fleet import COUNTED, FleetControl, FleetSize, FleetStatus
from baton.router.scaling import Size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SLOW_S: Final = 60.0
"""A change that takes longer is reported, with what it waits for."""
RETRY_AFTER_S: Final = 60.0
"""After the fleet refused a size of a role, or did not reach it."""

log = logging.getLogger(__name__)


class ScalingMetrics:
    """What an autoscaler sees and does, as Prometheus reads it. Set by one thread, read by any."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        labels = ("role", "state")
        self.workers = Gauge(
            "baton_scaling_workers",
            "Workers that serve or start (present), that start, and that were asked for (wanted).",
            labels,
            registry=self.registry,
        )
        self.change_age = Gauge(
            "baton_scaling_change_age_seconds",
            "Since the change of a role that is under way began; 0: none is.",
            ("role",),
            registry=self.registry,
        )
        self.changes = Counter(
            "baton_scaling_changes",
            "Changes of a role that were done, refused, or ended without an effect (none).",
            ("role", "result"),
            registry=self.registry,
        )


def count_members(status: FleetStatus) -> tuple[Size, Size]:
    """Workers by role that serve or start (`COUNTED`), and those that start."""
    states = Counts[tuple[str, str]]((each.role, each.state) for each in status.members)
    present = (sum(states[role, state] for state in COUNTED) for role in Size._fields)
    return Size(*present), Size(*(states[role, "starting"] for role in Size._fields))


@dataclass(slots=True)
class _Change:
    had: int
    wanted: int
    began_at: Instant
    task: asyncio.Task[bool]
    is_reported: bool = False


class RoleChanges:
    """A fleet's changes. Owner: one event loop. `on_line` gets what the fleet reports of them."""

    def __init__(self, control: FleetControl, clock: Clock, on_line: Callable[[str], None]) -> None:
        self._control, self._clock, self._on_line = control, clock, on_line
        self._under_way: dict[str, _Change] = {}
        self._held_until: dict[str, Instant] = {}
        self.metrics = ScalingMetrics()

    def list_ended(self) -> list[str]:
        """Roles of which a change has ended that `note` has not taken note of."""
        return [role for role, change in self._under_way.items() if change.task.done()]

    def note(self, status: FleetStatus, ended: Collection[str]) -> None:
        """Take note of the fleet's state, of changes that had `ended` before it, and of slow ones.

        Raises:
            Exception: what a change has raised that is not a `BatonError`.
        """
        now, workers = self._clock.now(), self.metrics.workers
        sizes = zip(Size._fields, *count_members(status), strict=True)
        for role, num, num_starting in sizes:
            if role in ended:
                self._note_end(role, num, self._under_way.pop(role))
            change = self._under_way.get(role)
            age_s = 0.0 if change is None else now - change.began_at
            workers.labels(role, "present").set(num)
            workers.labels(role, "starting").set(num_starting)
            workers.labels(role, "wanted").set(num if change is None else change.wanted)
            self.metrics.change_age.labels(role).set(age_s)
            if change is not None and age_s >= SLOW_S and not change.is_reported:
                change.is_reported = True
                _report_slow(role, change.wanted, age_s, status)

    def begin(self, present: Size, wanted: Size, reason: str) -> None:
        """Start the changes from `present` to `wanted` of the roles that may be changed now.

        A role has to wait while an earlier change of it is under way, and for a while after one
        that had no effect.
        """
        now = self._clock.now()
        roles = {
            role: num
            for role, had, num in zip(Size._fields, present, wanted, strict=True)
            if num != had and role not in self._under_way and now >= self._held_until.get(role, now)
        }
        if not roles:
            return
        size = present._replace(**roles)
        self._on_line(f"{present} → {size}: {reason}")
        for role, num in roles.items():
            task = asyncio.create_task(self._carry_out(role, num), name=f"{role} to {num}")
            self._under_way[role] = _Change(getattr(present, role), num, now, task)
            self.metrics.workers.labels(role, "wanted").set(num)

    async def _carry_out(self, role: str, num: int) -> bool:
        """Whether it was done."""
        try:
            async for line in self._control.scale(FleetSize(**{role: num})):
                self._on_line(line)
        except BatonError as exc:
            log.warning(
                "the fleet keeps its %s workers: %s; next try in %.0f s", role, exc, RETRY_AFTER_S
            )
            return False
        return True

    def _note_end(self, role: str, num: int, change: _Change) -> None:
        result = "done" if change.task.result() else "refused"
        if result == "done" and num == change.had:
            result = "none"
            log.warning(
                "%d %s workers serve or start, and %d were asked for: `baton status` shows the "
                "others; next try in %.0f s", num, role, change.wanted, RETRY_AFTER_S,
            )  # fmt: skip
        if result != "done":
            self._held_until[role] = Instant(self._clock.now() + RETRY_AFTER_S)
        self.metrics.changes.labels(role, result).inc()


def _report_slow(role: str, wanted: int, age_s: float, status: FleetStatus) -> None:
    own = [each for each in status.members if each.role == role]
    waits_for = [
        f"{each.name} ({each.state}: {each.reason})" for each in own if each.state != "ready"
    ]
    log.warning(
        "%d %s workers were asked for %.0f s ago, and %d serve; the change waits for %s",
        wanted, role, age_s, len(own) - len(waits_for), "; ".join(waits_for) or "the fleet",
    )  # fmt: skip
