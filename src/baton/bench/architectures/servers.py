"""One configuration's servers: started by the launcher of `baton up`, supervised, stopped.

Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from baton.bench.architectures.transfer_check import TraceCheck, TransferCheck
from baton.launch.supervisor import Ending, LaunchContext, Service, Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from baton.clock import Clock
    from baton.launch.plan import LaunchPlan


class Servers(Protocol):
    """Servers that are up, Baton's or a peer's."""

    @property
    def url(self) -> str:
        """Where all requests go."""
        ...

    @property
    def transfer_check(self) -> TransferCheck:
        """The evidence that KV moved, and where the time went."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about how they run."""
        ...

    @property
    def processes(self) -> dict[str, int]:
        """Each process's session by name; that of the gateway is `GATEWAY`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether a server has died."""
        ...

    async def until_ended(self) -> None:
        """Wait until a server has died."""
        ...


class InterruptedBenchError(Exception):
    """The benchmark was interrupted."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The servers' environment, with the cluster key unless a file has it; clock; interrupt."""

    environment: Mapping[str, str]
    clock: Clock
    interrupt: asyncio.Event


class LogDisplay:
    """See `Display`: all lines go to a file, as far as its disk has space."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def print_line(self, line: str) -> None:
        """See `Display`."""
        self._write(f"baton: {line}\n")

    def child_line(self, child: str, line: str) -> None:
        """See `Display`."""
        self._write(f"[{child}] {line}\n")

    def waiting_for(self, names: Sequence[str]) -> None:
        """See `Display`: the benchmark shows progress itself."""

    def announce(self, text: str) -> None:
        """See `Display`."""
        self._write(text)

    def _write(self, text: str) -> None:
        # A full disk must not stop the reading of a server's lines: the server would block.
        with suppress(OSError):
            self._file.write(text.encode())


class Fleet:
    """See `Servers`: Baton's own."""

    notes = ()

    def __init__(
        self, service: Service, supervisor: Supervisor, life: asyncio.Task[Ending]
    ) -> None:
        self.url = service.url
        self.transfer_check = TraceCheck(service.url)
        self._supervisor, self._life = supervisor, life

    @property
    def processes(self) -> dict[str, int]:
        """See `Servers`."""
        return self._supervisor.processes

    @property
    def is_over(self) -> bool:
        """See `Servers`."""
        return self._life.done()

    async def until_ended(self) -> None:
        """See `Servers`."""
        await asyncio.wait({self._life})


@asynccontextmanager
async def open_fleet(plan: LaunchPlan, context: ServerContext, log: Path) -> AsyncGenerator[Fleet]:
    """Servers that are all up; leaving it stops them. Their output goes to `log`.

    Raises:
        ChildFailedError: a server did not start, or died (raised on leaving).
        InterruptedBenchError: an interrupt before they were up.
    """
    with log.open("wb", buffering=0) as file:
        # A worker that restarts would be measured as a slow one.
        launch_context = LaunchContext(
            context.environment, context.clock, LogDisplay(file), restarts=None
        )
        supervisor = Supervisor(plan, launch_context)
        service: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        life = asyncio.create_task(supervisor.serve(service.set_result))
        try:
            await _until_up(service, life, context.interrupt)
            yield Fleet(service.result(), supervisor, life)
        finally:
            await _stop(supervisor, life)
    life.result()  # raises if a server died


async def _until_up(
    service: asyncio.Future[Service], life: asyncio.Task[Ending], interrupt: asyncio.Event
) -> None:
    wanted = asyncio.create_task(interrupt.wait())
    try:
        awaited: set[asyncio.Future[Any]] = {service, life, wanted}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
    if life.done():
        life.result()
    if not service.done():
        raise InterruptedBenchError


async def _stop(supervisor: Supervisor, life: asyncio.Task[Ending]) -> None:
    """Drain; kill if that is interrupted. Returns when all processes have ended."""
    supervisor.request_stop()
    try:
        await asyncio.shield(asyncio.wait({life}))
    except asyncio.CancelledError:
        supervisor.request_stop()
        await asyncio.wait({life})
        raise
