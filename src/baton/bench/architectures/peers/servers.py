"""All servers of a peer's configuration: started, pinned, supervised, stopped.

Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp

from baton.bench.architectures.peers.plan import HOST, PeerPlan, Ports
from baton.bench.architectures.servers import InterruptedBenchError, LogDisplay, ServerContext
from baton.bench.architectures.transfer_check import MetricsCheck, NoCheck, TransferCheck
from baton.bench.architectures.usage import PROC, read_session
from baton.launch.child import describe_exit, likely_cause, read_line
from baton.launch.slots import GATEWAY, ChildFailedError
from baton.net.parent_process import exit_with_parent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
    from pathlib import Path

NUM_LAST_LINES: Final = 20
MAX_LINE_BYTES: Final = 64 * 1024
END_TIMEOUT_S: Final = 15.0
READ_REST_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """A command; all of its threads run on `cores` (None: anywhere)."""

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
        """Whether it has ended and its output is read."""
        return self._ended.done()

    async def until_ended(self) -> None:
        """Wait until it has ended and its output is read. May be cancelled."""
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Terminate it; kill its process group if it does not end."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait({self._ended}, timeout=END_TIMEOUT_S)
        finally:
            self._signal(signal.SIGKILL)
        await self.until_ended()

    def failure(self, what: str) -> ChildFailedError:
        """An error with its exit status and last lines."""
        lines, status = list(self._last_lines), self._process.returncode or 0
        quoted = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return ChildFailedError(
            f"{self.name} {what} ({describe_exit(status)}). Its last lines:\n{quoted}\n"
            f"  likely cause: {likely_cause(status, lines)}"
        )

    def _signal(self, number: signal.Signals) -> None:
        # A group outlives its leader: its other processes end too.
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
    """In the child before exec: takes no lock that another thread could hold."""
    exit_with_parent(parent_pid)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def pin_session(session: int, cores: Collection[int]) -> frozenset[int]:
    """Pin every thread of a session to `cores`; the other cores that they were allowed.

    vLLM's NixlConnector moves the computing thread of *every* server to the machine's last core (to
    reserve a core for transfers); two servers would then share that one.
    """
    share, strays = set(cores), set[int]()
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or read_session(folder) != session:
            continue
        # A thread may end meanwhile.
        with suppress(OSError):
            for task in (folder / "task").iterdir():
                strays |= _pin(int(task.name), share)
    return frozenset(strays)


def _pin(thread: int, share: set[int]) -> set[int]:
    with suppress(ProcessLookupError):
        found = os.sched_getaffinity(thread)
        if not found <= share:
            os.sched_setaffinity(thread, share)
            return found - share
    return set()


START_TIMEOUT_S: Final = 300.0
ASK_AGAIN_S: Final = 0.2
ASK_TIMEOUT_S: Final = 5.0
OK: Final = 200


@dataclass(slots=True)
class PeerFleet:
    """See `Servers`. The proxy or router is called `GATEWAY`."""

    ports: dict[str, Ports]
    front: Ports
    transfer_check: TransferCheck
    notes: tuple[str, ...] = ()
    running: list[PeerProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        """See `Servers`."""
        return url_of(self.front)

    @property
    def processes(self) -> dict[str, int]:
        """See `Servers`."""
        return {process.name: process.pid for process in self.running}

    @property
    def is_over(self) -> bool:
        """See `Servers`."""
        return any(process.is_ended for process in self.running)

    async def until_ended(self) -> None:
        """See `Servers`."""
        waits = [asyncio.create_task(process.until_ended()) for process in self.running]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


@asynccontextmanager
async def open_peer_fleet(
    plan: PeerPlan, context: ServerContext, log: Path
) -> AsyncGenerator[PeerFleet]:
    """Servers that are all up; leaving it stops them. Their output goes to `log`.

    Raises:
        ChildFailedError: a server did not start, or died (raised on leaving).
        InterruptedBenchError: an interrupt before they were up.
    """
    with log.open("wb", buffering=0) as file:
        display = LogDisplay(file)
        *ports, front = _free_ports(len(plan.servers) + 1)
        by_name = {server.name: each for server, each in zip(plan.servers, ports, strict=True)}
        fleet = PeerFleet(by_name, front, _choose_check(plan, by_name))
        starting = asyncio.create_task(_start(plan, context, display, fleet))
        try:
            await _until_done(starting, context.interrupt)
            yield fleet
            dead = [process for process in fleet.running if process.is_ended]
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await _stop(fleet)
    for process in dead:
        raise process.failure("ended")


async def _start(
    plan: PeerPlan, context: ServerContext, display: LogDisplay, fleet: PeerFleet
) -> None:
    urls = {name: url_of(ports) for name, ports in fleet.ports.items()}
    inherited = context.environment
    for server in plan.servers:
        own = fleet.ports[server.name]
        environment = plan.server_environment(inherited, server, own)
        start = Start(server.name, plan.server_command(own.http), environment, server.cores)
        await _spawn(start, display, fleet)
    async with aiohttp.ClientSession() as session:
        for process, url in zip(list(fleet.running), urls.values(), strict=True):
            await _until_up(session, process, f"{url}/health")
        start = Start(GATEWAY, plan.front_command(urls, fleet.front), inherited, None)
        process = await _spawn(start, display, fleet)
        await _until_up(session, process, f"{fleet.url}/v1/models")
    fleet.notes = tuple(_pin_again(plan, fleet))


async def _spawn(start: Start, display: LogDisplay, fleet: PeerFleet) -> PeerProcess:
    display.print_line(f"{start.name}: {' '.join(start.command)}")
    process = await spawn(start, lambda line: display.child_line(start.name, line))
    fleet.running.append(process)
    return process


async def _until_up(session: aiohttp.ClientSession, process: PeerProcess, url: str) -> None:
    """Wait until it answers.

    Raises:
        ChildFailedError: it ended, or did not answer in time.
    """
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not process.is_ended:
                try:
                    async with session.get(url, timeout=timeout) as response:
                        if response.status == OK:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError as exc:
        raise ChildFailedError(
            f"{process.name} does not answer {url} after {START_TIMEOUT_S:g} s"
        ) from exc
    raise process.failure("ended while starting")


async def _until_done(starting: asyncio.Task[None], interrupt: asyncio.Event) -> None:
    wanted = asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({starting, wanted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
    if not starting.done():
        raise InterruptedBenchError
    starting.result()


async def _stop(fleet: PeerFleet) -> None:
    """Stop the proxy first: the servers then finish its requests."""
    front = [process for process in fleet.running if process.name == GATEWAY]
    servers = [process for process in fleet.running if process.name != GATEWAY]
    for some in (front, servers):
        await asyncio.gather(*(process.stop() for process in some))


def _pin_again(plan: PeerPlan, fleet: PeerFleet) -> list[str]:
    pids = fleet.processes
    notes = []
    for server in plan.servers:
        strays = pin_session(pids[server.name], server.cores)
        if strays:
            notes.append(
                f"peer {plan.peer}: {server.name} had moved threads to cores {sorted(strays)}; "
                f"they were pinned to its share again, {list(server.cores)}"
            )
    return notes


def url_of(ports: Ports) -> str:
    """The URL of a process."""
    return f"http://{HOST}:{ports.http}"


def _choose_check(plan: PeerPlan, ports: dict[str, Ports]) -> TransferCheck:
    decodes = [url_of(ports[server.name]) for server in plan.servers if server.role == "decode"]
    return MetricsCheck(tuple(decodes)) if decodes else NoCheck()


def _free_ports(num: int) -> list[Ports]:
    """Free ports, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * num)]
        for each in sockets:
            each.bind((HOST, 0))
        numbers = [each.getsockname()[1] for each in sockets]
    return [Ports(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
