"""One position of a launch: its process now, and how the next one starts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError
from baton.launch.child import Child, ChildExited, describe_exit, likely_cause
from baton.launch.fleet import MAX_COUNT, FleetMember, MemberRole, MemberState
from baton.launch.plan import Ports, WorkerPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Instant
    from baton.launch.restarts import RestartHistory
    from baton.telemetry.process_status import Ready

GATEWAY: Final = "gateway"
KILL_MARGIN_S: Final = 5.0
"""How much longer than its own drain timeout a process may take before it is killed."""


class ChildFailedError(BatonError):
    """A process ended that should not have; its last log lines are in the message."""


@dataclass(slots=True)
class ProcessSlot:
    """Owned by the launcher's event loop.

    `command` gives the command line on given ports: 0 at first, then those that the first process
    announced, so that its peers find the next one where it was. `plan` is a worker's. `restarter`
    starts the next process when this one ends.
    """

    name: str
    command: Callable[[Ports], tuple[str, ...]]
    child: Child
    restarts: RestartHistory
    started_at: Instant
    plan: WorkerPlan | None = None
    ports: Ports = field(default_factory=Ports)
    url: str | None = None
    num_restarts: int = 0
    is_draining: bool = False
    reason: str = ""
    restarter: asyncio.Task[None] | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it gets nothing new: it is taken out, or its machine is."""
        return self.is_draining or self.child.preempted is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended too often, and does not serve."""
        is_serving = self.child.is_ready and not self.child.is_ended
        return self.restarts.has_ended_too_often and not is_serving

    @property
    def role(self) -> MemberRole:
        """What it does."""
        return "gateway" if self.plan is None else self.plan.role

    def note_ready(self, ready: Ready) -> None:
        """Keep the addresses that this process got for those to come."""
        self.url, self.ports = ready.url, Ports.of(ready)

    async def until_ready(self) -> Ready:
        """Until its process answers.

        Raises:
            ChildFailedError: it ended before that.
        """
        ready = await self.child.wait_until_ready()
        if isinstance(ready, ChildExited):
            raise self.failure(ready, "ended while starting")
        self.note_ready(ready)
        return ready

    async def stop_restarting(self) -> None:
        """From now on its process may end."""
        restarter, self.restarter = self.restarter, None
        if restarter is not None:
            restarter.cancel()
            await asyncio.gather(restarter, return_exceptions=True)

    def failure(self, ended: ChildExited, what: str) -> ChildFailedError:
        """The error for a process that ended, with its last lines and the likely cause."""
        lines = list(self.child.last_lines)
        quoted = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return ChildFailedError(
            f"{self.name} {what} ({describe_exit(ended.returncode)}). Its last lines:\n{quoted}\n"
            f"  likely cause: {likely_cause(ended.returncode, lines)}"
        )

    def describe(self, now: Instant, host: str) -> FleetMember:
        """What an operator sees of it."""
        has_ended, state = self.child.is_ended, self.state
        # Its process has reported that it serves; its restarter may not have taken note of that.
        reason = "" if state == "ready" else self.reason or self._explain_state()
        return FleetMember(
            name=self.name,
            role=self.role,
            state=state,
            host=host,
            url=self.url,
            pid=None if has_ended else self.child.pid,
            num_restarts=min(self.num_restarts, MAX_COUNT),
            up_s=None if has_ended else max(0.0, now - self.started_at),
            reason=reason,
        )

    @property
    def state(self) -> MemberState:
        """As an operator sees it; `starting` also from a process's end to the next one's start."""
        if self.is_leaving:
            return "ended" if self.child.is_ended else "draining"
        if self.has_failed:
            return "failed"
        return "ready" if self.child.is_ready and not self.child.is_ended else "starting"

    def _explain_state(self) -> str:
        if self.state == "starting":
            return self.child.phase or ""
        return self.child.preempted or ""


async def drain(slots: Sequence[ProcessSlot], timeout_s: float, *, is_urgent: bool) -> bool:
    """Ask processes to end, wait, kill those that are left; whether none had to be killed.

    Each may take `timeout_s`, or what it reports if that is more: it has read its own drain timeout
    when it started, as after an upgrade. `is_urgent`: they are killed without being asked.
    """
    ends = (_end(slot.child, timeout_s, is_urgent=is_urgent) for slot in slots)
    return all(await asyncio.gather(*ends))


async def _end(child: Child, timeout_s: float, *, is_urgent: bool) -> bool:
    if is_urgent:
        child.kill()
    else:
        child.terminate()
    try:
        async with asyncio.timeout(timeout_s + KILL_MARGIN_S) as limit:
            reported_s = await child.wait_until_draining()
            if reported_s is not None and reported_s > timeout_s:
                limit.reschedule(asyncio.get_running_loop().time() + reported_s + KILL_MARGIN_S)
            await child.wait_until_exited()
    except TimeoutError:
        child.kill()
        await child.wait_until_exited()
        return False
    return True
