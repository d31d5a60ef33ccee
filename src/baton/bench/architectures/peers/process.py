"""One process of a peer: spawn, lines, end. It knows nothing of Baton's announcements."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.launch.child import exit_with_parent, read_line
from baton.launch.exit_causes import describe_exit, likely_cause
from baton.launch.supervisor import ChildFailedError

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping, Sequence

NUM_LAST_LINES: Final = 20
MAX_LINE_BYTES: Final = 64 * 1024
END_TIMEOUT_S: Final = 15.0
READ_REST_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """What is started, and where: all of its threads on `cores` (None: anywhere)."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: tuple[int, ...] | None


class PeerProcess:
    """A running process, in a session of its own. Owned by one event loop."""

    def __init__(self, name: str, process: Process, on_line: Callable[[str], None]) -> None:
        self.name = name
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._ended = asyncio.create_task(self._follow(on_line))

    @property
    def pid(self) -> int:
        """Its process id, which is its session's too."""
        return self._process.pid

    @property
    def is_ended(self) -> bool:
        """Whether it has ended and its last lines are known."""
        return self._ended.done()

    async def until_ended(self) -> None:
        """Until it has ended and its last lines are known. May be cancelled."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Ask it to end; kill it, and all of its group, if it does not."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait({self._ended}, timeout=END_TIMEOUT_S)
        finally:
            self._signal(signal.SIGKILL)
        await self.until_ended()

    def failure(self, what: str) -> ChildFailedError:
        """It has ended: how, with its last lines."""
        lines, status = list(self._last_lines), self._process.returncode or 0
        quoted = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return ChildFailedError(
            f"{self.name} {what} ({describe_exit(status)}). Its last lines:\n{quoted}\n"
            f"  likely cause: {likely_cause(status, lines)}"
        )

    def _signal(self, number: signal.Signals) -> None:
        # A group outlives its leader: what is left of it ends too.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _follow(self, on_line: Callable[[str], None]) -> None:
        reader = asyncio.create_task(self._read_lines(on_line))
        await self._process.wait()
        await asyncio.wait({reader}, timeout=READ_REST_TIMEOUT_S)
        reader.cancel()

    async def _read_lines(self, on_line: Callable[[str], None]) -> None:
        stream = self._process.stdout
        while stream is not None and (raw := await read_line(stream)):
            line = raw.decode(errors="replace").rstrip("\n")
            self._last_lines.append(line)
            on_line(line)


async def spawn(start: Start, on_line: Callable[[str], None]) -> PeerProcess:
    """Start a process that ends when this one does.

    Raises:
        OSError: it could not be started.
    """
    process = await asyncio.create_subprocess_exec(
        *start.command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=start.environment,
        start_new_session=True,
        limit=MAX_LINE_BYTES,
        preexec_fn=partial(_prepare, os.getpid(), start.cores),
    )
    return PeerProcess(start.name, process, on_line)


def _prepare(parent_pid: int, cores: tuple[int, ...] | None) -> None:
    """In the child before exec: it takes no lock that another thread could hold."""
    exit_with_parent(parent_pid)
    if cores is not None:
        os.sched_setaffinity(0, cores)
