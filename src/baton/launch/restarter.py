"""Keeps one process of a launch running: starts the next one when it ends.

ended ─► pause ─► start ─► ready ─► …    each pause twice as long as the one before
  └─ too often: a gateway ends the launch; a worker is `failed` and tried again, others serve on
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.launch.child import ChildExited, describe_exit, likely_cause
from baton.launch.errors import FleetError
from baton.launch.plan import Ports

if TYPE_CHECKING:
    from baton.launch.slots import ProcessSlot
    from baton.launch.supervisor import Supervisor
    from baton.telemetry.process_status import Ready


class Restarter:
    """Of one slot whose process serves. Owned by the launcher's event loop."""

    def __init__(self, supervisor: Supervisor, slot: ProcessSlot) -> None:
        self._supervisor, self._slot = supervisor, slot
        self._context = supervisor.context

    async def run(self) -> None:
        """Until cancelled, or its machine is taken.

        Raises:
            ChildFailedError: the gateway has ended too often; or a process has ended, and none is
                to be started again.
        """
        slot = self._slot
        slot.restarts.note_ready(self._context.clock.now())
        while True:
            ended = await slot.child.wait_until_exited()
            if slot.child.preempted is not None:
                await self._forget(describe_exit(ended.returncode), slot.child.preempted)
                return
            if self._context.restarts is None:
                raise slot.failure(ended, "ended")
            await self._pause(ended, describe_exit(ended.returncode))
            while (problem := await self._try_to_start()) is not None:
                await self._pause(ended, problem)
            slot.num_restarts += 1
            ready = await slot.child.wait_until_ready()
            if not isinstance(ready, ChildExited):
                self._note_back(ready)
            elif self._context.members is not None:
                slot.ports = Ports()  # another process may have taken its ports meanwhile

    async def _forget(self, how: str, preempted: str) -> None:
        """Its machine is taken: it is not started again."""
        slot, display = self._slot, self._context.display
        display.print_line(f"{slot.name} ended ({how}), not started again: {preempted}")
        slot.restarter = None  # this one, which ends by itself
        await self._supervisor.remove(slot)

    async def _pause(self, ended: ChildExited, how: str) -> None:
        """Before the next start; `how` its process ended, or could not be started."""
        slot, display = self._slot, self._context.display
        history = slot.restarts
        delay_s = history.next_delay_s(self._context.clock.now())
        if not history.has_ended_too_often:
            slot.reason, limit = how, history.policy.max_restarts
            display.print_line(
                f"{slot.name} ended: {how}; restart in {delay_s:g} s"
                f" ({history.num_ends} of at most {limit})"
            )
            await asyncio.sleep(delay_s)
            return
        if slot.plan is None:
            raise slot.failure(ended, "ended too often")
        cause = likely_cause(ended.returncode, slot.child.last_lines)
        reason = f"ended too often ({how}): {cause}"
        slot.reason = f"{reason}; next try after {delay_s:g} s"
        display.print_line(
            f"{slot.name} {reason}; the other workers serve on; next try in {delay_s:g} s"
        )
        try:
            await asyncio.sleep(delay_s)
        finally:
            slot.reason = reason

    async def _try_to_start(self) -> str | None:
        """Start the next process: why that is not possible now, or None."""
        try:
            await self._supervisor.start_again(self._slot)
        except FleetError as exc:
            return str(exc)
        return None

    def _note_back(self, ready: Ready) -> None:
        slot, display = self._slot, self._context.display
        slot.restarts.note_ready(self._context.clock.now())
        slot.reason = ""
        display.print_line(f"{slot.name} is back at {ready.url}")
        has_moved = slot.url != ready.url
        slot.note_ready(ready)
        if has_moved and slot.plan is not None:
            try:
                self._supervisor.publish_members()
            except FleetError as exc:
                display.print_line(f"{slot.name} gets no requests: {exc}")
