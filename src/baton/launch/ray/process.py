"""One process: started again when it ends, drained when asked, its last lines kept."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from baton.launch.child import Child, ChildExited, describe_exit, likely_cause, spawn
from baton.launch.errors import FleetError
from baton.launch.plan import Ports
from baton.launch.restarts import RestartHistory, RestartPolicy
from baton.telemetry.process_status import Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.clock import Clock, Instant
    from baton.launch.fleet import MemberState

NUM_LINES: Final = 2000
MAX_LINE_CHARS: Final = 2000
START_TIMEOUT_S: Final = 60.0


class LogLines(msgspec.Struct, frozen=True):
    """Lines of a process; `next_number` is that of the line after them, from its start."""

    next_number: int
    lines: tuple[str, ...]


class LogTail:
    """The last lines of a process. Owned by one event loop."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._num_lines = 0

    def append(self, line: str) -> None:
        """Keep a line, its beginning if it is long."""
        self._lines.append(line[:MAX_LINE_CHARS])
        self._num_lines += 1

    def last(self, num_lines: int) -> LogLines:
        """At most so many lines, the last ones."""
        return self.since(self._num_lines - num_lines)

    def since(self, number: int) -> LogLines:
        """The lines from this number on that are still kept."""
        if number > self._num_lines:  # of a life on another host, which had more
            number = 0
        num_lines = min(self._num_lines - number, len(self._lines))
        lines = tuple(self._lines)[len(self._lines) - num_lines :] if num_lines > 0 else ()
        return LogLines(self._num_lines, lines)


class SupervisedProcess:
    """Owned by one event loop; `run` is called once.

    `command` gives the command line on given ports: 0 at first, then those of the life before, so
    that the next one is found where that was. `url` is where it answers, or will answer again.
    `inherited` are file descriptors that each of its processes gets.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[Ports], Sequence[str]],
        environment: Mapping[str, str],
        clock: Clock,
        *,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._name, self._command = name, command
        self._environment, self._clock = environment, clock
        self._restarts = RestartHistory(restarts or RestartPolicy())
        self._ports = Ports()
        self._child: Child | None = None
        self._successor: Child | None = None
        self._ready_at: Instant | None = None
        self._is_begun = self._is_draining = False
        self._stop_requested, self._ended = asyncio.Event(), asyncio.Event()
        self._next_start = asyncio.Event()
        self.state: MemberState = "starting"
        self.reason = ""
        self.url: str | None = None
        self.num_restarts = 0
        self.lines = LogTail()
        self.inherited: Sequence[int] = ()

    @property
    def pid(self) -> int | None:
        """The process's id, if it runs."""
        return None if self._child is None or self._child.is_ended else self._child.pid

    @property
    def phase(self) -> str | None:
        """What takes the time while it loads, where it reports that."""
        return None if self._child is None else self._child.phase

    @property
    def preempted(self) -> str | None:
        """Why its machine will be taken, if it reported that."""
        return None if self._child is None else self._child.preempted

    @property
    def up_s(self) -> float | None:
        """Seconds since it was ready; None while it is not."""
        return None if self._ready_at is None else self._clock.now() - self._ready_at

    async def run(self) -> None:
        """Keep it running until `stop`.

        One that has ended too often is `failed`, and tried again after ever longer pauses.
        """
        self._is_begun, how = True, ""
        try:
            while not self._stop_requested.is_set():
                try:
                    returncode = await self._run_once()
                    how, lines = describe_exit(returncode), self.lines.last(20).lines
                except OSError as exc:
                    returncode, lines = 1, (str(exc),)
                    how = f"cannot be started: {exc.strerror or exc}"
                if self._stop_requested.is_set():
                    break
                if self.preempted is not None:  # its supervisor starts elsewhere: it starts there
                    self.state, self.reason, self.url = "ended", self.preempted, None
                    return
                if self._successor is None:
                    await self._wait_for_restart(how, likely_cause(returncode, lines))
                self.num_restarts += 1
            self.state, self.reason = "ended", how
        finally:
            self._ended.set()

    async def _run_once(self) -> int:
        """From its start, or from that of its predecessor's end, to its end: the exit status."""
        child, self._successor = self._successor, None
        if child is None:
            if self._is_draining:
                self.state = "draining"
            elif not self._restarts.has_ended_too_often:  # else it is `failed` until it serves
                self.state = "starting"
            child = await self._spawn()
        self._child = child
        try:
            if self._stop_requested.is_set():
                child.terminate()
            ready = await child.wait_until_ready()
            if isinstance(ready, Ready):
                self._ports, self.url = Ports.of(ready), ready.url
                self._ready_at, self.reason = self._clock.now(), ""
                self._restarts.note_ready(self._ready_at)
                self.state = "draining" if self._is_draining else "ready"
            else:  # another process may have taken the ports in the meantime
                self._ports, self.url = Ports(), None
            return (await child.wait_until_exited()).returncode
        finally:
            self._ready_at = None
            child.kill()

    async def _spawn(self) -> Child:
        command = self._command(self._ports)
        return await spawn(
            self._name,
            command,
            self._environment,
            self.lines.append,
            inherited=self.inherited,
        )

    async def _wait_for_restart(self, how: str, cause: str) -> None:
        """Until it may start again, is replaced, or is to stop. `how` it ended, and the cause."""
        delay_s = self._restarts.next_delay_s(self._clock.now())
        if self._restarts.has_ended_too_often:
            self.state, self.url = "failed", None
            self.reason = f"ended too often ({how}): {cause}; next try after {delay_s:g} s"
        else:
            self.state, self.reason = "starting", f"ended: {how}; restart in {delay_s:g} s"
        self._next_start.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._next_start.wait()

    def mark_draining(self) -> None:
        """From now on gateways place nothing new here."""
        self._is_draining = True
        if self.state == "ready":
            self.state = "draining"

    async def replace(self, timeout_s: float) -> None:
        """Start another process on the same sockets; when it serves, drain and end this one.

        Raises:
            FleetError: the other one did not start; this one serves as before.
        """
        old, successor = self._child, await self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await successor.wait_until_ready()
        except TimeoutError:
            ready = ChildExited(0)
        if not isinstance(ready, Ready):
            successor.kill()
            raise FleetError(
                f"the new {self._name} did not start, and the old one serves as before; its last "
                f"line: {successor.last_lines[-1] if successor.last_lines else 'none'}"
            )
        self._successor = successor
        self._next_start.set()
        if old is not None:
            await _end_child(old, timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Drain and end it, and do not start it again; killed after `timeout_s`."""
        self._stop_requested.set()
        self._next_start.set()
        self.mark_draining()
        if not self._is_begun:
            self.state, self.reason = "ended", "it was not started yet"
            return
        if self._child is not None:
            await _end_child(self._child, timeout_s)
        await self._ended.wait()


async def _end_child(child: Child, timeout_s: float) -> None:
    if child.is_ended:
        return
    child.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait_until_exited()
    except TimeoutError:
        child.kill()
        await child.wait_until_exited()
